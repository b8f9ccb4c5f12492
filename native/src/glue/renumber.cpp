// The C interface of kvedge_renumber, which makes positions smaller.

#include "sequence/renumber.h"

#include "glue/calls.h"

#include <algorithm>

using namespace kvedge;

namespace {

// Checks that the keys of all layers can be rotated to other positions, and that the model uses positions in no other way.
kvedge_status check_turning(const kvedge_cache & kv, kvedge_error * err) {
    if (is_quantised(kv.sequences.storage.k)) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "keys stored as %s cannot change positions, because each change would round the keys again; "
                    "store keys as f16, bf16 or f32", kvedge_type_name(type_number(kv.sequences.storage.k)));
    }
    if (!kv.layers.all_of_model()) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "kvedge stores %d of the %d layers of this model, and the positions in the other layers "
                    "cannot be changed", (int32_t) kv.layers.shapes.size(), kv.layers.n_model);
    }
    if (llama_attn_provider_weight(llama_get_model(kv.context.llama), "position_embd.weight")) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "this model has learned position embeddings, so the positions of rows cannot be changed");
    }
    for (size_t l = 0; l < kv.layers.shapes.size(); l++) {
        const Rotation & rotation = (*kv.layers.rotations)[l];
        const auto &     why      = rotation.unlike.empty() ? rotation.unknown : rotation.unlike;
        if (!why.empty()) {
            return fail(err, KVEDGE_E_UNSUPPORTED, "the positions of keys cannot be changed, because in layer %d %s",
                        kv.layers.shapes[l].il, why.c_str());
        }
    }
    return ok(err);
}

kvedge_status check_positions(const SequenceState & state, int32_t next, kvedge_error * err) {
    const auto & pos = state.seq->rows.contents().pos;
    if (state.replay) {
        return fail_replaying(err);
    }
    if (state.verified) {
        return fail_verifying(err);
    }
    if (state.seq->observed.have().queries) {
        return fail(err, KVEDGE_E_STATE, "queries are kept for the compression of the prompt; compress the prompt before you change "
                    "positions");
    }
    if (!std::is_sorted(pos.begin(), pos.end())) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "the positions of sequence %d cannot be changed, because they do not ascend from token to "
                    "token", state.id);
    }
    return pos.back() < next ? ok(err)
                             : fail(err, KVEDGE_E_ARGUMENT, "the last token of sequence %d is at position %d, so the next token cannot "
                                    "have position %d; pass a larger next", state.id, pos.back(), next);
}

// Frees all of llama.cpp's cells of the sequence. The next batch can then begin at any position.
void release_all(kvedge_cache & kv, SequenceState & state) {
    kv.context.release_cells(state.id, -1, -1);
    state.released = state.seq->rows.n_tokens();
}

// Frees all of llama.cpp's cells of the sequence except one, at the position of its last token. False: no cell is left.
bool enter_last(kvedge_cache & kv, SequenceState & state, int32_t pos) {
    release_all(kv, state);
    const bool entered = kv.context.enter_position(state.id, pos);
    state.released -= entered ? 1 : 0;
    return entered;
}

// Moves the sequence, and its whole rows, which hold its first tokens. Throws std::bad_alloc: nothing moved, or whole rows are given up.
void turn_all(kvedge_cache & kv, SequenceState & state, Moved && moved) {
    Sequence * const whole = state.whole.seq.get();
    if (whole) {
        whole->observed.set_rotations(kv.layers.rotations);
        const auto n = (std::ptrdiff_t) whole->rows.n_tokens();
        move_to(*whole, { { moved.pos.begin(), moved.pos.begin() + n }, moved.next }, kv.context.threads());
    }
    try {
        move_to(*state.seq, std::move(moved), kv.context.threads());
    } catch (...) {
        state.whole         = {};  // the whole rows have moved already
        state.whole.problem.set({ "no memory to change the positions of the compressed rows" });
        throw;
    }
    if (whole) {
        kv.keeping.take_in(state);
    }
}

}  // namespace

extern "C" kvedge_status kvedge_renumber(kvedge_cache * kv, int32_t seq_id, int32_t most, int32_t * next, kvedge_error * err) {
    const char * missing = "kvedge_renumber: cache or next is NULL, or most is below 1";
    return in_context(kv, next && most >= 1, missing, "change positions", err, [&] {
        if (const auto status = check_turning(*kv, err); status != KVEDGE_OK) {
            return status;
        }
        const SequenceState * const found = kv->sequences.find(seq_id);
        if (found && found->whole.seq && found->whole.seq->observed.have().queries) {
            return fail(err, KVEDGE_E_UNSUPPORTED, "the whole rows include queries, whose positions cannot be changed; use a method "
                        "without allocator entropy and reducer match");
        }
        if (!found || *next <= most) {
            return ok(err);
        }
        SequenceState * const state = &kv->sequences.open(seq_id);  // sets the rotations, also of a loaded sequence
        if (state->seq->rows.n_tokens() == 0) {
            return ok(err);
        }
        kv->context.synchronize();
        if (const auto status = kv->to_host(*state, err); status != KVEDGE_OK) {
            return status;
        }
        if (const auto status = kv->compressor.check(*state, err); status != KVEDGE_OK) {
            return status;
        }
        if (const auto status = check_positions(*state, *next, err); status != KVEDGE_OK) {
            return status;
        }
        const auto & rotations = *kv->layers.rotations;
        const bool   several   = std::any_of(rotations.begin(), rotations.end(), [](const Rotation & r) { return !r.axes.empty(); });
        Sequence * const whole = state->whole.seq.get();
        Moved        moved     = move_positions(state->seq->rows, whole ? &whole->rows : nullptr, several, *next, most);
        const int32_t to       = moved.next;
        if (!enter_last(*kv, *state, moved.pos.back())) {
            return fail(err, KVEDGE_E_STATE, "llama.cpp could not store the new position of sequence %d; the rows of the sequence keep "
                        "their positions", seq_id);
        }
        try {
            turn_all(*kv, *state, std::move(moved));
        } catch (...) {
            release_all(*kv, *state);
            throw;
        }
        *next = to;
        return ok(err);
    });
}
