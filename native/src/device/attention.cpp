// Attention over rows on a device, built from ggml operations. A graph writes the new rows first: the attention reads a view of the
// written tensor, which keeps this order. Numbers are f32, except where a device's kernels compute in f16.

#include "device/graph_rows.h"

#include <algorithm>
#include <string>

namespace kvedge {

using T = ggml_tensor *;

namespace {

// Head sizes that are common to all devices' flash attention. They are listed here because an RPC server says yes to every operation.
bool common_size(int64_t d) { return d == 64 || d == 80 || d == 96 || d == 112 || d == 128 || d == 256; }

// Returns whether a device has flash attention for these head sizes.
bool has_flash_size(ggml_backend_dev_t device, int64_t d_k, int64_t d_v) {
    return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU || (common_size(d_k) && d_k == d_v);
}

}  // namespace

T attention_over(const GraphLayer & in, T q, T k, T v, T mask, ggml_backend_dev_t device) {
    ggml_context * c     = in.ctx;
    T              flash = ggml_flash_attn_ext(c, q, k, v, mask, in.scale, 0.0f, in.softcap);
    if (has_flash_size(device, k->ne[0], v->ne[0]) && ggml_backend_dev_supports_op(device, flash)) {
        ggml_prec_set_acc(flash, GGML_PREC_F32);
        if (in.sinks) {
            ggml_flash_attn_ext_add_sinks(flash, in.sinks);
        }
        return flash;
    }
    T weights = attention_weights(c, q, k, mask, in.scale, in.softcap);
    if (in.sinks) {
        ggml_soft_max_add_sinks(weights, in.sinks);
    }
    T out = ggml_mul_mat(c, ggml_cont(c, ggml_transpose(c, v)), weights);
    return ggml_permute(c, out, 0, 2, 1, 3);
}

// Only the CUDA backend, which has three names, and the CPU backend are known to allow parallel copies.
bool copies_at_once(ggml_backend_dev_t device) {
    const std::string name = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
    return name == "CUDA" || name == "ROCm" || name == "MUSA" || name == "CPU";
}

bool is_far(ggml_backend_dev_t device) { return ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)) == std::string("RPC"); }

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

bool attends_to(ggml_backend_dev_t device, const Storage & storage, int64_t d_k, int64_t d_v) {
    if (!storage.quantised()) {
        return true;
    }
    return storage.k == storage.v && ggml_type_of(storage.k) != GGML_TYPE_COUNT && has_flash_size(device, d_k, d_v);
}

T attention_weights(ggml_context * c, T q, T k, T mask, float scale, float softcap) {
    T logits = product(c, k, q);
    if (softcap != 0.0f) {
        logits = ggml_scale(c, ggml_tanh(c, ggml_scale(c, logits, scale / softcap)), softcap);
        scale  = 1.0f;
    }
    return ggml_soft_max_ext(c, logits, mask, scale, 0.0f);
}

T GraphRows::attend_even(const GraphLayer & in, size_t l) const {
    ggml_context *      c       = in.ctx;
    const DeviceLayer & layer   = slots_.layers[l];
    const Group &       group   = layer.groups[0];
    const int64_t       n       = in.q->ne[2], shown = slots_.visible();
    const auto &        written = inputs_.written(layer);
    T                   index   = ggml_view_1d(c, written.index, n, 0);
    T                   k       = ggml_set_rows(c, group.k, ggml_permute(c, in.k, 0, 2, 1, 3), index);
    T                   v       = ggml_set_rows(c, group.v, ggml_permute(c, in.v, 0, 2, 1, 3), index);
    const auto          seen    = [&](T x) { return ggml_view_3d(c, x, x->ne[0], shown, x->ne[2], x->nb[1], x->nb[2], 0); };
    T mask = ggml_view_2d(c, written.mask, shown, n, (size_t) shown * sizeof(ggml_fp16_t), 0);
    T keys = seen(k);
    T out  = attention_over(in, ggml_permute(c, in.q, 0, 2, 1, 3), keys, seen(v), mask, layer.device);
    out    = ggml_reshape_2d(c, whole(c, out), group.v->ne[0] * in.q->ne[1], n);
    return depend_on(out, sums.add_up(in, l, keys, mask));
}

// Returns the attention output of one token, [d_v * H / Hkv, heads].
T GraphRows::attend_group(const GraphLayer & in, const DeviceLayer & layer, const Group & group) const {
    ggml_context * c     = in.ctx;
    const int64_t  heads = (int64_t) group.heads.size(), dk = group.k->ne[0], dv = group.v->ne[0], n_kv = in.k->ne[1];
    const int64_t  share = in.q->ne[1] / n_kv, slots = group.slots;
    const auto     of    = [&](T x, int64_t width) {  // [width, heads]
        T rows = ggml_reshape_2d(c, whole(c, x), width, n_kv);
        return group.pick ? ggml_get_rows(c, rows, group.pick) : rows;
    };
    const size_t entry = sizeof(int64_t);
    T            index = ggml_view_3d(c, inputs_.written(layer).index, 1, 1, heads, entry, entry, group.entry * entry);
    T            row   = ggml_reshape_2d(c, index, 1, heads);
    const auto   write = [&](T to, T x, int64_t width) {
        T rows = ggml_set_rows(c, to, ggml_reshape_3d(c, of(x, width), width, 1, heads), row);
        return ggml_reshape_4d(c, rows, width, slots, 1, heads);
    };
    T k     = write(group.k, in.k, dk);
    T v     = write(group.v, in.v, dv);
    T from  = inputs_.of(layer).zeros;
    T zeros = ggml_view_4d(c, from, 1, 1, 1, heads, from->nb[2], from->nb[2], from->nb[2], 0);
    T mask  = ggml_set_rows(c, ggml_reshape_4d(c, group.mask, 1, slots, 1, heads), zeros, index);
    T q     = ggml_reshape_4d(c, of(in.q, dk * share), dk, 1, share, heads);
    T out   = attention_over(in, q, k, v, ggml_reshape_4d(c, mask, slots, 1, 1, heads), layer.device);
    return ggml_reshape_2d(c, whole(c, out), dv * share, heads);
}

T GraphRows::attend(const GraphLayer & in, size_t l) {
    const DeviceLayer & layer = slots_.layers[l];
    const bool          one   = in.q->ne[2] == 1;
    scales_.resize(slots_.layers.size());
    scales_[l] = in.scale;
    T out      = slots_.even ? attend_even(in, l) : one ? nullptr : attend_several(in, layer);
    if (!out) {
        for (const Group & group : layer.groups) {
            T heads = group.regions ? attend_regions(in, layer, group) : attend_group(in, layer, group);
            out     = out ? ggml_concat(in.ctx, out, heads, 1) : heads;
        }
        out = layer.joined ? ggml_get_rows(in.ctx, out, layer.joined) : out;
        out = ggml_reshape_2d(in.ctx, out, ggml_nelements(out), 1);
    }
    return depend_on(out, queries.write(in, layer, inputs_.written(layer).index));
}

}  // namespace kvedge
