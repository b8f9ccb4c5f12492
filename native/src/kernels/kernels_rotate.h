// The fast Walsh-Hadamard transform of blocks of rows. Part of kernels_impl.h, under its rules.

#pragma once

#include "kernels.h"
#include "kernels_compiler.h"

namespace kvedge {
namespace {

// a, b = a + b, a - b
inline void butterfly(V & a, V & b) {
    const V sum = V::add(a, b);
    b           = V::sub(a, b);
    a           = sum;
}

// Makes the steps within a vector, for up to W vectors of one row: after a transposition they are steps between vectors. Scales first, so
// that all tables round alike.
inline void rotate_within(float * x, int32_t many, V scale) {
    V t[V::W];
    for (int32_t j = 0; j < V::W; j++) {
        t[j] = j < many ? V::mul(V::load(x + j * V::W), scale) : V::zero();
    }
    V::transpose(t);
    KVEDGE_UNROLL
    for (int h = 1; h < V::W; h *= 2) {
        KVEDGE_UNROLL
        for (int i = 0; i < V::W; i++) {
            if ((i & h) == 0) {
                butterfly(t[i], t[i + h]);
            }
        }
    }
    V::transpose(t);
    for (int32_t j = 0; j < many; j++) {
        t[j].store(x + j * V::W);
    }
}

void k_rotate(FloatOut x, int32_t n, int32_t d, int32_t block) {
    const V scale = V::set1(1.0f / __builtin_sqrtf((float) block));
    for (int32_t r = 0; r < n; r++) {
        float * row = x.row(r);
        for (int32_t i = 0; i < d; i += V::W * V::W) {
            const int32_t left = (d - i) / V::W;
            rotate_within(row + i, left < V::W ? left : V::W, scale);
        }
        for (int32_t h = V::W; h < block; h *= 2) {
            for (int32_t i = 0; i < d; i += V::W) {
                if ((i & h) == 0) {
                    V a = V::load(row + i), b = V::load(row + i + h);
                    butterfly(a, b);
                    a.store(row + i);
                    b.store(row + i + h);
                }
            }
        }
    }
}

}  // namespace
}  // namespace kvedge
