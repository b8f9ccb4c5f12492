#pragma once

#include "kvedge.h"

namespace kvedge {

// Fills err (if any) with the status and a printf-style message, and returns the status.
__attribute__((format(printf, 3, 4)))
kvedge_status fail(kvedge_error * err, kvedge_status status, const char * format, ...);

kvedge_status ok(kvedge_error * err);

}  // namespace kvedge
