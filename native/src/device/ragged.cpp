// Attention of one token over KV heads of different lengths by OWN_RAGGED (cuda/ragged.cu, cpu/ragged.cpp). All rows of a layer lie in
// one list of slots. Each KV head has a region of the list with room for more rows, and a span: first slot, number of rows. No row is
// padded. A mask, one number for each slot, exists only if rows have biases or may be dropped. The operation writes the token's own
// rows before it reads rows.

#include "device/graph_rows.h"

namespace kvedge {

using T = ggml_tensor *;

namespace {

// Views part of an i32 tensor, from number `offset` on, as [ne0, ne1] numbers of another type.
T viewed(ggml_context * c, T x, ggml_type type, int64_t ne0, int64_t ne1, int64_t offset) {
    const auto size = (int64_t) (ggml_type_size(type) / sizeof(int32_t));
    T          out  = ggml_view_1d(c, x, ne0 * ne1 * size, (size_t) offset * sizeof(int32_t));
    out->type  = type;
    out->ne[0] = ne0;
    out->ne[1] = ne1;
    out->nb[0] = ggml_type_size(type);
    out->nb[1] = out->nb[0] * (size_t) ne0;
    out->nb[2] = out->nb[3] = out->nb[1] * (size_t) ne1;
    return out;
}

// Builds OWN_RAGGED: [d_v, H, 1] of in.q [d_k, 1, H], in.k and in.v [d, slots], mask [slots] or NULL, spans [2 + H / Hkv, Hkv].
T attention_over_spans(const GraphLayer & in, T mask, T spans) {
    T out = ggml_flash_attn_ext(in.ctx, in.q, in.k, in.v, mask, in.scale, 0.0f, in.softcap);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    ggml_flash_attn_ext_add_sinks(out, in.sinks);
    out->src[5] = spans;
    return out;
}

}  // namespace

bool has_own(ggml_backend_dev_t device) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "kvedge_ragged_attention") != nullptr;
}

bool has_ragged(ggml_backend_dev_t device, const LayerShape & shape, const Storage & storage) {
    if (storage.quantised() || !has_own(device)) {
        return false;
    }
    constexpr size_t  TENSORS = 5;
    const GgmlContext context = make_context(TENSORS * ggml_tensor_overhead());
    ggml_context *    c       = context.get();
    T q     = ggml_new_tensor_3d(c, GGML_TYPE_F32, shape.d_k, 1, shape.n_heads);
    T k     = ggml_new_tensor_2d(c, ggml_type_of(storage.k), shape.d_k, REGION_ROOM);
    T v     = ggml_new_tensor_2d(c, ggml_type_of(storage.v), shape.d_v, REGION_ROOM);
    T spans = ggml_new_tensor_2d(c, GGML_TYPE_I32, 2 + shape.n_heads / shape.n_heads_kv, shape.n_heads_kv);
    return ggml_backend_dev_supports_op(device, attention_over_spans({ c, q, k, v, nullptr, 1.0f, shape.softcap }, nullptr, spans));
}

// Returns the attention output of one token, [d_v * H / Hkv, heads].
T GraphRows::attend_regions(const GraphLayer & in, const DeviceLayer & layer, const Group & group) const {
    ggml_context *       c      = in.ctx;
    const DeviceTotals & on     = slots_.devices[layer.on];
    const auto &         from   = inputs_.of(layer);
    const int64_t    heads  = (int64_t) group.heads.size(), dk = group.k->ne[0], dv = group.v->ne[0], n_heads = in.q->ne[1];
    T                index  = viewed(c, from.spans, GGML_TYPE_I64, heads, 1, index_at(on) + 2 * (int64_t) group.span);
    T                spans  = viewed(c, from.spans, GGML_TYPE_I32, on.span, heads, on.span * (int64_t) group.span);
    T              mask  = group.mask;
    if (slots_.form.dropping) {  // the new row takes the slot of a dropped row, whose bias or -inf the mask may still hold
        T zeros = ggml_view_2d(c, from.zeros, 1, heads, from.zeros->nb[2], 0);
        mask    = ggml_reshape_1d(c, ggml_set_rows(c, ggml_reshape_2d(c, mask, 1, group.slots), zeros, index), group.slots);
    }
    T q   = ggml_reshape_3d(c, whole(c, in.q), dk, 1, n_heads);
    T out = attention_over_spans({ c, q, group.k, group.v, in.sinks, in.scale, in.softcap }, mask, spans);
    out->src[6] = ggml_reshape_2d(c, whole(c, in.k), dk, heads);
    out->src[7] = ggml_reshape_2d(c, whole(c, in.v), dv, heads);
    out->src[8] = index;
    return ggml_reshape_2d(c, out, dv * n_heads / heads, heads);
}

}  // namespace kvedge
