#include "core/error.h"

#include <cstdarg>
#include <cstdio>
#include <new>
#include <stdexcept>

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

kvedge_status caught(kvedge_error * err, const char * doing) noexcept {
    try {
        throw;
    } catch (const std::bad_alloc &) {
        return fail(err, KVEDGE_E_MEMORY, "no memory to %s", doing);
    } catch (const std::length_error &) {  // what a container says of a size beyond any memory
        return fail(err, KVEDGE_E_MEMORY, "no memory to %s", doing);
    } catch (const std::exception & e) {
        return fail(err, KVEDGE_E_STATE, "failed to %s: %s", doing, e.what());
    } catch (...) {
        return fail(err, KVEDGE_E_STATE, "failed to %s", doing);
    }
}

}  // namespace kvedge
