#include "system/error.h"

#include <cstdarg>
#include <cstdio>
#include <new>
#include <stdexcept>

namespace kvedge {

namespace {

// Returns the number of bytes of the UTF-8 character at `at`; 0: invalid or truncated.
size_t character(const unsigned char * at) {
    const unsigned char first = at[0];
    const size_t        n     = first < 0x80 ? 1 : first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
    for (size_t i = 1; i < n; i++) {
        if ((at[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    const bool longer_than_needed = (first == 0xE0 && at[1] < 0xA0) || (first == 0xF0 && at[1] < 0x90);
    const bool no_character       = (first == 0xED && at[1] > 0x9F) || (first == 0xF4 && at[1] > 0x8F);
    return longer_than_needed || no_character ? 0 : n;
}

// Makes a message one line of valid UTF-8: replaces control characters by spaces, and bytes of invalid or cut characters by "?".
void clean(char * message) {
    auto * at = (unsigned char *) message;
    while (*at) {
        const size_t n = character(at);
        if (n == 0 || (n == 1 && (*at < 0x20 || *at == 0x7F))) {
            *at++ = n == 0 ? '?' : ' ';
        } else {
            at += n;
        }
    }
}

}  // namespace

kvedge_status fail(kvedge_error * err, kvedge_status status, const char * format, ...) {
    if (err) {
        err->status = status;
        va_list args;
        va_start(args, format);
        vsnprintf(err->message, sizeof(err->message), format, args);
        va_end(args);
        clean(err->message);
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
    } catch (const std::length_error &) {  // a container throws it for a size beyond any memory
        return fail(err, KVEDGE_E_MEMORY, "no memory to %s", doing);
    } catch (const std::exception & e) {
        return fail(err, KVEDGE_E_STATE, "failed to %s: %s", doing, e.what());
    } catch (...) {
        return fail(err, KVEDGE_E_STATE, "failed to %s", doing);
    }
}

}  // namespace kvedge
