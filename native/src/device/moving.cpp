// Rows on their way to devices and back, as they lie where they come from or converted.

#include "device/graph_rows.h"

#include "device/groups.h"
#include "system/threads.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace kvedge {

namespace {

// Bytes from `offset` on, by way of memory that the device copies from at its full speed, where there is such memory: what
// threads ask for at once elsewhere, the driver copies one after the other.
template <class F> void in_pieces(ggml_backend_dev_t device, Staging & staging, size_t bytes, const F & move) {
    constexpr size_t PIECE = 4 << 20, SMALL = 256 << 10;
    if (bytes < SMALL || !ggml_backend_dev_host_buffer_type(device)) {
        move(nullptr, 0, bytes);
        return;
    }
    uint8_t * const piece = staging.room(device, PIECE);
    for (size_t at = 0; at < bytes; at += PIECE) {
        move(piece, at, std::min(PIECE, bytes - at));
    }
}

void send(ggml_backend_dev_t device, Staging & staging, ggml_tensor * to, size_t offset, const uint8_t * from, size_t bytes) {
    in_pieces(device, staging, bytes, [&](uint8_t * piece, size_t at, size_t n) {
        if (piece) {
            std::memcpy(piece, from + at, n);
        }
        ggml_backend_tensor_set(to, piece ? piece : from + at, offset + at, n);
    });
}

void receive(ggml_backend_dev_t device, Staging & staging, const ggml_tensor * from, size_t offset, uint8_t * to, size_t bytes) {
    in_pieces(device, staging, bytes, [&](uint8_t * piece, size_t at, size_t n) {
        ggml_backend_tensor_get(from, piece ? piece : to + at, offset + at, n);
        if (piece) {
            std::memcpy(to + at, piece, n);
        }
    });
}

// n rows of one type as rows of another, by ggml's own conversions.
void convert(ggml_type type, const void * from, ggml_type wanted, void * to, int64_t d, int64_t n) {
    if (type == wanted) {
        std::memcpy(to, from, ggml_row_size(type, d) * (size_t) n);
        return;
    }
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

// visit(stretch) for all stretches of rows of a group's keys or values that lie together on both sides.
template <class F> void GraphRows::each_stretch(const Store & store, size_t l, const Group & group, bool keys, const F & visit) const {
    for (size_t i = 0; i < group.heads.size(); i++) {
        const HeadView view = store.view((int32_t) l, group.heads[i]);
        int32_t        row  = 0;
        for (const auto * part : { &view.old, &view.pending }) {
            for (const Segment & s : *part) {
                for (int32_t done = 0; done < s.n;) {
                    const auto [slot, n] = slots_of(group.ordered ? &group.order[i] : nullptr, row, s.n - done);
                    visit(Stretch{ group.list(i) * (size_t) group.slots + (size_t) slot, (keys ? s.k : s.v).from(done), n });
                    row += n;
                    done += n;
                }
            }
        }
    }
}

// Uneven rows are many short stretches, which travel together; even ones may be large, and need no copy.
void GraphRows::put(const Store & from, size_t l, const Group & group, bool keys, Staging & staging) const {
    const auto           device = layers_[l].device;
    ggml_tensor * const  to  = keys ? group.k : group.v;
    const size_t         row = to->nb[1];
    std::vector<uint8_t> all(even_ ? 0 : ggml_nbytes(to), 0), some;
    each_stretch(from, l, group, keys, [&](const Stretch & x) {
        const ggml_type type = ggml_type_of(x.rows.type);
        const size_t    at = x.at * row, size = row * (size_t) x.n;
        const uint8_t * rows = x.rows.data;
        if (!even_) {
            convert(type, rows, to->type, all.data() + at, to->ne[0], x.n);
            return;
        }
        if (type != to->type) {
            some.resize(size);
            convert(type, rows, to->type, some.data(), to->ne[0], x.n);
            rows = some.data();
        }
        send(device, staging, to, at, rows, size);
    });
    if (!even_) {
        send(device, staging, to, 0, all.data(), all.size());
    }
}

void GraphRows::get(const Store & to, size_t l, const Group & group, bool keys, Staging & staging) const {
    const auto                device = layers_[l].device;
    const ggml_tensor * const from = keys ? group.k : group.v;
    const size_t              row  = from->nb[1];
    std::vector<uint8_t>      all(even_ ? 0 : ggml_nbytes(from)), some;
    if (!even_) {
        receive(device, staging, from, 0, all.data(), all.size());
    }
    each_stretch(to, l, group, keys, [&](const Stretch & x) {
        const ggml_type type = ggml_type_of(x.rows.type);
        const size_t    at = x.at * row, size = row * (size_t) x.n;
        auto *          rows = const_cast<uint8_t *>(x.rows.data);  // nobody else writes rows of a sequence that is away
        if (!even_) {
            convert(from->type, all.data() + at, type, rows, from->ne[0], x.n);
            return;
        }
        if (type == from->type) {
            receive(device, staging, from, at, rows, size);
            return;
        }
        some.resize(size);
        receive(device, staging, from, at, some.data(), size);
        convert(from->type, some.data(), type, rows, from->ne[0], x.n);
    });
}

// What is known of heads that are about to lie together, before there is memory for their rows.
GraphRows::Group GraphRows::placed(size_t l, HeadRows & of, const std::vector<int32_t> & heads, int32_t together) const {
    const LayerShape & shape = (*shapes_)[l];
    Group              group;
    group.together = together;
    group.heads    = heads;
    group.ordered  = form_.dropping || together > 1;
    group.queries  = together > 1 ? shape.n_heads / shape.n_heads_kv : 1;
    group.spare.resize(heads.size());
    group.used.resize(heads.size() / (size_t) together, 0);
    for (size_t i = 0; i < heads.size(); i++) {
        const auto    head = (size_t) heads[i];
        const int32_t rows = of.n[head];
        int32_t &     used = group.used[group.list(i)];
        group.first.push_back(used);
        group.order.emplace_back(group.ordered ? (size_t) rows : 0);
        std::iota(group.order.back().begin(), group.order.back().end(), used);
        group.biases.push_back(of.biases.empty() ? std::vector<float>() : std::move(of.biases[head]));
        used += rows;
    }
    return group;
}

// heads: in the order in which they lie, unless that is their own.
bool GraphRows::make_order(size_t l, const std::vector<int32_t> & heads) {
    Layer & layer = layers_[l];
    if (std::is_sorted(heads.begin(), heads.end())) {
        return true;
    }
    std::vector<int32_t> joined(heads.size());
    for (size_t i = 0; i < heads.size(); i++) {
        joined[(size_t) heads[i]] = (int32_t) i;
    }
    layer.order  = Tensors(1);
    layer.joined = layer.order.add(GGML_TYPE_I32, (int64_t) heads.size());
    if (!layer.order.allocate(layer.device)) {
        return refuse(layer.device);
    }
    ggml_backend_tensor_set(layer.joined, joined.data(), 0, joined.size() * sizeof(int32_t));
    return true;
}

// Where the rows of a layer's heads are about to lie: its groups, with the slots that they need but without memory.
bool GraphRows::lay_out(size_t l, HeadRows && rows) {
    const LayerShape &   shape = (*shapes_)[l];
    Layer &              layer = layers_[l];
    std::vector<int32_t> order((size_t) shape.n_heads_kv);
    std::iota(order.begin(), order.end(), 0);
    std::vector<std::vector<int32_t>> groups = { order };
    // kernels for many queries unpack all quantised rows first
    const bool shared = !even_ && reads_once(layer.device) && !form_.storage.quantised();
    if (!even_ && !shared) {
        groups = group_heads(rows.n);
        order.clear();
        for (const auto & heads : groups) {
            order.insert(order.end(), heads.begin(), heads.end());
        }
    }
    if (!make_order(l, order)) {
        return false;
    }
    for (const auto & heads : groups) {
        layer.groups.push_back(placed(l, rows, heads, shared ? shape.n_heads_kv : 1));
        Group &       group = layer.groups.back();
        const int32_t used  = group.most_used(), more = used / 32;  // of an answer, beside the few tokens that there is always room for
        group.regions = shared && has_ragged(layer.device, shape, form_.storage);
        // of a prompt that is yet to come, reserve() knows how many slots
        group.slots = used == 0 && even_ ? 0 : group.regions ? group.spread() : slots_for(used + more, group.together);
    }
    return true;
}

template <class F> void GraphRows::each_layer(int32_t n_threads, const F & copy) const {
    const bool at_once = std::all_of(layers_.begin(), layers_.end(), [](const Layer & x) { return !x.device || copies_at_once(x.device); });
    constexpr int32_t    MOST  = 8;  // more copy no faster
    const int32_t        n     = at_once ? std::min(n_threads, MOST) : 1;
    std::vector<Staging> staging((size_t) n);
    parallel_for(n, (int32_t) layers_.size(), [&](int32_t l, int32_t worker) {
        if (layers_[(size_t) l].device) {
            copy((size_t) l, staging[(size_t) worker]);
        }
    });
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

bool GraphRows::load(Store & from, int32_t n_threads) {
    std::vector<ggml_backend_dev_t> devices;
    for (const Layer & layer : layers_) {
        devices.push_back(layer.device);
    }
    even_ = !form_.dropping && holds_even(from, devices);
    const auto load_layer = [&](size_t l) {
        HeadRows rows;
        for (int32_t h = 0; h < (*shapes_)[l].n_heads_kv; h++) {
            rows.n.push_back(from.head_length((int32_t) l, h));
            if (!even_ && from.biased()) {
                rows.biases.emplace_back((size_t) rows.n.back());
                from.read_biases((int32_t) l, h, rows.biases.back().data());
            }
        }
        auto & groups = layers_[l].groups;
        return lay_out(l, std::move(rows)) &&
               std::all_of(groups.begin(), groups.end(), [&](Group & group) { return group.slots == 0 || make_group(l, group, group.slots); });
    };
    for (size_t l = 0; l < layers_.size(); l++) {
        if (layers_[l].device && !load_layer(l)) {
            for (Layer & layer : layers_) {
                layer.groups.clear();
            }
            return false;
        }
    }
    if (from.n_tokens() > 0) {
        each_layer(n_threads, [&](size_t l, Staging & staging) {
            for (const Group & group : layers_[l].groups) {
                if (group.k) {
                    put(from, l, group, true, staging);
                    put(from, l, group, false, staging);
                }
            }
        });
    }
    for (size_t l = 0; l < layers_.size(); l++) {
        if (layers_[l].device) {
            from.send_away(l);
        }
    }
    plan_inputs();
    return true;
}

bool GraphRows::fetch(Store & to, int32_t n_threads) {
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
    each_layer(n_threads, [&](size_t l, Staging & staging) {
        for (const Group & group : layers_[l].groups) {
            if (group.k) {
                get(to, l, group, true, staging);
                get(to, l, group, false, staging);
            }
        }
    });
    for (Layer & layer : layers_) {
        layer.groups.clear();
    }
    return true;
}

}  // namespace kvedge
