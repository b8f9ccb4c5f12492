#include "core/error.h"

#include <cstdarg>
#include <cstdio>

namespace kvedge {

kvedge_status fail(kvedge_error * err, kvedge_status status, const char * format, ...) {
    if (err) {
        err->status = status;
        va_list args;
        va_start(args, format);
        vsnprintf(err->message, sizeof(err->message), format, args);
        va_end(args);
    }
    return status;
}

kvedge_status ok(kvedge_error * err) {
    if (err) {
        err->status     = KVEDGE_OK;
        err->message[0] = '\0';
    }
    return KVEDGE_OK;
}

}  // namespace kvedge
