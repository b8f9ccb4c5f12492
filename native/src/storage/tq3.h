// Codes of 3 bits that stand for levels, which are those of least squared error for what a rotated row is made of: after
// TurboQuant (Zandieh et al. 2025, arXiv:2504.19874, Algorithm 1), with a scale for each block. pykvedge/plans/kvtypes/tq3.py
// is the definition.

#pragma once

#include "backend/format.h"

#include <algorithm>
#include <cmath>

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
        for (int pair = 0; pair < 4; pair++) {  // of lanes of 12 bits, in three bytes
            uint32_t bits = 0;
            for (int i = 0; i < GROUP; i++) {
                if (i % 8 / 2 == pair) {
                    bits |= (uint32_t) codes[i] << (i % 2 * 12 + i / 8 * 3);
                }
            }
            for (int byte = 0; byte < 3; byte++) {
                p[pair * 3 + byte] = (uint8_t) (bits >> (8 * byte));
            }
        }
    }

    static void quantise(const float * x, int32_t n, Coded & out) {
        float size[GROUP], top = 0.0f, scale = 0.0f;
        for (int32_t i = 0; i < n; i++) {
            size[i] = std::fabs(x[i]);
            top     = std::max(top, size[i]);
        }
        double sum = 0.0;
        for (int32_t i = 0; i < n; i++) {
            sum += (double) size[i] * (double) size[i];
        }
        // what was rounded is rounded to itself: one of its numbers has the largest size, and that one of the larger levels
        const float starts[] = { (float) std::sqrt(sum / n) / 12.0f, top / 26.0f, top / 16.0f, top / 9.0f };
        double      least    = INFINITY;
        for (const float start : starts) {
            uint16_t     half;
            const float  fit  = put_half(fitted(size, n, start), half);
            const double left = error(size, n, fit);
            if (left < least) {
                least     = left;
                scale     = fit;
                out.scale = half;
            }
        }
        for (int32_t i = 0; i < n; i++) {
            const int k  = nearest(size[i], scale);
            out.codes[i] = (uint8_t) (x[i] > 0.0f ? 4 + k : 3 - k);
        }
    }

  private:
    // Which of the four levels above 0 a size belongs to.
    static int nearest(float size, float scale) { return (size > 6.0f * scale) + (size > 12.5f * scale) + (size > 21.0f * scale); }

    // The scale of least squares for the levels that another one gives.
    static float fitted(const float * size, int32_t n, float scale) {
        double products = 0.0, squares = 0.0;
        for (int32_t i = 0; i < n; i++) {
            const double level = levels[4 + nearest(size[i], scale)];
            products += (double) size[i] * level;
            squares += level * level;
        }
        return (float) (products / squares);
    }

    static double error(const float * size, int32_t n, float scale) {
        double sum = 0.0;
        for (int32_t i = 0; i < n; i++) {
            const double left = (double) size[i] - (double) (scale * (float) levels[4 + nearest(size[i], scale)]);
            sum += left * left;
        }
        return sum;
    }
};

}  // namespace kvedge::storage
