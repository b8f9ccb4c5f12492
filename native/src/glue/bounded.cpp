// Bounded prefill in a context: the announced batch, and the end of each of its layers.

#include "compress/bounded.h"

#include "plan/storage.h"
#include "glue/calls.h"

using namespace kvedge;

void SequenceState::drop_bounded() {
    if (bounded) {
        bounded->abandon();
        bounded.reset();
    }
}

kvedge_status kvedge::fail_bounded(SequenceState & state, kvedge_error * err) {
    state.drop_bounded();
    state.armed = false;
    return fail(err, KVEDGE_E_STATE, "the prompt could not be compressed layer by layer and is gone; clear the sequence and try again");
}

// What is left of the last bounded prompt when the next tokens come.
bool kvedge_cache::end_bounded(SequenceState & state) {
    if (state.bounded && !state.bounded->done()) {
        kvedge_error err{};
        fail_bounded(state, &err);
        report(err.status, err.message);
        return false;
    }
    if (state.bounded) {
        release_working_memory();
    }
    state.bounded.reset();
    return true;
}

bool kvedge_cache::enter_bounded(const llama_attn_provider_ubatch & ubatch, Run & run, const std::vector<uint8_t> & image) {
    SequenceState & state = *run.state;
    const auto      n     = (int32_t) run.index.size();
    const auto      pos   = positions(ubatch, run);
    const kvedge_plan & plan = plan_of(state.id);
    state.end_answer();
    state.armed         = true;
    state.weights.valid = false;
    state.next          = Answer(plan, shapes);
    auto         bounded = std::make_unique<BoundedPrompt>(*state.seq, compression_plan(*state.seq, plan, n));
    progress.follow(state.id, bounded->progress());
    kvedge_error err{};
    if (bounded->enter(n, pos.data(), image.data(), &err) != KVEDGE_OK) {
        report(err.status, err.message);
        return false;
    }
    run.wanted  = bounded->wanted();
    run.score   = run.wanted.sums && plan.decode->needs_scores;
    run.decode  = false;
    run.watch   = false;
    run.bounded = bounded.get();
    if (run.wanted.attention()) {
        state.seq->observe(n, ubatch.causal);
    }
    state.bounded = std::move(bounded);
    state.note_peak();
    return true;
}

// Runs on a thread of ggml, which nothing may be thrown through.
void kvedge_cache::finish_layer(SequenceState & state, int32_t layer) noexcept {
    BoundedPrompt & bounded = *state.bounded;
    kvedge_error    err{};
    if (bounded.finish_layer((size_t) layer, &err) != KVEDGE_OK) {
        report(err.status, err.message);
    } else if (bounded.done()) {
        state.note_compression(std::move(state.next), bounded.outcome(), bounded.n_tokens());
    }
}

extern "C" int32_t kvedge_bounded_layers(const kvedge_cache * kv, int32_t seq_id) try {
    return kv ? kv->progress.of(seq_id) : -1;
} catch (...) {
    return -1;
}

extern "C" kvedge_status kvedge_plan_check_bounded(
    const kvedge_plan * plan, kvedge_type type_k, kvedge_type type_v, kvedge_error * err) try {
    Storage storage;
    if (!plan || !make_storage(type_k, type_v, storage)) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_plan_check_bounded: plan is NULL, or a type is unknown");
    }
    return check_bounded(*plan, storage, err);
} catch (...) {
    return caught(err, "check a plan");
}

extern "C" kvedge_status kvedge_bound_prompt(
    kvedge_cache * kv, int32_t seq_id, const uint8_t * image_mask, int32_t n_tokens, kvedge_error * err) {
    const char * missing = "kvedge_bound_prompt: cache is NULL, or there are no tokens, or no such sequence";
    return claimed(kv, n_tokens >= 1 && seq_id >= 0, missing, "announce a prompt", err, [&] {
        if (!kv->ctx) {
            return fail(err, KVEDGE_E_STATE, "the llama_context of this cache has been freed");
        }
        if ((uint32_t) n_tokens > llama_n_ubatch(kv->ctx)) {
            return fail(err, KVEDGE_E_ARGUMENT,
                        "a bounded prompt of %d tokens does not fit one pass of %u; make the context with a larger n_ubatch", n_tokens,
                        llama_n_ubatch(kv->ctx));
        }
        if (!kv->readers.empty()) {
            return fail(err, KVEDGE_E_UNSUPPORTED,
                        "layers of this model read the keys and values of an earlier one, all of them; it takes no bounded prompt");
        }
        if (const auto status = check_bounded(kv->plan_of(seq_id), kv->storage, err); status != KVEDGE_OK) {
            return status;
        }
        if (const SequenceState * state = find_seq(kv, seq_id); state && state->streaming) {
            return fail(err, KVEDGE_E_UNSUPPORTED,
                        "sequence %d is a stream, which is compressed as a whole; read the prompt in pieces", seq_id);
        }
        auto request = std::make_unique<BoundedRequest>();
        request->image.assign((size_t) n_tokens, 0);
        for (int32_t i = 0; image_mask && i < n_tokens; i++) {
            request->image[(size_t) i] = image_mask[i] ? 1 : 0;
        }
        kv->open(seq_id).request = std::move(request);
        return ok(err);
    });
}
