// Writes quantised rows, rounded by their type (rows/storage/). Slower than reading, and done once.

#pragma once

#include "kernels/kernels.h"

namespace kvedge {

// Writes one row of d values, a multiple of GROUP, to row_bytes(type, d) bytes at out. The type is not grouped. x is finite.
void quantise_row(Type type, const float * x, int32_t d, uint8_t * out);

// Writes up to GROUP rows [n][d] as a separate group to out, in a grouped type: scale[d] and minimum[d] in half precision, then the codes
// of each row.
void quantise_group(Type type, const float * x, int32_t n, int32_t d, uint8_t * out);

// Returns the bytes that quantise_group writes.
constexpr size_t group_bytes(Type type, int32_t n, int32_t d) {
    return n == 0 ? 0 : 4 * (size_t) d + (size_t) n * (size_t) (d / GROUP) * code_bytes(type);
}

}  // namespace kvedge
