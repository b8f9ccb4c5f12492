// Copies rows to devices and back, converting types if they differ. Also converts quantised rows to plain f16 rows on their device
// before a later message, because every prompt is read with plain rows.

#include "device/attention.h"
#include "device/slots.h"
#include "system/threads.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvedge {

namespace {

// Copies `bytes` bytes from the host to a tensor at `offset` (out) or back. Uses staging memory if the device has pinned host memory,
// because the driver makes parallel copies from other memory wait for each other.
void copy(bool out, ggml_backend_dev_t device, Staging & staging, ggml_tensor * there, size_t offset, uint8_t * here, size_t bytes) {
    constexpr size_t PIECE = 4 << 20, SMALL = 256 << 10;
    const bool       whole = bytes < SMALL || !ggml_backend_dev_host_buffer_type(device);
    uint8_t * const  piece = whole ? here : staging.room(device, PIECE);
    for (size_t at = 0; at < bytes; at += whole ? bytes : PIECE) {
        const size_t n = whole ? bytes : std::min(PIECE, bytes - at);
        if (out) {
            std::memcpy(piece, here + at, whole ? 0 : n);
            ggml_backend_tensor_set(there, piece, offset + at, n);
        } else {
            ggml_backend_tensor_get(there, piece, offset + at, n);
            std::memcpy(here + at, piece, whole ? 0 : n);
        }
    }
}

// Converts n rows of d numbers from one ggml type to another.
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

// n consecutive rows of a head: from row `at` of a device tensor on, and `rows` in host memory.
struct Stretch {
    size_t  at;
    Rows    rows;
    int32_t n;
};

constexpr int32_t ALL = INT32_MAX;

// The rows to copy: the last `last` rows of each head. out: to the devices, else back to the store.
struct Trip {
    bool    out;
    int32_t last = ALL;
};

// Calls visit(stretch) for the last `last` rows of each head of a group, in stretches that are consecutive on host and device.
template <class F> void each_stretch(const Store & store, size_t l, const Group & group, bool keys, int32_t last, const F & visit) {
    for (size_t i = 0; i < group.heads.size(); i++) {
        const HeadView view  = store.view((int32_t) l, group.heads[i]);
        const auto     slots = group.slots_of(i);
        const int32_t  n_all = store.head_length((int32_t) l, group.heads[i]), wanted = std::min(last, n_all);
        int32_t        skip  = n_all - wanted;
        auto           at    = slots.end() - wanted;
        for (const auto * part : { &view.old, &view.pending }) {
            for (const Segment & s : *part) {
                const int32_t before = std::min(skip, s.n);
                skip -= before;
                for (int32_t done = before; done < s.n;) {
                    int32_t n = 1;
                    while (n < s.n - done && at[n] == at[0] + n) {
                        n++;
                    }
                    visit(Stretch{ (size_t) at[0], (keys ? s.k : s.v).from(done), n });
                    at += n;
                    done += n;
                }
            }
        }
    }
}

// Copies the keys or values of a group. All rows of uneven heads are many short stretches and are copied in one piece; even heads have
// long stretches, and a few last rows are little data: both are copied stretch by stretch.
void move(const Trip & trip, const Slots & slots, const Store & store, size_t l, const Group & group, bool keys, Staging & staging) {
    const bool           out    = trip.out;
    const auto           device = slots.layers[l].device;
    ggml_tensor * const  there  = keys ? group.k : group.v;
    const size_t         row    = there->nb[1];
    const bool           single = slots.even || trip.last != ALL;
    std::vector<uint8_t> all(single ? 0 : ggml_nbytes(there), 0), some;
    if (!out && !single) {
        copy(out, device, staging, there, 0, all.data(), all.size());
    }
    each_stretch(store, l, group, keys, trip.last, [&](const Stretch & x) {
        const ggml_type type = ggml_type_of(x.rows.type);
        const size_t    at = x.at * row, size = row * (size_t) x.n;
        auto *          here = const_cast<uint8_t *>(x.rows.data);  // only this code writes host rows of a sequence on devices
        if (single && type == there->type) {
            copy(out, device, staging, there, at, here, size);
            return;
        }
        some.resize(single ? size : 0);
        uint8_t * const between = single ? some.data() : all.data() + at;
        if (out) {
            convert(type, here, there->type, between, there->ne[0], x.n);
        }
        if (single) {
            copy(out, device, staging, there, at, between, size);
        }
        if (!out) {
            convert(there->type, between, type, here, there->ne[0], x.n);
        }
    });
    if (out && !single) {
        copy(out, device, staging, there, 0, all.data(), all.size());
    }
}

void move_all(const Trip & trip, const Slots & slots, const Store & store) {
    const auto &         layers  = slots.layers;
    const bool           at_once = std::all_of(layers.begin(), layers.end(), [](const auto & x) { return !x.device || copies_at_once(x.device); });
    constexpr int32_t    MOST    = 8;  // more threads copy no faster
    const int32_t        n       = at_once ? std::min(slots.n_threads, MOST) : 1;
    std::vector<Staging> staging((size_t) n);
    parallel_for(n, (int32_t) layers.size(), [&](int32_t l, int32_t worker) {
        for (const Group & group : layers[(size_t) l].groups) {
            for (const bool keys : { true, false }) {
                if (group.k) {
                    move(trip, slots, store, (size_t) l, group, keys, staging[(size_t) worker]);
                }
            }
        }
    });
}

// Converts k and v [d, slots, lists] of `from` to the types of `to`, list by list, so that the f32 rows in between take little memory.
// False: the device lacks an operation or memory, or failed.
bool convert(Worker & worker, ggml_backend_dev_t device, ggml_tensor * const (&from)[2], ggml_tensor * const (&to)[2], int32_t n_threads) {
    constexpr size_t EACH  = 5;  // tensors for each list
    const int64_t    lists = from[0]->ne[2];
    GraphBuilder     builder(EACH * 2 * (size_t) lists);
    ggml_context *   c    = builder.context.get();
    const auto       list = [&](ggml_tensor * x, int64_t i) { return ggml_view_2d(c, x, x->ne[0], x->ne[1], x->nb[1], (size_t) i * x->nb[2]); };
    for (int64_t i = 0; i < 2 * lists; i++) {
        builder.add(ggml_cpy(c, ggml_cast(c, list(from[i / lists], i % lists), GGML_TYPE_F32), list(to[i / lists], i % lists)));
    }
    return !lacking(device, builder.graph) && worker.make_room(device, builder.graph, n_threads) && worker.compute(builder.graph);
}

}  // namespace

bool holds_even(const Store & store, const std::vector<ggml_backend_dev_t> & places) {
    int32_t n = -1;
    if (biased(store)) {
        return false;
    }
    for (size_t l = 0; l < places.size(); l++) {
        for (int32_t h = 0; places[l] && h < store.shapes()[l].n_heads_kv; h++) {
            const int32_t length = store.head_length((int32_t) l, h);
            if (n >= 0 && length != n) {
                return false;
            }
            n = length;
        }
    }
    return true;
}

bool Slots::load(Store & from) {
    std::vector<ggml_backend_dev_t> places;
    for (const DeviceLayer & layer : layers) {
        places.push_back(layer.device);
    }
    even = !form.dropping && holds_even(from, places);
    const auto load_layer = [&](size_t l) {
        HeadRows rows;
        for (int32_t h = 0; h < (*shapes)[l].n_heads_kv; h++) {
            rows.n.push_back(from.head_length((int32_t) l, h));
            if (!even && biased(from)) {
                rows.biases.emplace_back((size_t) rows.n.back());
                read_biases(from, (int32_t) l, h, rows.biases.back().data());
            }
        }
        auto & groups = layers[l].groups;
        return lay_out(l, std::move(rows)) &&
               std::all_of(groups.begin(), groups.end(), [&](Group & group) { return group.slots == 0 || make_group(l, group, group.slots); });
    };
    for (size_t l = 0; l < layers.size(); l++) {
        if (layers[l].device && !load_layer(l)) {
            for (DeviceLayer & layer : layers) {
                layer.groups.clear();
            }
            return false;
        }
    }
    if (from.n_tokens() > 0) {
        move_all({ true }, *this, from);
    }
    for (size_t l = 0; l < layers.size(); l++) {
        if (layers[l].device) {
            from.release_to_device(l);
        }
    }
    plan_devices();
    return true;
}

bool Slots::fetch(Store & to) {
    for (size_t l = 0; l < layers.size(); l++) {
        if (layers[l].device && !to.bring_back(l)) {
            while (l-- > 0) {
                if (layers[l].device) {
                    to.release_to_device(l);
                }
            }
            return false;
        }
    }
    move_all({ false }, *this, to);
    for (DeviceLayer & layer : layers) {
        layer.groups.clear();
    }
    return true;
}

void send_last(const Slots & slots, const Store & from, int32_t n) { move_all({ true, n }, slots, from); }

bool Slots::make_plain() {
    form.storage    = form.storage.plain();
    const bool made = make_plain_groups();
    give_back_memory();
    return made;
}

bool Slots::make_plain_groups() {
    for (size_t l = 0; l < layers.size(); l++) {
        for (Group & group : layers[l].groups) {
            const Room quantised = group;
            if (!quantised.k) {
                continue;
            }
            group.k = group.v = nullptr;
            if (!make_group(l, group, group.slots) || !convert(*devices[layers[l].on].worker, layers[l].device,
                                                               { quantised.k, quantised.v }, { group.k, group.v }, n_threads)) {
                static_cast<Room &>(group) = quantised;
                return false;
            }
        }
    }
    return true;
}

}  // namespace kvedge
