#include "glue/cache.h"

#include "ggml.h"
#include "system/error.h"

#include <algorithm>
#include <climits>
#include <new>

using namespace kvedge;

// ---------------------------------------------------------------------------------------------------------
// Graphs

static bool can_attend(const llama_attn_provider_layer & layer) {
    const ggml_tensor * q = layer.q;
    const ggml_tensor * k = layer.k;
    const ggml_tensor * v = layer.v;
    for (const ggml_tensor * t : { q, k, v }) {
        if (t->type != GGML_TYPE_F32 || t->nb[0] != sizeof(float) || t->ne[3] != 1) {
            return false;
        }
    }
    return !layer.kq_b && layer.max_alibi_bias == 0.0f && q->ne[0] == k->ne[0] && k->ne[1] == v->ne[1] &&
           q->ne[1] % k->ne[1] == 0 && k->ne[0] % 8 == 0 && v->ne[0] % 8 == 0 && k->ne[0] <= MAX_HEAD_SIZE &&
           v->ne[0] <= MAX_HEAD_SIZE && (!layer.sinks || layer.sinks->type == GGML_TYPE_F32);
}

// Builds `first`, with one or two tensors, and the attention behind it: a graph has a barrier between two operations.
static ggml_tensor * build_on_host(const llama_attn_provider_layer & layer, ggml_tensor * const (&from)[2],
                                   ggml_custom_op_t first, int n_tasks, LayerOp & op) {
    const int64_t d_v = op.kv->layers.shapes[(size_t) op.layer].d_v;
    ggml_tensor * args[]   = { from[0], from[1] };
    ggml_tensor * begun    = ggml_custom_4d(layer.ctx, GGML_TYPE_F32, 1, 1, 1, 1, args, from[1] ? 2 : 1, first, n_tasks, &op);
    ggml_tensor * q_args[] = { layer.q, begun, layer.sinks };
    return ggml_custom_4d(layer.ctx, GGML_TYPE_F32, d_v * layer.q->ne[1], layer.q->ne[2], 1, 1, q_args, layer.sinks ? 3 : 2, attend_op,
                          GGML_N_TASKS_MAX, &op);
}

// Builds the attention of a layer without keys and values, over the rows of the layer that has them.
ggml_tensor * kvedge_cache::build_reader(const llama_attn_provider_layer & layer) {
    const LayerOp * owner = layers.find(layer.il_kv);
    if (!owner) {
        layers.declined = true;
        return nullptr;  // llama.cpp has the rows
    }
    const auto          at      = owner->layer;
    const LayerShape &  shape   = layers.shapes[(size_t) at];
    auto &              readers = layers.readers;
    const ggml_tensor * q       = layer.q;
    auto op = std::find_if(readers.begin(), readers.end(), [&](const auto & o) { return o->reader == layer.il; });
    const bool same = q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && q->ne[3] == 1 && q->ne[0] == shape.d_k &&
                      q->ne[1] == shape.n_heads && layer.softcap == shape.softcap && !layer.kq_b && layer.max_alibi_bias == 0.0f &&
                      (!layer.sinks || layer.sinks->type == GGML_TYPE_F32);
    if (!same || layers.devices[(size_t) at] || (op == readers.end() && !sequences.all.empty())) {
        layers.unread = !same ? "but with other heads or another soft cap, which kvedge cannot compute; use the context without kvedge"
                              : "which kvedge can compress only on the host; keep the layers off the devices";
        return nullptr;
    }
    if (op == readers.end()) {
        readers.push_back(std::make_unique<LayerOp>(LayerOp{ this, at, layer.scale, layer.il }));
        op = readers.end() - 1;
    }
    return build_on_host(layer, { layer.q, nullptr }, start_op, 1, **op);
}

ggml_tensor * kvedge_cache::build_attn(const llama_attn_provider_layer & layer) {
    context.intermediate.forget();
    if (!layer.k || !layer.v) {
        return build_reader(layer);
    }
    LayerOp * op = can_attend(layer) ? layers.find(layer.il) : nullptr;
    if (!can_attend(layer) || (!op && !sequences.all.empty())) {  // the store was laid out without this layer
        layers.declined = true;
        return nullptr;
    }
    if (!op) {
        op = layers.add(layer, devices.place_of(layer), this);
        working.locks.reset();
    }
    const auto at = (size_t) op->layer;
    if (layers.devices[at]) {
        if (ggml_tensor * out = devices.build(layer, at, ubatch.is(layer.q->ne[2]) ? &ubatch.runs : nullptr)) {
            return out;
        }
    }
    return build_on_host(layer, { layer.k, layer.v }, store_op, GGML_N_TASKS_MAX, *op);
}

int kvedge_cache::ubatch_begin(const llama_attn_provider_ubatch & of) {
    const int code = ubatch.begin(of);
    if (code >= 0) {
        guard.hold_after_call();
    }
    return code;
}

// ---------------------------------------------------------------------------------------------------------
// Sequences

void kvedge_cache::finish_graphs() {
    if (std::any_of(ubatch.runs.begin(), ubatch.runs.end(), [](const auto & run) { return run->device != nullptr; })) {
        ubatch.leave();
    }
    devices.wait();
}

kvedge_status kvedge_cache::to_host(const SequenceState & state, kvedge_error * err) const {
    auto & self = const_cast<kvedge_cache &>(*this);
    self.finish_graphs();
    return self.devices.to_host(const_cast<SequenceState &>(state))
               ? KVEDGE_OK
               : fail(err, KVEDGE_E_MEMORY, "no memory on the host to copy the keys and values of the sequence from a device");
}

void kvedge_cache::clear() {
    finish_graphs();
    sequences.all.clear();
}

void kvedge_cache::seq_rm(int32_t seq_id, int32_t p0, int32_t p1) {
    if (context.releasing) {
        return;
    }
    finish_graphs();
    auto & all = sequences.all;
    p0         = std::max(p0, 0);
    p1         = p1 < 0 ? INT_MAX : p1;
    for (auto it = all.begin(); it != all.end();) {
        SequenceState & state  = it->second;
        const bool      wanted = seq_id < 0 || it->first == seq_id;
        const bool      any    = state.seq && holds(state.seq->rows, p0, p1);
        if (wanted && p0 == 0 && p1 == INT_MAX && (any || !state.request)) {
            it = all.erase(it);
            continue;
        }
        if (wanted && any) {
            state.drop_bounded();
            if (!devices.to_host(state) || !keeping.remove(state, p0, p1)) {
                context.deny(KVEDGE_E_MEMORY, "no memory on the host to remove tokens of a sequence, so the whole sequence was removed; "
                                              "decode the sequence again");
                it = all.erase(it);
                continue;
            }
            state.weights.valid = false;
            if (state.replay) {
                state.replay->spoiled = true;
            }
            state.replayed = 0;  // the rows of the chunks have moved
            state.cut(state.seq->rows.n_tokens());
        }
        ++it;
    }
}

// Returns whether the copied tokens of `source` cover all tokens of `there`. The copy then replaces `there`, which may be an older copy.
static bool covers(const Store & source, int32_t p0, int32_t p1, const Store & there) {
    const auto &  from = source.contents().pos, & to = there.contents().pos;
    const int32_t last = from.empty() ? -1 : *std::max_element(from.begin(), from.end());
    return std::all_of(to.begin(), to.end(), [&](int32_t p) { return p >= p0 && p < p1 && p <= last; });
}

bool kvedge_cache::seq_cp(int32_t from, int32_t to, int32_t p0, int32_t p1) try {
    SequenceState * source = sequences.find(from);
    p0                     = std::max(p0, 0);
    p1                     = p1 < 0 ? INT_MAX : p1;
    if (from == to || !source || !holds(source->seq->rows, p0, p1)) {
        return true;
    }
    if (source->whole_in_use()) {
        return context.deny(KVEDGE_E_STATE, "a verification of drafts has begun; call kvedge_verify_end before you copy the sequence");
    }
    if (const SequenceState * there = sequences.find(to); there && !covers(source->seq->rows, p0, p1, there->seq->rows)) {
        return context.deny(KVEDGE_E_UNSUPPORTED, "the target of a sequence copy holds tokens that the copy does not replace; remove these "
                                                  "tokens first (llama_memory_seq_rm)");
    }
    finish_graphs();
    auto copy = devices.to_host(*source) ? source->seq->clone() : nullptr;
    if (!copy) {
        throw std::bad_alloc();
    }
    SequenceState state;  // becomes the target when nothing can fail any more
    state.id  = to;
    state.seq = std::move(copy);
    keeping.share(*source, state);
    for (Sequence * seq : { state.seq.get(), state.whole.seq.get() }) {
        if (seq) {
            seq->remove(0, p0);
            seq->remove(p1, INT_MAX);
        }
    }
    (ContinuationState &) state = *source;
    state.cut(state.seq->rows.n_tokens());
    state.note_peak();
    sequences.all[to] = std::move(state);
    return true;
} catch (const std::bad_alloc &) {
    return context.deny(KVEDGE_E_MEMORY, "no memory to copy a sequence");
}

void kvedge_cache::seq_keep(int32_t seq_id) {
    finish_graphs();
    auto & all = sequences.all;
    for (auto it = all.begin(); it != all.end();) {
        it = it->first == seq_id ? std::next(it) : all.erase(it);
    }
}
