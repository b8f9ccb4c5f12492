// Attention of several tokens over KV heads of different lengths, as for a later message. The rows of each KV head are copied side by
// side: new rows first, so that all heads share one causal mask of the new rows; padding last, where kernels skip it. Rows are copied
// as 32-bit words, bit for bit.

#include "device/graph_rows.h"

namespace kvedge {

using T = ggml_tensor *;

namespace {

// Copies the rows in `places` of x [d, slots, lists]. Returns [d, columns, 1, heads] of the type of x.
T side_by_side(ggml_context * c, T x, T places, int64_t columns, int64_t heads) {
    T rows = ggml_get_rows(c, flat_as(c, x, GGML_TYPE_I32), places);
    T out  = ggml_view_4d(c, rows, rows->ne[0], columns, 1, heads, rows->nb[1], (size_t) columns * rows->nb[1],
                          (size_t) columns * rows->nb[1], 0);
    out->type  = x->type;
    out->ne[0] = x->ne[0];
    out->nb[0] = ggml_type_size(x->type);
    return out;
}

// Returns the mask [columns, n, 1, heads]: each head's biases (from column `at` on), plus `fresh` [columns, n], which hides new rows.
T joined_mask(ggml_context * c, T biases, T fresh, int64_t columns, int64_t n, int64_t heads, size_t at) {
    const size_t size = sizeof(ggml_fp16_t), head = (size_t) columns * size;
    T            all  = ggml_view_4d(c, biases, columns, 1, 1, heads, head, head, head, at * size);
    return ggml_add(c, ggml_repeat_4d(c, all, columns, n, 1, heads), ggml_view_2d(c, fresh, columns, n, fresh->nb[1], 0));
}

// Returns the KV heads `pick` of x, whose KV heads are on dimension `last`, the last dimension.
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
    GraphBuilder      builder(NODES);
    ggml_context *    c       = builder.context.get();
    T                 places  = ggml_new_tensor_1d(c, GGML_TYPE_I32, 2 * N);
    T                 biases  = ggml_new_tensor_1d(c, GGML_TYPE_F16, 2 * N);
    T                 fresh   = ggml_new_tensor_2d(c, GGML_TYPE_F16, N, 2);
    builder.add(side_by_side(c, ggml_new_tensor_3d(c, GGML_TYPE_F16, D, N, 2), places, N, 2));
    builder.add(joined_mask(c, biases, fresh, N, 2, 2, 0));
    return !lacking(device, builder.graph);
}

// Returns the attention output [d_v * H, n].
T GraphRows::attend_several(const GraphLayer & in, const DeviceLayer & layer) const {
    ggml_context * c    = in.ctx;
    const auto &   from = inputs_.of(layer).several;
    const int64_t  n = in.q->ne[2], n_kv = in.k->ne[1], share = in.q->ne[1] / n_kv, dk = in.k->ne[0], dv = in.v->ne[0];
    const size_t   entry = sizeof(int64_t);
    const bool     picks = layer.groups[0].pick != nullptr;
    const auto     ready = [&](T x) { return picks ? ggml_cont(c, x) : x; };
    const T        new_k = ready(ggml_permute(c, in.k, 0, 2, 1, 3)), new_v = ready(ggml_permute(c, in.v, 0, 2, 1, 3));
    const T q   = ready(ggml_permute(c, ggml_reshape_4d(c, whole(c, in.q), dk, share, n_kv, n), 0, 2, 3, 1));  // [dk, n, share, n_kv]
    T       out = nullptr;
    for (const Group & group : layer.groups) {
        const auto heads = (int64_t) group.heads.size();
        const bool apart = !group.regions;
        T          index = ggml_view_2d(c, inputs_.written(layer).index, apart ? n : n * heads, apart ? heads : 1, (size_t) n * entry,
                                        group.entry * (size_t) n * entry);
        const auto write = [&](T to, T x) {  // x [d, n, n_kv]
            T rows = group.pick ? picked(c, x, group.pick, 2) : x;
            return ggml_set_rows(c, to, apart ? rows : ggml_reshape_2d(c, whole(c, rows), x->ne[0], n * n_kv), index);
        };
        T k = write(group.k, new_k), v = write(group.v, new_v);
        T of = group.pick ? picked(c, q, group.pick, 3) : q;
        for (const SidePart & part : group.parts) {
            const auto many   = (int64_t) part.heads;
            T          places = ggml_view_1d(c, from.places, many * part.columns, part.at * sizeof(int32_t));
            T          mask   = joined_mask(c, from.biases, from.fresh, part.columns, n, many, part.at);
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
