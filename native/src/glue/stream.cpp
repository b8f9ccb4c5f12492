// Streams in a context: the compression that leaves everything pending, and llama.cpp's cells, which it frees.

#include "compress/stream.h"

#include "glue/calls.h"

using namespace kvedge;

kvedge_status kvedge_cache::compress_stream(SequenceState & state, kvedge_error * err) {
    release_scratch();
    state.seq->projections = projections;
    Compression   outcome;
    const int32_t n_tokens = state.seq->rows.pending_length();
    const auto &  plan     = plan_of(state.id);
    Answer        next(plan, shapes);
    const auto    status   = kvedge::compress_stream(*state.seq, plan, threads(), outcome, err);
    if (status != KVEDGE_OK) {
        return status;
    }
    if (outcome.reduced) {
        state.note_compression(std::move(next), outcome, n_tokens);
    }
    state.armed = false;
    return ok(err);
}

// llama.cpp looks at its newest cell to see where the next batch goes on; the others it keeps for rows that are not its own.
void kvedge_cache::release_cells(int32_t seq_id, SequenceState & state) {
    const bool    every  = (int32_t) shapes.size() == model_layers;
    const int32_t newest = llama_memory_seq_pos_max(llama_get_memory(ctx), seq_id);
    if (!every || newest <= 0) {
        return;
    }
    releasing = true;
    llama_memory_seq_rm(llama_get_memory(ctx), seq_id, 0, newest);
    releasing            = false;
    const auto & pos     = state.seq->rows.contents().pos;
    size_t       at_last = 0;  // the tokens of an image may share a position
    while (at_last < pos.size() && pos[pos.size() - 1 - at_last] == newest) {
        at_last++;
    }
    state.released = (int32_t) (pos.size() - at_last);
}

extern "C" kvedge_status kvedge_compress_stream(kvedge_cache * kv, int32_t seq_id, kvedge_error * err) {
    return claimed(kv, true, "kvedge_compress_stream: cache is NULL", "compress the stream", err, [&] {
        if (!kv->ctx) {
            return fail(err, KVEDGE_E_STATE, "the llama_context of this cache has been freed");
        }
        const kvedge_plan & plan = kv->plan_of(seq_id);
        if (const auto status = check_stream(plan, err); status != KVEDGE_OK) {
            return status;
        }
        if (kv->storage.quantised()) {
            Sequence none(kv->shapes, kv->storage);
            return open_stream(none, plan, err);
        }
        const auto it = kv->seqs.find(seq_id);
        if (it == kv->seqs.end() || !it->second.seq) {
            return ok(err);
        }
        SequenceState & state = it->second;
        llama_synchronize(kv->ctx);
        if (const auto status = rows_at_hand(*kv, state, err); status != KVEDGE_OK) {
            return status;
        }
        if (state.bounded && !state.bounded->done()) {
            return fail_bounded(state, err);
        }
        if (state.replay) {
            return fail_replaying(err);
        }
        if (!state.streaming) {
            if (const auto status = open_stream(*state.seq, plan, err); status != KVEDGE_OK) {
                return status;
            }
            state.streaming = true;
            if (!state.armed) {  // compressed before, or from a session file: there is nothing to go by yet
                kv->release_cells(seq_id, state);
                return ok(err);
            }
        }
        const auto status = kv->compress_stream(state, err);
        if (status == KVEDGE_OK) {
            kv->release_cells(seq_id, state);
        }
        return status;
    });
}

extern "C" int32_t kvedge_cells(const kvedge_cache * kv, int32_t seq_id) {
    if (!kv) {
        return 0;
    }
    return asked(kv, -1, [&] {
        const SequenceState * state = find_seq(kv, seq_id);
        return state ? state->seq->rows.n_tokens() - state->released : 0;
    });
}
