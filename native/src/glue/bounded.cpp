// The C interface of bounded prefill.

#include "compress/bounded.h"

#include "plan/storage.h"
#include "glue/calls.h"

using namespace kvedge;

extern "C" int32_t kvedge_bounded_layers(const kvedge_cache * kv, int32_t seq_id) try {
    return kv ? kv->sequences.progress.of(seq_id) : -1;
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
    return claimed(kv, n_tokens >= 1, "kvedge_bound_prompt: cache is NULL, or n_tokens is below 1", "announce a prompt", err, [&] {
        if (const auto status = check_sequence(*kv, seq_id, err); status != KVEDGE_OK) {
            return status;
        }
        const uint32_t most = llama_n_ubatch(kv->context.llama);
        if ((uint32_t) n_tokens > most) {
            return fail(err, KVEDGE_E_ARGUMENT,
                        "a bounded prompt of %d tokens does not fit one ubatch of %u tokens; make the context with a larger n_ubatch",
                        n_tokens, most);
        }
        if (!kv->layers.readers.empty()) {
            return fail(err, KVEDGE_E_UNSUPPORTED,
                        "some layers of this model read all keys and values of an earlier layer, so a bounded prompt is impossible; use "
                        "ordinary prefill");
        }
        if (const auto status = check_bounded(kv->sequences.plan_of(seq_id), kv->sequences.storage, err); status != KVEDGE_OK) {
            return status;
        }
        const SequenceState * state = kv->sequences.find(seq_id);
        if (kv->keeping.on() || (state && state->whole.seq)) {
            return fail(err, KVEDGE_E_UNSUPPORTED, "whole rows are kept (kvedge_keep), but bounded prefill never holds all rows of the "
                        "prompt; use ordinary prefill");
        }
        if (state && state->streaming) {
            return fail(err, KVEDGE_E_UNSUPPORTED,
                        "sequence %d is a stream, which cannot take a bounded prompt; use ordinary prefill", seq_id);
        }
        auto request = std::make_unique<BoundedRequest>();
        request->image.assign((size_t) n_tokens, 0);
        for (int32_t i = 0; image_mask && i < n_tokens; i++) {
            request->image[(size_t) i] = image_mask[i] ? 1 : 0;
        }
        kv->sequences.open(seq_id).request = std::move(request);
        return ok(err);
    });
}
