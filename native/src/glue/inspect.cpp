// Reads what a cache holds, and the scores of its plan's scorer.

#include "glue/calls.h"
#include "kernels/widen.h"

#include <algorithm>

using namespace kvedge;

extern "C" kvedge_status kvedge_layer_shape(
    const kvedge_cache * kv, int32_t i, int32_t * n_heads, int32_t * n_heads_kv, int32_t * d_k, int32_t * d_v, kvedge_error * err) {
    const char * missing = "kvedge_layer_shape: cache or an output is NULL";
    return claimed(kv, n_heads && n_heads_kv && d_k && d_v, missing, "read the shape of a layer", err, [&] {
        if (!kv->layers.holds(i)) {
            return fail(err, KVEDGE_E_ARGUMENT, "kvedge_layer_shape: the layer does not exist");
        }
        const LayerShape & s = kv->layers.shapes[(size_t) i];
        *n_heads             = s.n_heads;
        *n_heads_kv          = s.n_heads_kv;
        *d_k                 = s.d_k;
        *d_v                 = s.d_v;
        return ok(err);
    });
}

extern "C" kvedge_status kvedge_head_rows(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, float * k, float * v, int32_t n_out, kvedge_error * err) {
    return claimed(kv, true, "kvedge_head_rows: cache is NULL", "copy the rows", err, [&] {
        const SequenceState * state = kv->sequences.find(seq_id);
        if (!state || !kv->layers.holds(i, head) || !k || !v) {
            return fail(err, KVEDGE_E_ARGUMENT, "kvedge_head_rows: the sequence, layer or KV head does not exist, or an output is NULL");
        }
        const LayerShape & s    = kv->layers.shapes[(size_t) i];
        const Store &      rows = state->seq->rows;
        if (const auto status = check_room("kvedge_head_rows", (size_t) rows.head_length(i, head), "rows", n_out, err); status != KVEDGE_OK) {
            return status;
        }
        if (const auto status = kv->to_host(*state, err); status != KVEDGE_OK) {
            return status;
        }
        const HeadView view  = rows.view(i, head);
        const size_t   n_old = widen_rows(view.old, s, k, v);
        widen_rows(view.pending, s, k + n_old * (size_t) s.d_k, v + n_old * (size_t) s.d_v);
        return ok(err);
    });
}

extern "C" kvedge_status kvedge_head_biases(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, float * out, int32_t n_out, kvedge_error * err) {
    return claimed(kv, true, "kvedge_head_biases: cache is NULL", "copy the biases", err, [&] {
        const SequenceState * state = kv->sequences.find(seq_id);
        if (!state || !kv->layers.holds(i, head) || !out) {
            return fail(err, KVEDGE_E_ARGUMENT, "kvedge_head_biases: the sequence, layer or KV head does not exist, or out is NULL");
        }
        const Store & rows = state->seq->rows;
        if (const auto status = check_room("kvedge_head_biases", (size_t) rows.head_length(i, head), "rows", n_out, err); status != KVEDGE_OK) {
            return status;
        }
        read_biases(rows, i, head, out);
        return ok(err);
    });
}

extern "C" kvedge_status kvedge_pending_scores(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, float * out, int32_t n_out, kvedge_error * err) {
    return claimed(kv, true, "kvedge_pending_scores: cache is NULL", "score the tokens", err, [&] {
        const SequenceState * state = kv->sequences.find(seq_id);
        if (!state || !kv->layers.holds(i) || !out) {
            return fail(err, KVEDGE_E_ARGUMENT, "kvedge_pending_scores: the sequence or layer does not exist, or out is NULL");
        }
        if (const auto status = kv->to_host(*state, err); status != KVEDGE_OK) {
            return status;
        }
        Bulk<float> scores;
        if (const auto status = score_pending(*state->seq, kv->sequences.plan_of(seq_id), i, scores, err); status != KVEDGE_OK) {
            return status;
        }
        const auto status = check_room("kvedge_pending_scores", scores.size(), "scores", n_out, err);
        if (status == KVEDGE_OK) {
            std::copy(scores.begin(), scores.end(), out);
        }
        return status;
    });
}
