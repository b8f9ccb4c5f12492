// Reads values from a fuzzer's bytes. Zeros follow the last byte, so that every input is valid.

#pragma once

#include "kvedge.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace kvedge::fuzz {

class Input {
  public:
    Input(const uint8_t * data, size_t size) : at_(data), left_(size) {}

    size_t left() const { return left_; }

    uint8_t byte() {
        uint8_t out = 0;
        take(&out, 1);
        return out;
    }

    // Returns a number in [lowest, highest], made from one byte.
    int32_t between(int32_t lowest, int32_t highest) { return lowest + byte() % (highest - lowest + 1); }

    template <class T> T number() {
        T out{};
        take(&out, sizeof(out));
        return out;
    }

    // Returns the bytes up to the next newline or the end of the input, without zero bytes.
    std::string line() {
        std::string out;
        while (left_ > 0) {
            const char c = (char) byte();
            if (c == '\n') {
                break;
            }
            if (c != '\0') {
                out += c;
            }
        }
        return out;
    }

    const uint8_t * rest() const { return at_; }

  private:
    void take(void * out, size_t size) {
        const size_t n = std::min(size, left_);
        if (n > 0) {
            memcpy(out, at_, n);
        }
        at_ += n;
        left_ -= n;
    }

    const uint8_t * at_;
    size_t          left_;
};

// Aborts if the condition is false, so that the fuzzer reports the input.
#define REQUIRE(condition)                                                     \
    do {                                                                       \
        if (!(condition)) {                                                    \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                      \
        }                                                                      \
    } while (0)

inline bool is_utf8(const char * text) {
    for (const auto * at = (const unsigned char *) text; *at;) {
        const int more = *at < 0x80 ? 0 : *at >= 0xC2 && *at < 0xE0 ? 1 : *at >= 0xE0 && *at < 0xF0 ? 2 : *at >= 0xF0 && *at < 0xF5 ? 3 : -1;
        if (more < 0) {
            return false;
        }
        for (int i = 1; i <= more; i++) {
            if ((at[i] & 0xC0) != 0x80) {
                return false;
            }
        }
        at += more + 1;
    }
    return true;
}

// Checks what kvedge.h promises for every call that can fail: err has the status, and a message of one line of UTF-8 if it failed.
// Returns the status.
inline kvedge_status checked_status(kvedge_status status, const kvedge_error & err) {
    REQUIRE(err.status == status && memchr(err.message, 0, sizeof(err.message)));
    REQUIRE((status == KVEDGE_OK) == (err.message[0] == '\0'));
    REQUIRE(!strpbrk(err.message, "\r\n") && is_utf8(err.message));
    return status;
}

}  // namespace kvedge::fuzz
