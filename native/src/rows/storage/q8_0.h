// Storage type q8_0: llama.cpp's blocks with 8-bit codes.

#pragma once

#include "rows/format.h"

#include <algorithm>
#include <cmath>

namespace kvedge::storage {

struct q8_0 : Packed<8> {
    static constexpr int32_t number = 3;

    // Rounds halves away from zero, as llama.cpp's reference does: the sum is exact in double and is truncated. Without branches,
    // because the processor could not predict them.
    static void quantise(const float * x, int32_t n, Coded & out) {
        float top = 0.0f;
        for (int32_t i = 0; i < n; i++) {
            top = std::max(top, std::fabs(x[i]));
        }
        const float d = top / 127.0f, inverse = d != 0.0f ? 1.0f / d : 0.0f;
        put_half(d, out.scale);
        for (int32_t i = 0; i < n; i++) {
            const double v = (double) within(x[i] * inverse, -127.0f, 127.0f);
            out.codes[i]   = (uint8_t) (int8_t) (int) (v + std::copysign(0.5, v));
        }
    }
};

}  // namespace kvedge::storage
