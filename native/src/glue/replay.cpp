// A second pass over a prompt, for scorer "replay": the tokens of the pass come and go, and leave only scores.

#include "glue/calls.h"

#include <algorithm>
#include <climits>

using namespace kvedge;

static kvedge_status check_chunk(const kvedge_cache & kv, const SequenceState & state, const kvedge_replay_chunk & chunk, kvedge_error * err) {
    const int32_t       n     = state.seq->rows.pending_length();
    const llama_model * model = llama_get_model(kv.context.llama);
    const kvedge_plan & plan  = kv.sequences.plan_of(state.id);
    if (!plan_observes(plan).again) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "scorer '%s' with these settings uses no second pass over the prompt; compress the prompt "
                    "without one", plan.scorer->name);
    }
    if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "this model has recurrent layers, which cannot undo a second pass over the prompt; set "
                    "scorer.source=prompt");
    }
    if (state.replay) {
        return fail_replaying(err);
    }
    if (state.verified) {
        return fail_verifying(err);
    }
    if (state.streaming || state.request || n == 0 || state.seq->rows.evicting()) {
        return fail(err, KVEDGE_E_STATE, "a second pass needs an uncompressed prompt, but the prompt is a stream, bounded, or compressed "
                    "already; clear the sequence and read the prompt again");
    }
    if (chunk.first < 0 || chunk.first >= chunk.last || chunk.last > n || chunk.sinks < 0 || chunk.sinks > n || chunk.n_tokens < 1) {
        return fail(err, KVEDGE_E_ARGUMENT, "a chunk of tokens %d to %d with %d sinks and n_tokens %d does not fit a prompt of %d tokens; "
                    "use 0 <= first < last, and numbers within the prompt", chunk.first, chunk.last, chunk.sinks, chunk.n_tokens, n);
    }
    const int32_t n_read = state.seq->observed.have().peaks ? state.replayed : 0;  // an older pass may have been dropped
    if (chunk.first > n_read) {
        return fail(err, KVEDGE_E_STATE, "a chunk begins at token %d, but the second pass has read only %d tokens; read the chunks in "
                    "order", chunk.first, n_read);
    }
    return ok(err);
}

// Makes room for the scores of the pending tokens, which may be more than at the last chunk. anew: without the scores of earlier chunks.
// False: no memory; the pass begins anew.
static bool make_room(SequenceState & state, const Observation & wanted, bool anew) {
    Observed & seen = state.seq->observed;
    if (anew) {
        state.replayed = 0;
        seen.drop_peaks();
        int32_t & missing = seen.missing.of[quantity::peaks];
        missing           = std::max(missing, 1);
    }
    if (!make_room(*state.seq, peaks_of(wanted), 0)) {
        seen.drop_peaks();
        return false;
    }
    return true;
}

extern "C" kvedge_status kvedge_replay_begin(
    kvedge_cache * kv, int32_t seq_id, const kvedge_replay_chunk * chunk, kvedge_error * err) {
    return claimed(kv, chunk, "kvedge_replay_begin: cache or chunk is NULL", "begin a second pass over the prompt", err, [&] {
        SequenceState * const found = kv->sequences.find(seq_id);
        if (!kv->context.llama || !found) {
            return fail(err, KVEDGE_E_STATE, "sequence %d has no prompt for a second pass; read a prompt first", seq_id);
        }
        SequenceState & state = *found;
        if (const auto status = check_chunk(*kv, state, *chunk, err); status != KVEDGE_OK) {
            return status;
        }
        kv->context.synchronize();
        kv->finish_graphs();
        const int32_t     n      = state.seq->rows.pending_length();
        const Observation wanted = plan_observes(kv->sequences.plan_of(seq_id));
        auto              replay = std::make_unique<Replay>();
        *replay                  = { { chunk->first, chunk->last, chunk->sinks, n, wanted.within },
                                     state.seq->rows.n_tokens(), chunk->n_tokens, state.has_uncompressed_prompt, state.prev_output, false };
        if (!make_room(state, wanted, chunk->first == 0)) {
            return fail(err, KVEDGE_E_MEMORY, "no memory for the scores of %d tokens", n);
        }
        state.seq->observed.keep_first(chunk->sinks);
        state.replay = std::move(replay);
        return ok(err);
    });
}

extern "C" kvedge_status kvedge_replay_end(kvedge_cache * kv, int32_t seq_id, kvedge_error * err) {
    return claimed(kv, true, "kvedge_replay_end: cache is NULL", "end a second pass over the prompt", err, [&] {
        SequenceState * const found = kv->sequences.find(seq_id);
        if (!found || !found->replay) {
            return ok(err);
        }
        SequenceState & state = *found;
        if (!kv->context.llama) {
            return fail_freed(err);
        }
        kv->context.synchronize();
        if (const auto status = kv->to_host(state, err); status != KVEDGE_OK) {
            return status;
        }
        const Replay & replay = *state.replay;
        const int32_t  came   = state.seq->rows.n_tokens() - replay.n_old;
        const int32_t  from   = came > 0 ? state.seq->rows.contents().pos[(size_t) replay.n_old] : 0;
        if (came > 0) {
            state.seq->remove(from, INT_MAX);
            kv->context.release_cells(seq_id, from, -1);
            state.weights.valid = false;
        }
        state.has_uncompressed_prompt = replay.has_uncompressed_prompt;
        state.prev_output             = replay.output;
        if (came == replay.announced && !replay.spoiled) {
            state.replayed = std::max(state.replayed, replay.scope.last);
        }
        if (!replay.spoiled && state.replayed >= replay.scope.n_context) {
            state.seq->observed.missing.of[quantity::peaks] = 0;
        }
        state.replay.reset();
        return ok(err);
    });
}
