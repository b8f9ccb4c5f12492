// Writing quantised rows, rounded as their type says (storage/). Slower than reading, and done once.

#pragma once

#include "kernels/kernels.h"

namespace kvedge {

// One row of d values, a multiple of GROUP, into row_bytes(type, d) bytes at out, of a type that is not grouped. x is finite.
void quantise_row(Type type, const float * x, int32_t d, uint8_t * out);

// Up to GROUP rows [n][d], which become a group of their own at out, of a grouped type: scale[d] and minimum[d] in half
// precision, then the codes of each row.
void quantise_group(Type type, const float * x, int32_t n, int32_t d, uint8_t * out);

// Bytes at out that quantise_group writes.
constexpr size_t group_bytes(Type type, int32_t n, int32_t d) {
    return n == 0 ? 0 : 4 * (size_t) d + (size_t) n * (size_t) (d / GROUP) * code_bytes(type);
}

}  // namespace kvedge
