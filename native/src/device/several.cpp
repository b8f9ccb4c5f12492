// Attention of several tokens over heads of different lengths: a later message. Each head's rows are laid side by side in
// memory of one layer, the new ones first, so that which of these a token sees is the same for all heads, and padding is last,
// where kernels pass over it. The rows are copied as 32-bit words, bit for bit.

#include "device/graph_rows.h"

#include "system/threads.h"

#include <algorithm>
#include <numeric>

namespace kvedge {

using T = ggml_tensor *;

namespace {

constexpr int64_t MASK = 32 << 20;  // bytes of a mask that exist at a time
constexpr int64_t MOST = 4;         // parts of a layer: each is some launches

// [d, columns, 1, heads] of the type of x [d, slots, lists].
T side_by_side(ggml_context * c, T x, T places, int64_t columns, int64_t heads) {
    T rows = ggml_get_rows(c, flat_as(c, x, GGML_TYPE_I32), places);
    T out  = ggml_view_4d(c, rows, rows->ne[0], columns, 1, heads, rows->nb[1], (size_t) columns * rows->nb[1],
                          (size_t) columns * rows->nb[1], 0);
    out->type  = x->type;
    out->ne[0] = x->ne[0];
    out->nb[0] = ggml_type_size(x->type);
    return out;
}

// Of each head its biases, where they count for all tokens, and which of the new rows a token sees: [columns, n, 1, heads].
T joined_mask(ggml_context * c, T biases, T fresh, int64_t columns, int64_t n, int64_t heads, size_t at) {
    const size_t size = sizeof(ggml_fp16_t), head = (size_t) columns * size;
    T            all  = ggml_view_4d(c, biases, columns, 1, 1, heads, head, head, head, at * size);
    return ggml_add(c, ggml_repeat_4d(c, all, columns, n, 1, heads), ggml_view_2d(c, fresh, columns, n, fresh->nb[1], 0));
}

// Of a tensor whose KV heads are on its last dimension, those of a group.
T picked(ggml_context * c, T x, T pick, int last) {
    int64_t ne[4] = { x->ne[0], x->ne[1], x->ne[2], x->ne[3] };
    T       rows  = ggml_get_rows(c, ggml_reshape_2d(c, whole(c, x), ggml_nelements(x) / ne[last], ne[last]), pick);
    ne[last]      = pick->ne[0];
    return ggml_reshape_4d(c, rows, ne[0], ne[1], ne[2], ne[3]);
}

}  // namespace

bool reads_several(ggml_backend_dev_t device) {
    constexpr size_t  NODES = 16;
    constexpr int64_t N = 256, D = 64;
    Sketch            sketch(NODES);
    ggml_context *    c       = sketch.context.get();
    T                 places  = ggml_new_tensor_1d(c, GGML_TYPE_I32, 2 * N);
    T                 biases  = ggml_new_tensor_1d(c, GGML_TYPE_F16, 2 * N);
    T                 fresh   = ggml_new_tensor_2d(c, GGML_TYPE_F16, N, 2);
    sketch.add(side_by_side(c, ggml_new_tensor_3d(c, GGML_TYPE_F16, D, N, 2), places, N, 2));
    sketch.add(joined_mask(c, biases, fresh, N, 2, 2, 0));
    return !lacking(device, sketch.graph);
}

// Heads of a list of their own each are alike in length; where all share one list, few at a time keep the mask small.
void GraphRows::plan_parts(Group & group, int32_t n, size_t & columns) const {
    constexpr int32_t STEP  = 256;  // that kernels want
    const size_t      heads = group.heads.size();
    const auto        wide  = [&](size_t first, size_t end) {
        int32_t most = 0;
        for (size_t i = first; i < end; i++) {
            most = std::max(most, group.ordered ? (int32_t) group.order[i].size() : group.used[i]);
        }
        return (n + most + STEP - 1) / STEP * STEP;
    };
    const int64_t mask = (int64_t) sizeof(ggml_fp16_t) * wide(0, heads) * n * (int64_t) heads;
    const size_t  parts = group.together == 1 ? 1 : (size_t) std::clamp<int64_t>((mask + MASK - 1) / MASK, 1, MOST);
    const size_t  each  = (heads + parts - 1) / parts;
    group.parts.clear();
    for (size_t first = 0; first < heads; first += each) {
        const size_t end = std::min(first + each, heads);
        group.parts.push_back({ first, end - first, wide(first, end), columns });
        columns += (end - first) * (size_t) group.parts.back().columns;
    }
}

bool GraphRows::make_several(int32_t n) {
    std::vector<size_t>  columns(inputs_.size(), 0);
    std::vector<int32_t> most(inputs_.size(), 0);
    for (Layer & layer : layers_) {
        for (Group & group : layer.groups) {
            plan_parts(group, n, columns[layer.inputs]);
            for (const Part & part : group.parts) {
                most[layer.inputs] = std::max(most[layer.inputs], part.columns);
            }
        }
    }
    stamp_ = ++*stamps_;  // each graph has parts of its own
    for (size_t i = 0; i < inputs_.size(); i++) {
        SideBySide & x = inputs_[i].several;
        x.held         = Tensors(3);
        x.places       = x.held.add(GGML_TYPE_I32, (int64_t) columns[i]);
        x.biases       = x.held.add(GGML_TYPE_F16, (int64_t) columns[i]);
        x.fresh        = x.held.add(GGML_TYPE_F16, most[i], n);
        if (!x.held.allocate(inputs_[i].device)) {
            return refuse(inputs_[i].device);
        }
    }
    return true;
}

// Before single tokens: they look at masks that lie on the device.
void GraphRows::forget_several() {
    for (Inputs & inputs : inputs_) {
        if (inputs.several.places) {
            inputs.several = SideBySide();
            stamp_         = ++*stamps_;
        }
    }
    for (Layer & layer : layers_) {
        for (Group & group : layer.groups) {
            if (group.stale) {
                write_mask(group);
                group.stale = false;
            }
        }
    }
}

// The last n_ rows of a head are the new ones.
void GraphRows::write_part(const Group & group, const Part & part, int32_t * places, ggml_fp16_t * biases) const {
    const ggml_fp16_t    hidden = ggml_fp32_to_fp16(-INFINITY), seen = ggml_fp32_to_fp16(0.0f);
    std::vector<int32_t> slots;
    for (size_t i = part.first; i < part.first + part.heads; i++, places += part.columns, biases += part.columns) {
        slots = group.ordered ? group.order[i] : std::vector<int32_t>((size_t) group.used[i]);
        if (!group.ordered) {
            std::iota(slots.begin(), slots.end(), 0);
        }
        std::rotate(slots.begin(), slots.end() - n_, slots.end());
        const auto    list  = (int32_t) group.list(i) * group.slots;
        const auto &  came  = group.biases[i];
        const int32_t first = group.first[i], end = first + (int32_t) came.size();
        for (size_t j = 0; j < slots.size(); j++) {
            const bool old = slots[j] >= first && slots[j] < end && j >= (size_t) n_;
            places[j]      = list + slots[j];
            biases[j]      = old ? ggml_fp32_to_fp16(came[(size_t) (slots[j] - first)]) : seen;
        }
        std::fill(places + slots.size(), places + part.columns, places[0]);
        std::fill(biases + slots.size(), biases + part.columns, hidden);
    }
}

void GraphRows::write_several(bool causal) {
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY), seen = ggml_fp32_to_fp16(0.0f);
    for (size_t in = 0; in < inputs_.size(); in++) {
        SideBySide &             x = inputs_[in].several;
        const auto               n = (size_t) n_, width = (size_t) x.fresh->ne[0], columns = (size_t) x.places->ne[0];
        std::vector<int32_t>     places(columns);
        std::vector<ggml_fp16_t> biases(columns), fresh(width * n, seen);
        parallel_for(n_threads_, (int32_t) layers_.size(), [&](int32_t l, int32_t) {
            const Layer & layer = layers_[(size_t) l];
            for (const Group & group : layer.groups) {
                for (const Part & part : group.parts) {
                    if (layer.inputs == in) {
                        write_part(group, part, places.data() + part.at, biases.data() + part.at);
                    }
                }
            }
        });
        for (size_t t = 0; t < n && causal; t++) {
            std::fill_n(fresh.begin() + (std::ptrdiff_t) (t * width + t + 1), n - t - 1, hidden);
        }
        ggml_backend_tensor_set(x.places, places.data(), 0, ggml_nbytes(x.places));
        ggml_backend_tensor_set(x.biases, biases.data(), 0, ggml_nbytes(x.biases));
        ggml_backend_tensor_set(x.fresh, fresh.data(), 0, ggml_nbytes(x.fresh));
    }
}

// [d_v * H, n]
T GraphRows::attend_several(const GraphLayer & in, const Layer & layer) const {
    ggml_context * c    = in.ctx;
    const Inputs & from = inputs_[layer.inputs];
    const int64_t  n = in.q->ne[2], n_kv = in.k->ne[1], share = in.q->ne[1] / n_kv, dk = in.k->ne[0], dv = in.v->ne[0];
    const size_t   entry = sizeof(int64_t);
    const bool     picks = layer.groups[0].pick != nullptr;
    const auto     ready = [&](T x) { return picks ? ggml_cont(c, x) : x; };
    const T        new_k = ready(ggml_permute(c, in.k, 0, 2, 1, 3)), new_v = ready(ggml_permute(c, in.v, 0, 2, 1, 3));
    const T q   = ready(ggml_permute(c, ggml_reshape_4d(c, whole(c, in.q), dk, share, n_kv, n), 0, 2, 3, 1));  // [dk, n, share, n_kv]
    T       out = nullptr;
    for (const Group & group : layer.groups) {
        const auto heads = (int64_t) group.heads.size();
        const bool apart = group.together == 1;
        T          index = ggml_view_2d(c, from.written[turn_].index, apart ? n : n * heads, apart ? heads : 1, (size_t) n * entry,
                                        group.entry * (size_t) n * entry);
        const auto write = [&](T to, T x) {  // x [d, n, n_kv]
            T rows = group.pick ? picked(c, x, group.pick, 2) : x;
            return ggml_set_rows(c, to, apart ? rows : ggml_reshape_2d(c, whole(c, rows), x->ne[0], n * n_kv), index);
        };
        T k = write(group.k, new_k), v = write(group.v, new_v);
        T of = group.pick ? picked(c, q, group.pick, 3) : q;
        for (const Part & part : group.parts) {
            const auto many   = (int64_t) part.heads;
            T          places = ggml_view_1d(c, from.several.places, many * part.columns, part.at * sizeof(int32_t));
            T          mask   = joined_mask(c, from.several.biases, from.several.fresh, part.columns, n, many, part.at);
            T some = ggml_view_4d(c, of, dk, n, share, many, of->nb[1], of->nb[2], of->nb[3], part.first * of->nb[3]);
            T got  = attention_over(in, some, side_by_side(c, k, places, part.columns, many),
                                    side_by_side(c, v, places, part.columns, many), mask, layer.device);
            got    = ggml_reshape_2d(c, whole(c, got), dv * share * n, many);
            out    = out ? ggml_concat(c, out, got, 1) : got;
        }
    }
    if (layer.joined) {
        out = ggml_get_rows(c, out, layer.joined);
    }
    out = ggml_permute(c, ggml_reshape_3d(c, out, dv * share, n, n_kv), 0, 2, 1, 3);
    return ggml_reshape_2d(c, ggml_cont(c, out), dv * share * n_kv, n);
}

}  // namespace kvedge
