// Operations of kvedge in a backend's own library (cuda/, cpu/). Each is a FLASH_ATTN_EXT with a src[5], and op_params[OWN_KIND]
// says which one it is; patch 0012 hands it to `ggml_cuda_ragged` or `ggml_cpu_ragged`, which own.cu and own.cpp set. Entries
// of op_params behind OWN_KIND belong to the operation.

#pragma once

#include <cstddef>

enum OwnKind : int { OWN_RAGGED = 0, OWN_NEAREST, OWN_JOINS, OWN_SUMS, OWN_POINTS, OWN_DEVIATION, OWN_SUM, OWN_LENGTHS, OWN_KINDS };

constexpr int OWN_KIND = 4;  // flash attention has the entries before it

// OWN_NEAREST: of each evicted key of a layer the nearest kept one (cuda/nearest.cu, cpu/nearest.cpp).
//
//   src[0..2] keys  [d, slots] f16 or bf16, three times the same
//   src[3]    kept  [n] i32: slots of kept rows, of each head's ascending
//   src[5]    heads [NEAREST_HEAD, H] i32: of each head what NearestHead names. Its pending rows lie in slots one after the other.
//   dst       [n] i16, [n] i32 or [n, 2] i32: of each evicted row the number of the kept one among those of its head, or -1, and where
//             there are two rows of results, by angle, their similarity, a number of f32. A head's results begin at a multiple of
//             NEAREST_TILE; what fills up is undefined.
//   op_params[OWN_KIND + 1]: MergeRule::reach, a float. Above 0 the nearest is that by distance, else that by angle.
enum NearestHead : int { NEAREST_FIRST, NEAREST_KEPT_AT, NEAREST_KEPT, NEAREST_AT, NEAREST_EVICTED, NEAREST_HEAD };

constexpr int NEAREST_TILE = 128;

// What OWN_LENGTHS finds of rows, one after the other in its result.
enum OwnLengths : int { KEY_SQUARES = 1, VALUE_SQUARES = 2, PRODUCTS = 4, ENERGIES = 8 };

// Matrices of numbers in half precision, of so many columns, lie as the kernels' threads read them: 16 x 16 at a time, 8 numbers
// for each thread of a warp.
constexpr size_t FRAGMENT = 16;

constexpr size_t fragment_at(size_t row, size_t column, size_t columns) {
    const size_t thread = row % 8 * 4 + column % 8 / 2, tile = row / FRAGMENT * (columns / FRAGMENT) + column / FRAGMENT;
    return (tile * 32 + thread) * 8 + column % FRAGMENT / 8 * 4 + row % FRAGMENT / 8 * 2 + column % 2;
}
