// Heads of different lengths where the device has attention over them (cuda/ragged.cu, graph/ragged_cpu.cpp): all rows of a
// layer lie in one list of slots, each head's in a region of it that has room for more, and a span for each head says where.
// Nothing is padded and no mask is needed, but one number for each slot where rows have biases or go one by one.

#include "device/graph_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace kvedge {

using T = ggml_tensor *;

namespace {

constexpr int32_t ROOM = 32;  // tokens that there is always room for: a buffer that grows has a graph made anew

// Part of a tensor of i32 as numbers of another type.
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

// Where the spans end and the index begins: 64 bits wide.
int64_t index_at(int64_t span, size_t spanned) { return (span * (int64_t) spanned + 1) / 2 * 2; }

// q [d_k, 1, H], k and v [d, slots], mask [slots] or NULL, spans [2 + H / Hkv, Hkv]: [d_v, H, 1].
T attention_over_spans(const GraphLayer & in, T mask, T spans) {
    T out = ggml_flash_attn_ext(in.ctx, in.q, in.k, in.v, mask, in.scale, 0.0f, in.softcap);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    ggml_flash_attn_ext_add_sinks(out, in.sinks);
    out->src[5] = spans;
    return out;
}

}  // namespace

bool has_ragged(ggml_backend_dev_t device, const LayerShape & shape, const Storage & storage) {
    if (storage.quantised() || !ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "kvedge_ragged_attention")) {
        return false;
    }
    constexpr size_t  TENSORS = 5;
    const GgmlContext context = make_context(TENSORS * ggml_tensor_overhead());
    ggml_context *    c       = context.get();
    T q     = ggml_new_tensor_3d(c, GGML_TYPE_F32, shape.d_k, 1, shape.n_heads);
    T k     = ggml_new_tensor_2d(c, ggml_type_of(storage.k), shape.d_k, ROOM);
    T v     = ggml_new_tensor_2d(c, ggml_type_of(storage.v), shape.d_v, ROOM);
    T spans = ggml_new_tensor_2d(c, GGML_TYPE_I32, 2 + shape.n_heads / shape.n_heads_kv, shape.n_heads_kv);
    return ggml_backend_dev_supports_op(device, attention_over_spans({ c, q, k, v, nullptr, 1.0f, shape.softcap }, nullptr, spans));
}

// ---------------------------------------------------------------------------------------------------------
// Regions

std::vector<int32_t> GraphRows::Group::starts(int32_t room) const {
    std::vector<int32_t> out = { 0 };
    for (size_t i = 0; i < heads.size(); i++) {
        out.push_back(out.back() + used[i] - first[i] + room);
    }
    return out;
}

void GraphRows::Group::move_to(const std::vector<int32_t> & starts) {
    for (size_t i = 0; i < heads.size(); i++) {
        const int32_t by = starts[i] - first[i];
        first[i] += by;
        used[i] += by;
        for (auto * slots : { &order[i], &spare[i] }) {
            for (int32_t & slot : *slots) {
                slot += by;
            }
        }
    }
}

int32_t GraphRows::Group::spread() {
    const int32_t mean = used[0] / (int32_t) heads.size();
    used.clear();
    for (size_t i = 0; i < heads.size(); i++) {
        used.push_back(first[i] + (int32_t) order[i].size());
    }
    const auto to = starts(ROOM + mean / 32);  // a token takes a slot of each head, so that all regions are full at once
    move_to(to);
    return to.back();
}

bool GraphRows::grow_regions(size_t l, Group & group, const Incoming & incoming) {
    int32_t rows = 0;
    bool    fits = true;
    for (size_t i = 0; i < group.heads.size(); i++) {
        const int32_t end = i + 1 < group.heads.size() ? group.first[i + 1] : group.slots;
        fits              = fits && group.used[i] + incoming.n <= end;
        rows += group.used[i] - group.first[i];
    }
    const int32_t mean = rows / (int32_t) group.heads.size();
    const int32_t more = incoming.follow > incoming.n ? incoming.follow : incoming.n + (incoming.n + mean) / 8;
    const auto    to   = group.starts(ROOM + more);
    return fits || make_group(l, group, to.back(), to);
}

// Of rows that came with one; slots that rows were taken from, and that no other has got yet, are hidden.
void GraphRows::write_biases(const Group & group) {
    if (!group.mask) {
        return;
    }
    std::vector<ggml_fp16_t> biases((size_t) group.slots, ggml_fp32_to_fp16(0.0f));
    for (size_t i = 0; i < group.heads.size(); i++) {
        for (size_t row = 0; row < group.biases[i].size(); row++) {
            biases[(size_t) group.first[i] + row] = ggml_fp32_to_fp16(group.biases[i][row]);
        }
        for (const int32_t slot : group.spare[i]) {
            biases[(size_t) slot] = ggml_fp32_to_fp16(-INFINITY);
        }
    }
    ggml_backend_tensor_set(group.mask, biases.data(), 0, biases.size() * sizeof(ggml_fp16_t));
}

// index: slots of one token's rows, of all heads on the device.
void GraphRows::write_spans(size_t in, const std::vector<int64_t> & index) {
    const Inputs &       inputs = inputs_[in];
    const auto           end    = (size_t) index_at(inputs.span, inputs.spanned);
    std::vector<int32_t> all((size_t) inputs.spans->ne[0], 0);
    for (const Layer & layer : layers_) {
        for (const Group & group : layer.groups) {
            for (size_t i = 0; i < group.heads.size() && group.regions && layer.inputs == in; i++) {
                int32_t * const span = all.data() + (group.span + i) * (size_t) inputs.span;
                span[0]              = group.first[i];
                span[1]              = group.used[i] - group.first[i];
                std::memcpy(all.data() + end + 2 * (group.span + i), &index[group.entry + i], sizeof(int64_t));
            }
        }
    }
    ggml_backend_tensor_set(inputs.spans, all.data(), 0, all.size() * sizeof(int32_t));
}

// Of one token: [d_v * H / Hkv, heads].
T GraphRows::attend_regions(const GraphLayer & in, const Layer & layer, const Group & group) const {
    ggml_context * c     = in.ctx;
    const Inputs & from  = inputs_[layer.inputs];
    const int64_t  heads = (int64_t) group.heads.size(), dk = group.k->ne[0], dv = group.v->ne[0], n_heads = in.q->ne[1];
    T              index = viewed(c, from.spans, GGML_TYPE_I64, heads, 1, index_at(from.span, from.spanned) + 2 * (int64_t) group.span);
    T              spans = viewed(c, from.spans, GGML_TYPE_I32, from.span, heads, from.span * (int64_t) group.span);
    T              k     = ggml_set_rows(c, group.k, ggml_reshape_2d(c, whole(c, in.k), dk, heads), index);
    T              v     = ggml_set_rows(c, group.v, ggml_reshape_2d(c, whole(c, in.v), dv, heads), index);
    T              mask  = group.mask;
    if (form_.dropping) {  // the slot of a row that went had its bias, or was hidden
        T zeros = ggml_view_2d(c, from.zeros, 1, heads, from.zeros->nb[2], 0);
        mask    = ggml_reshape_1d(c, ggml_set_rows(c, ggml_reshape_2d(c, mask, 1, group.slots), zeros, index), group.slots);
    }
    T q   = ggml_reshape_3d(c, whole(c, in.q), dk, 1, n_heads);
    T out = attention_over_spans({ c, q, k, v, in.sinks, in.scale, in.softcap }, mask, spans);
    return ggml_reshape_2d(c, out, dv * n_heads / heads, heads);
}

}  // namespace kvedge
