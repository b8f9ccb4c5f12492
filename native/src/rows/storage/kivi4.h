// Storage type kivi4: KIVI (Liu et al. 2024, sec. 3.2) with 4 bits per number, and the base of kivi2. A code is
// round((x - min) / scale) with the stored scale, ties to even; all codes are 0 if the scale is 0.

#pragma once

#include "rows/format.h"

#include <algorithm>

namespace kvedge::storage {

template <int BITS> struct Kivi : Packed<BITS> {
    static constexpr bool minimum = true, residual = true;

    // Adding and subtracting ROUND = 1.5 * 2^23 rounds to an integer, ties to even.
    static void quantise(const float * x, int32_t n, Coded & out) {
        constexpr float LARGEST = (1 << BITS) - 1, ROUND = 12582912.0f;
        const auto      ends  = std::minmax_element(x, x + n);
        const float     low   = put_half(*ends.first, out.minimum);
        const float     scale = put_half((*ends.second - *ends.first) / LARGEST, out.scale);
        for (int32_t i = 0; i < n; i++) {
            out.codes[i] = (uint8_t) (scale > 0.0f ? within((x[i] - low) / scale, 0.0f, LARGEST) + ROUND - ROUND : 0.0f);
        }
    }
};

struct kivi4 : Kivi<4> {
    static constexpr int32_t number = 5;
};

}  // namespace kvedge::storage
