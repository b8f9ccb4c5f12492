// The C interface of streams.

#include "compress/stream.h"

#include "glue/calls.h"

using namespace kvedge;

extern "C" kvedge_status kvedge_compress_stream(kvedge_cache * kv, int32_t seq_id, kvedge_error * err) {
    return in_context(kv, true, "kvedge_compress_stream: cache is NULL", "compress the stream", err, [&] {
        const kvedge_plan & plan = kv->sequences.plan_of(seq_id);
        if (const auto status = check_stream(plan, err); status != KVEDGE_OK) {
            return status;
        }
        SequenceState * const found = kv->sequences.find(seq_id);
        if (kv->keeping.on() || (found && found->whole.seq)) {
            return fail(err, KVEDGE_E_UNSUPPORTED, "whole rows are kept (kvedge_keep), but a stream drops rows for good; use either a "
                        "stream or kvedge_keep");
        }
        if (kv->sequences.storage.quantised()) {
            Sequence none(kv->layers.shapes, kv->sequences.storage);
            return open_stream(none, plan, err);
        }
        if (!found) {
            return ok(err);
        }
        SequenceState & state = *found;
        if (state.verified) {
            return fail_verifying(err);
        }
        kv->context.synchronize();
        if (const auto status = kv->to_host(state, err); status != KVEDGE_OK) {
            return status;
        }
        if (const auto status = kv->compressor.check(state, err); status != KVEDGE_OK) {
            return status;
        }
        if (!state.streaming) {
            if (const auto status = open_stream(*state.seq, plan, err); status != KVEDGE_OK) {
                return status;
            }
            state.streaming = true;
            if (!state.has_uncompressed_prompt) {  // compressed before, or loaded: no observations to choose by yet
                kv->compressor.release_cells(state);
                return ok(err);
            }
        }
        const auto status = kv->compressor.compress_stream(state, err);
        if (status == KVEDGE_OK) {
            kv->compressor.release_cells(state);
        }
        return status;
    });
}

extern "C" int32_t kvedge_cells(const kvedge_cache * kv, int32_t seq_id) {
    if (!kv) {
        return 0;
    }
    return asked(kv, -1, [&] {
        const SequenceState * state = kv->sequences.find(seq_id);
        return state ? state->seq->rows.n_tokens() - state->released : 0;
    });
}
