// Rows on their way to devices and back, as they lie where they come from or converted.

#include "backend/graph/rows.h"

#include "backend/graph/groups.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace kvedge {

namespace {

// n rows of one type as rows of another, by ggml's own conversions.
void convert(ggml_type type, const void * from, ggml_type wanted, void * to, int64_t d, int64_t n) {
    std::vector<float> values((size_t) (d * n));
    if (type == GGML_TYPE_F32) {
        std::memcpy(values.data(), from, values.size() * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(from, values.data(), d * n);
    }
    ggml_quantize_chunk(wanted, values.data(), to, 0, n, d, nullptr);
}

}  // namespace

ggml_type ggml_type_of(Type type) {
    switch (type) {
        case Type::f16: return GGML_TYPE_F16;
        case Type::bf16: return GGML_TYPE_BF16;
        case Type::f32: return GGML_TYPE_F32;
        case Type::q8_0: return GGML_TYPE_Q8_0;
        case Type::q4_0: return GGML_TYPE_Q4_0;
        default: return GGML_TYPE_COUNT;
    }
}

bool GraphRows::holds(const Storage & storage, int64_t d_k, int64_t d_v, ggml_backend_dev_t device) {
    if (!storage.quantised()) {
        return true;
    }
    return storage.k == storage.v && ggml_type_of(storage.k) != GGML_TYPE_COUNT && has_flash_size(device, d_k, d_v);
}

// The slot of a head's row, and how many of the next `most` rows lie one after the other from there on.
static std::pair<int32_t, int32_t> slots_of(const std::vector<int32_t> * order, int32_t row, int32_t most) {
    if (!order) {
        return { row, most };
    }
    const auto at = order->begin() + row;
    int32_t    n  = 1;
    while (n < most && at[n] == at[0] + n) {
        n++;
    }
    return { *at, n };
}

// visit(stretch) for all stretches of rows of a layer that lie together on both sides.
template <class F> void GraphRows::each_stretch(const Store & store, size_t l, const F & visit) const {
    for (const Group & group : layers_[l].groups) {
        for (size_t i = 0; i < group.heads.size(); i++) {
            const HeadView view = store.view((int32_t) l, group.heads[i]);
            int32_t        row  = 0;
            for (const auto * part : { &view.old, &view.pending }) {
                for (const Segment & s : *part) {
                    for (int32_t done = 0; done < s.n;) {
                        const auto [slot, n] = slots_of(form_.dropping ? &group.order[i] : nullptr, row, s.n - done);
                        const size_t at      = i * (size_t) group.slots + (size_t) slot;
                        visit(Stretch{ group.k, at, s.k.from(done), n });
                        visit(Stretch{ group.v, at, s.v.from(done), n });
                        row += n;
                        done += n;
                    }
                }
            }
        }
    }
}

void GraphRows::put(const Stretch & x) {
    const ggml_type type = ggml_type_of(x.rows.type), there = x.tensor->type;
    const size_t    row = x.tensor->nb[1], size = row * (size_t) x.n;
    if (type == there) {
        ggml_backend_tensor_set(x.tensor, x.rows.data, x.at * row, size);
        return;
    }
    std::vector<uint8_t> converted(size);
    convert(type, x.rows.data, there, converted.data(), x.tensor->ne[0], x.n);
    ggml_backend_tensor_set(x.tensor, converted.data(), x.at * row, size);
}

void GraphRows::get(const Stretch & x) {
    const ggml_type type = ggml_type_of(x.rows.type), there = x.tensor->type;
    const size_t    row = x.tensor->nb[1], size = row * (size_t) x.n;
    auto *          to  = const_cast<uint8_t *>(x.rows.data);  // nobody else writes rows of a sequence that is away
    if (type == there) {
        ggml_backend_tensor_get(x.tensor, to, x.at * row, size);
        return;
    }
    std::vector<uint8_t> fetched(size);
    ggml_backend_tensor_get(x.tensor, fetched.data(), x.at * row, size);
    convert(there, fetched.data(), type, to, x.tensor->ne[0], x.n);
}

bool GraphRows::load_layer(const Store & from, size_t l) {
    const LayerShape &   shape = (*shapes_)[l];
    Layer &              layer = layers_[l];
    std::vector<int32_t> rows;
    for (int32_t h = 0; h < shape.n_heads_kv; h++) {
        rows.push_back(from.head_length((int32_t) l, h));
    }
    auto groups = even_ ? std::vector<std::vector<int32_t>>{ {} } : group_heads(rows);
    for (int32_t h = 0; even_ && h < shape.n_heads_kv; h++) {
        groups[0].push_back(h);
    }
    std::vector<int32_t> joined((size_t) shape.n_heads_kv);
    const bool           biased = !even_ && from.biased();
    int32_t              at = 0;
    for (auto & heads : groups) {
        Group group;
        for (int32_t h : heads) {
            group.used.push_back(rows[(size_t) h]);
            group.order.emplace_back(form_.dropping ? (size_t) rows[(size_t) h] : 0);
            std::iota(group.order.back().begin(), group.order.back().end(), 0);
            group.biases.emplace_back(biased ? (size_t) rows[(size_t) h] : 0);
            if (biased) {
                from.read_biases((int32_t) l, h, group.biases.back().data());
            }
            joined[(size_t) h] = at++;
        }
        group.heads = std::move(heads);
        group.spare.resize(group.heads.size());
        if (!make_group(l, group, slots_for(group.most_used()))) {
            return false;
        }
        layer.groups.push_back(std::move(group));
    }
    if (layer.groups.size() > 1) {
        layer.order  = Tensors(1);
        layer.joined = layer.order.add(GGML_TYPE_I32, shape.n_heads_kv);
        if (!layer.order.allocate(layer.device)) {
            return refuse(layer.device);
        }
        ggml_backend_tensor_set(layer.joined, joined.data(), 0, joined.size() * sizeof(int32_t));
    }
    each_stretch(from, l, put);
    return true;
}

bool GraphRows::holds_even(const Store & store, const std::vector<ggml_backend_dev_t> & devices) {
    int32_t n = -1;
    if (store.biased()) {
        return false;
    }
    for (size_t l = 0; l < devices.size(); l++) {
        for (int32_t h = 0; devices[l] && h < store.shapes()[l].n_heads_kv; h++) {
            const int32_t length = store.head_length((int32_t) l, h);
            if (n >= 0 && length != n) {
                return false;
            }
            n = length;
        }
    }
    return true;
}

bool GraphRows::load(Store & from) {
    std::vector<ggml_backend_dev_t> devices;
    for (const Layer & layer : layers_) {
        devices.push_back(layer.device);
    }
    even_ = !form_.dropping && holds_even(from, devices);
    for (size_t l = 0; l < layers_.size(); l++) {
        if (layers_[l].device && !load_layer(from, l)) {
            for (Layer & layer : layers_) {
                layer.groups.clear();
            }
            return false;
        }
    }
    for (size_t l = 0; l < layers_.size(); l++) {
        if (layers_[l].device) {
            from.send_away(l);
        }
    }
    plan_inputs();
    return true;
}

bool GraphRows::fetch(Store & to) {
    for (size_t l = 0; l < layers_.size(); l++) {
        if (layers_[l].device && !to.bring_back(l)) {
            while (l-- > 0) {
                if (layers_[l].device) {
                    to.send_away(l);
                }
            }
            return false;
        }
    }
    for (size_t l = 0; l < layers_.size(); l++) {
        each_stretch(to, l, get);
        layers_[l].groups.clear();
    }
    return true;
}

}  // namespace kvedge
