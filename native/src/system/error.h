#pragma once

#include "kvedge.h"

namespace kvedge {

// mingw-w64 formats by the C standard (%zu); "printf" means Microsoft's older rules there
#if defined(__MINGW32__)
#    define KVEDGE_PRINTF gnu_printf
#else
#    define KVEDGE_PRINTF printf
#endif

// Fills err (if any) with the status and a printf-style message, and returns the status.
__attribute__((format(KVEDGE_PRINTF, 3, 4)))
kvedge_status fail(kvedge_error * err, kvedge_status status, const char * format, ...);

kvedge_status ok(kvedge_error * err);

// For the `catch (...)` that every export ends with, so that nothing is thrown through C: fills err with the exception at
// hand. doing: "attach", as in "no memory to attach".
kvedge_status caught(kvedge_error * err, const char * doing) noexcept;

}  // namespace kvedge
