// Storage type q4_0: llama.cpp's blocks with 4-bit codes.

#pragma once

#include "rows/format.h"

#include <cmath>

namespace kvedge::storage {

struct q4_0 : Packed<4, 8> {
    static constexpr int32_t number = 4;

    // The value with the largest absolute value gets the code -8, which has no positive counterpart. The conversions round the
    // product and the sum separately, as llama.cpp does; a fused multiply-add would round only once.
    static void quantise(const float * x, int32_t n, Coded & out) {
        float top = 0.0f;
        for (int32_t i = 0; i < n; i++) {
            top = std::fabs(x[i]) > std::fabs(top) ? x[i] : top;
        }
        const float d = top / -8.0f, inverse = d != 0.0f ? 1.0f / d : 0.0f;
        put_half(d, out.scale);
        for (int32_t i = 0; i < n; i++) {
            const auto product = (float) ((double) x[i] * (double) inverse);
            out.codes[i]       = (uint8_t) within((float) ((double) product + 8.5), 0.0f, 15.0f);
        }
    }
};

}  // namespace kvedge::storage
