// Helpers of the C functions that take a cache: only one thread is inside, and nothing is thrown.

#pragma once

#include "system/error.h"
#include "glue/cache.h"

namespace kvedge {

inline kvedge_status fail_busy(kvedge_error * err) {
    return fail(err, KVEDGE_E_STATE, "another thread uses this cache; wait until the call of that thread returns");
}

// Claims the cache, runs call() and returns its status. given: all required arguments are there; `missing`: the message if not. doing: what
// the call does, for the message if it throws (caught()). Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_STATE (busy).
template <class F>
kvedge_status claimed(
    const kvedge_cache * kv, bool given, const char * missing, const char * doing, kvedge_error * err, const F & call) noexcept try {
    if (!kv || !given) {
        return fail(err, KVEDGE_E_ARGUMENT, "%s", missing);
    }
    const HandleLock lock(kv->guard);
    return lock ? call() : fail_busy(err);
} catch (...) {
    return caught(err, doing);
}

inline kvedge_status fail_freed(kvedge_error * err) {
    return fail(err, KVEDGE_E_STATE, "the llama_context of this cache has been freed");
}

// Like claimed(), for calls that need llama.cpp's context. Errors: also KVEDGE_E_STATE if the context has been freed.
template <class F>
kvedge_status in_context(
    const kvedge_cache * kv, bool given, const char * missing, const char * doing, kvedge_error * err, const F & call) noexcept {
    return claimed(kv, given, missing, doing, err, [&] { return kv->context.llama ? call() : fail_freed(err); });
}

// Checks that the context has a sequence of that number, which may be empty. Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_STATE (context freed).
inline kvedge_status check_sequence(const kvedge_cache & kv, int32_t seq_id, kvedge_error * err) {
    if (!kv.context.llama) {
        return fail_freed(err);
    }
    return seq_id >= 0 && (uint32_t) seq_id < llama_n_seq_max(kv.context.llama)
               ? ok(err)
               : fail(err, KVEDGE_E_ARGUMENT, "the context has no sequence %d; use a number from 0 to n_seq_max - 1", seq_id);
}

// Checks that n things fit the caller's n_out places. Errors: KVEDGE_E_ARGUMENT.
inline kvedge_status check_room(const char * function, size_t n, const char * things, int32_t n_out, kvedge_error * err) {
    return n_out >= 0 && n <= (size_t) n_out ? ok(err)
                                             : fail(err, KVEDGE_E_ARGUMENT, "%s: %zu %s do not fit the output, which has room for %d; pass "
                                                    "a larger output", function, n, things, n_out);
}

// Claims the cache and returns call(). Returns `none` if the cache is NULL, another thread is inside, or call() throws.
template <class T, class F> T asked(const kvedge_cache * kv, T none, const F & call) noexcept try {
    if (!kv) {
        return none;
    }
    const HandleLock lock(kv->guard);
    return lock ? call() : none;
} catch (...) {
    return none;
}

}  // namespace kvedge
