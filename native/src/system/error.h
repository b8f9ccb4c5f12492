#pragma once

#include "kvedge.h"

namespace kvedge {

// mingw-w64 formats by the C standard (%zu), but its attribute "printf" checks Microsoft's older rules
#if defined(__MINGW32__)
#    define KVEDGE_PRINTF gnu_printf
#else
#    define KVEDGE_PRINTF printf
#endif

// Fills err (if any) with the status and a printf-style message, and returns the status.
__attribute__((format(KVEDGE_PRINTF, 3, 4)))
kvedge_status fail(kvedge_error * err, kvedge_status status, const char * format, ...);

kvedge_status ok(kvedge_error * err);

// Fills err with the current exception and returns its status. Every exported function calls it in `catch (...)`, because no
// exception may pass through C. doing: a verb such as "attach", for "no memory to attach".
kvedge_status caught(kvedge_error * err, const char * doing) noexcept;

}  // namespace kvedge
