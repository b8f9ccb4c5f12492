// Storage type tq3: 3-bit codes for 8 levels, and a scale per block. The levels have the least squared error for the numbers of a
// rotated row, after TurboQuant (Zandieh et al. 2025, arXiv:2504.19874, Algorithm 1). pykvedge/reference/kvtypes/tq3.py is the
// definition.

#pragma once

#include "rows/format.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvedge::storage {

struct tq3 : Blocks {
    static constexpr int32_t number     = 7;
    static constexpr size_t  code_bytes = (size_t) GROUP * 3 / 8;
    static constexpr int     levels[8] = { -26, -16, -9, -3, 3, 9, 16, 26 }, lowest = levels[0], highest = levels[7];
    static constexpr bool    looked_up = true;

    // Bits 12 j to 12 j + 11 hold codes j, j + 8, j + 16 and j + 24.
    static constexpr int code(const uint8_t * p, int i) {
        const int at = i % 8 * 12, both = p[at / 8] | p[at / 8 + 1] << 8;
        return levels[both >> (at % 8 + i / 8 * 3) & 7];
    }
    static void pack(const uint8_t * codes, uint8_t * p) {
        for (int pair = 0; pair < 4; pair++) {  // each pair of 12-bit lanes fills three bytes
            uint32_t bits = 0;
            for (int row = 0; row < 4; row++) {
                const uint8_t * of = codes + 8 * row + 2 * pair;
                bits |= (uint32_t) (of[0] | of[1] << 12) << (3 * row);
            }
            for (int byte = 0; byte < 3; byte++) {
                p[pair * 3 + byte] = (uint8_t) (bits >> (8 * byte));
            }
        }
    }

    static void quantise(const float * x, int32_t n, Coded & out) {
        float  size[GROUP], top = 0.0f;
        double sum = 0.0;
        for (int32_t i = 0; i < n; i++) {
            size[i] = std::fabs(x[i]);
            top     = std::max(top, size[i]);
            sum += (double) size[i] * (double) size[i];
        }
        // the last three candidates round an already rounded block to itself: its largest number has level 26, 16 or 9
        Scales   of = { { (float) std::sqrt(sum / n) / 12.0f, top / 26.0f, top / 16.0f, top / 9.0f } };
        uint16_t halves[STARTS];
        fit(size, n, of, halves);
        const int best = least(size, n, of);
        out.scale      = halves[best];
        const Bounds bounds(of);
        for (int32_t i = 0; i < n; i++) {
            const int k  = bounds.passed(ordered(size[i]), best);
            out.codes[i] = (uint8_t) ((k ^ -(int) (x[i] <= 0.0f)) + 4);  // 4 + k for x > 0, else 3 - k
        }
    }

  private:
    static constexpr int STARTS = 4;  // candidate scales, tried in parallel as lanes of a vector
    struct Scales { float of[STARTS]; };

    static int32_t ordered(float f) {  // returns the bits of f >= 0 as an integer, which keeps the order
        int32_t i;
        memcpy(&i, &f, sizeof(i));
        return i;
    }

    // Thresholds per scale: a size above `second` has the second positive level, and so on. Integers, to compare without branches.
    struct Bounds {
        int32_t second[STARTS], third[STARTS], fourth[STARTS];

        Bounds(const Scales & scales) {
            for (int s = 0; s < STARTS; s++) {
                second[s] = ordered(6.0f * scales.of[s]);
                third[s]  = ordered(12.5f * scales.of[s]);
                fourth[s] = ordered(21.0f * scales.of[s]);
            }
        }
        int32_t passed(int32_t size, int s) const { return (size > second[s]) + (size > third[s]) + (size > fourth[s]); }
        int32_t level(int32_t size, int s) const {
            return 3 + (size > second[s] ? 6 : 0) + (size > third[s] ? 7 : 0) + (size > fourth[s] ? 10 : 0);
        }
    };

    // Replaces each scale by the least-squares scale for the levels that it selects, rounded to half precision (halves).
    static void fit(const float * size, int32_t n, Scales & scales, uint16_t * halves) {
        const Bounds bounds(scales);
        double       products[STARTS] = {};
        int32_t      squares[STARTS]  = {};
        for (int32_t i = 0; i < n; i++) {
            for (int s = 0; s < STARTS; s++) {
                const int32_t level = bounds.level(ordered(size[i]), s);
                products[s] += (double) size[i] * (double) level;
                squares[s] += level * level;
            }
        }
        for (int s = 0; s < STARTS; s++) {
            scales.of[s] = put_half((float) (products[s] / (double) squares[s]), halves[s]);
        }
    }

    // Returns the index of the scale with the least squared error; ties go to the lower index.
    static int least(const float * size, int32_t n, const Scales & scales) {
        const Bounds bounds(scales);
        double       errors[STARTS] = {};
        for (int32_t i = 0; i < n; i++) {
            for (int s = 0; s < STARTS; s++) {
                const double left = (double) size[i] - (double) (scales.of[s] * (float) bounds.level(ordered(size[i]), s));
                errors[s] += left * left;
            }
        }
        return (int) (std::min_element(errors, errors + STARTS) - errors);
    }
};

}  // namespace kvedge::storage
