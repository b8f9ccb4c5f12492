// llama.cpp's blocks with codes of 4 bits.

#pragma once

#include "rows/format.h"

#include <cmath>

namespace kvedge::storage {

struct q4_0 : Packed<4, 8> {
    static constexpr int32_t number = 4;

    // The value of largest size becomes -8, the one code without a counterpart. Product and sum are each rounded,
    // which the conversions see to: a fused multiply-add would round once.
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
