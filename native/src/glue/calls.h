// What the functions of the C interface that take a cache have in common: nobody else is inside, and nothing is thrown.

#pragma once

#include "system/error.h"
#include "glue/cache.h"

namespace kvedge {

// Runs call() with the cache claimed, and returns its status. given: whether all that must be given is; `missing` says what
// is not, and doing what fails where something is thrown (caught()). Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_STATE (busy).
template <class F>
kvedge_status claimed(
    const kvedge_cache * kv, bool given, const char * missing, const char * doing, kvedge_error * err, const F & call) noexcept try {
    if (!kv || !given) {
        return fail(err, KVEDGE_E_ARGUMENT, "%s", missing);
    }
    const Claim claim(kv->owner);
    return claim ? call() : fail_busy(err);
} catch (...) {
    return caught(err, doing);
}

// The same for what is no status: `none` where the cache is NULL or another thread is inside, or where something is thrown.
template <class T, class F> T asked(const kvedge_cache * kv, T none, const F & call) noexcept try {
    if (!kv) {
        return none;
    }
    const Claim claim(kv->owner);
    return claim ? call() : none;
} catch (...) {
    return none;
}

}  // namespace kvedge
