// Verification of drafts: tokens of an answer that come several at once. The tokens that the model agrees with stay.

#include "glue/calls.h"
#include "store/following.h"

#include <algorithm>
#include <climits>

using namespace kvedge;

// Returns the most tokens of a verification. Rows are quantised when GROUP rows are complete, and the next token sees them rounded. A
// verification ends with such a group, so that each token sees what it sees when it comes alone.
static int32_t room_for_drafts(const SequenceState & state, bool whole) {
    const StoreContents & all = state.seq->rows.contents();
    if (!state.seq->rows.storage().quantised() || state.device || whole) {
        return INT32_MAX;
    }
    const bool    open = all.blocks.size() > all.pending_from && !all.blocks.back().ragged();
    const int32_t room = open ? all.blocks.back().capacity - (int32_t) all.blocks.back().length() : 0;
    return room > 0 ? room : GROUP;
}

static kvedge_status check_drafts(const kvedge_cache & kv, const SequenceState & state, int32_t n, bool whole, kvedge_error * err) {
    const llama_model * model = llama_get_model(kv.context.llama);
    if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "this model has recurrent layers, which cannot remove refused drafts; decode without "
                    "drafts");
    }
    if (state.streaming) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "sequence %d is a stream, which cannot verify drafts; decode without drafts", state.id);
    }
    const bool due = state.has_uncompressed_prompt && kv.sequences.auto_compress;
    if (due ? plan_evicts(kv.sequences.plan_of(state.id)) : !state.kept.empty()) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "the decode policy drops a row for each token, even for a refused draft; use decode policy "
                    "keep-all");
    }
    if (state.replay) {
        return fail_replaying(err);
    }
    if (state.verified) {
        return fail_verifying(err);
    }
    if (state.request || (state.has_uncompressed_prompt && !due)) {
        return fail(err, KVEDGE_E_STATE, "the prompt is not compressed yet; call kvedge_compress before you verify drafts");
    }
    if (whole && !state.whole.seq) {
        return fail(err, KVEDGE_E_STATE, "sequence %d has no whole rows; call kvedge_keep before the prompt", state.id);
    }
    if (whole && has_whole(state.whole.seq->rows)) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "whole rows are rounded to q8_0, so drafts cannot be verified exactly; call kvedge_keep "
                    "with type f16");
    }
    const int32_t most = room_for_drafts(state, whole);
    if (n > most) {
        return fail(err, KVEDGE_E_ARGUMENT, "%d tokens are too many to verify, at most %d are possible now; kvedge_verify_room returns "
                    "this limit", n, most);
    }
    return ok(err);
}

// Returns whether the store can take back the last n tokens: quantised rows cannot be taken back.
static bool ends_open(const Store & rows, int32_t n) {
    const auto & blocks = rows.contents().blocks;
    for (size_t b = blocks.size(); n > 0 && b-- > 0 && !blocks[b].ragged();) {
        n -= (int32_t) blocks[b].length();
    }
    return n <= 0;
}

// Removes the last n tokens from the store and the device.
static void take_back(SequenceState & state, int32_t n) {
    state.seq->rows.take_back(n);
    if (state.device) {
        state.device->take_back(n);
    }
    state.seq->observed.skip_windows(state.seq->rows.n_tokens());
}

// Removes drafts that were decoded with the compressed rows, and puts the whole rows, which lie on the host, in place of the compressed.
// Throws std::bad_alloc, and then nothing has changed.
static void swap_to_whole(kvedge_cache & kv, SequenceState & state, std::unique_ptr<Verification> verification) {
    const int32_t n_whole = state.whole.seq->rows.n_tokens(), drafts = state.seq->rows.n_tokens() - n_whole;
    if (drafts > 0) {
        const int32_t from = state.seq->rows.contents().pos[(size_t) n_whole];
        if (state.device) {
            take_back(state, drafts);
        } else {
            state.seq->remove(from, INT_MAX);
        }
        kv.context.release_cells(state.id, from, -1);
        state.cut(n_whole);
    }
    state.verified = std::move(verification);
    state.swap_whole();
    state.weights.valid         = false;
    state.verified->n_old       = n_whole;
    state.verified->whole       = true;
    state.verified->window_from = state.seq->observed.window_from();
}

// Puts the compressed rows back, and appends the rows of the last n tokens of the whole ones. False: no memory; the whole rows stay.
static bool swap_to_compressed(const kvedge_cache & kv, SequenceState & state, int32_t n) {
    Store & rows = state.whole.seq->rows;
    if (!append_last(rows, state.seq->rows, n)) {
        return false;
    }
    const auto & device = state.verified->device;
    if (n > 0 && device && !device->append(state.seq->rows, n, kv.context.threads())) {
        rows.take_back(n);
        return false;
    }
    state.seq->observed.skip_windows(state.verified->window_from);
    state.swap_whole();
    state.weights.valid = false;
    return true;
}

extern "C" int32_t kvedge_verify_room(const kvedge_cache * kv, int32_t seq_id) {
    return asked(kv, 0, [&] {
        const SequenceState * state = kv->context.llama ? kv->sequences.find(seq_id) : nullptr;
        return state && check_drafts(*kv, *state, 1, false, nullptr) == KVEDGE_OK ? room_for_drafts(*state, false) : 0;
    });
}

static kvedge_status begin(kvedge_cache & kv, int32_t seq_id, int32_t n, bool whole, kvedge_error * err) {
    SequenceState * const state = kv.sequences.find(seq_id);
    if (!state || state->seq->rows.n_tokens() == 0) {
        return fail(err, KVEDGE_E_STATE, "sequence %d is empty; there is no answer to verify", seq_id);
    }
    if (const auto status = check_drafts(kv, *state, n, whole, err); status != KVEDGE_OK) {
        return status;
    }
    auto verification = std::make_unique<Verification>(Verification{ n, state->seq->rows.n_tokens() });
    if (!whole) {
        state->verified = std::move(verification);
        return ok(err);
    }
    kv.context.synchronize();
    kv.finish_graphs();
    const bool open = ends_open(state->seq->rows, state->seq->rows.n_tokens() - state->whole.seq->rows.n_tokens());
    if (!open && !kv.devices.to_host(*state)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory on the host to copy the keys and values of the sequence from a device");
    }
    swap_to_whole(kv, *state, std::move(verification));
    return ok(err);
}

extern "C" kvedge_status kvedge_verify_begin(kvedge_cache * kv, int32_t seq_id, int32_t n, kvedge_error * err) {
    return in_context(kv, n >= 1, "kvedge_verify_begin: cache is NULL, or n is below 1", "begin a verification", err,
                      [&] { return begin(*kv, seq_id, n, false, err); });
}

extern "C" kvedge_status kvedge_verify_whole(kvedge_cache * kv, int32_t seq_id, int32_t n, kvedge_error * err) {
    return in_context(kv, n >= 1, "kvedge_verify_whole: cache is NULL, or n is below 1", "begin a verification", err,
                      [&] { return begin(*kv, seq_id, n, true, err); });
}

extern "C" kvedge_status kvedge_verify_end(kvedge_cache * kv, int32_t seq_id, int32_t n_accepted, kvedge_error * err) {
    return in_context(kv, n_accepted >= 0, "kvedge_verify_end: cache is NULL, or n_accepted is negative", "end a verification", err, [&] {
        SequenceState * const state = kv->sequences.find(seq_id);
        if (!state || !state->verified) {
            return n_accepted == 0 ? ok(err) : fail(err, KVEDGE_E_STATE, "no verification of drafts has begun, or its tokens were removed; "
                                                    "only 0 tokens can be accepted");
        }
        const int32_t came = state->seq->rows.n_tokens() - state->verified->n_old;
        if (n_accepted > came) {
            return fail(err, KVEDGE_E_ARGUMENT, "%d tokens cannot be accepted, because only %d tokens were decoded since "
                        "kvedge_verify_begin", n_accepted, came);
        }
        const int32_t refused = came - n_accepted;
        if (refused > 0 || state->verified->device) {
            kv->context.synchronize();
            kv->finish_graphs();
        }
        if (refused > 0) {
            const Store & rows = state->seq->rows;
            const int32_t from = rows.contents().pos[(size_t) (rows.n_tokens() - refused)];
            take_back(*state, refused);
            state->weights.valid = false;
            kv->context.release_cells(seq_id, from, -1);
        }
        if (state->verified->whole && !swap_to_compressed(*kv, *state, n_accepted)) {
            return fail(err, KVEDGE_E_MEMORY, "no memory for the keys and values of %d tokens", n_accepted);
        }
        state->verified.reset();
        return ok(err);
    });
}
