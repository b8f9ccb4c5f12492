// Writing quantised rows: each type's rounding, as its format or paper defines it. Slower than reading, and done once.

#pragma once

#include "backend/cpu/kernels/kernels.h"

namespace kvedge {

// One row of d values, a multiple of GROUP, into row_bytes(type, d) bytes at out; x must be finite. Types: q8_0 and q4_0
// (llama.cpp's reference rounding), kivi4_v, kivi2_v (KIVI sec. 3.2, q = round((x - min) / scale) with the scale that is
// stored, ties to even; 0 where all values of a group are equal).
void quantise_row(Type type, const float * x, int32_t d, uint8_t * out);

// Up to GROUP rows [n][d], which become a group of their own at out. Types: kivi4_k, kivi2_k.
void quantise_group(Type type, const float * x, int32_t n, int32_t d, uint8_t * out);

// Bytes at out that quantise_group writes.
constexpr size_t group_bytes(Type type, int32_t n, int32_t d) {
    return n == 0 ? 0 : 4 * (size_t) d + (size_t) n * (size_t) (d / GROUP) * code_bytes(type);
}

}  // namespace kvedge
