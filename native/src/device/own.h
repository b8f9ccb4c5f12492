// kvedge's operations inside ggml's CUDA and CPU libraries (cuda/, cpu/). Each operation is a FLASH_ATTN_EXT node with a src[5], which
// patch 0012 passes to `ggml_cuda_ragged` or `ggml_cpu_ragged` (set by own.cu, own.cpp). op_params[OWN_KIND] names the operation; later
// entries of op_params are its parameters.

#pragma once

#include <cstddef>

enum OwnKind : int { OWN_RAGGED = 0, OWN_NEAREST, OWN_JOINS, OWN_SUMS, OWN_POINTS, OWN_DEVIATION, OWN_SUM, OWN_LENGTHS, OWN_KINDS };

constexpr int OWN_KIND = 4;  // flash attention itself uses the entries before OWN_KIND

// OWN_NEAREST: finds for each evicted key of a layer the nearest kept key of the same KV head (cuda/nearest.cu, cpu/nearest.cpp).
//
//   src[0..2] keys  [d, slots] f16 or bf16, the same tensor three times
//   src[3]    kept  [n] i32: slots of kept rows, ascending for each head
//   src[5]    heads [NEAREST_HEAD, Hkv] i32: the entries of NearestHead for each head. A head's pending rows lie in consecutive slots.
//   dst       [n] i16, [n] i32 or [n, 2] i32: for each evicted row the index of the nearest kept row among its head's kept rows, or -1.
//             Second row (by angle): cosine similarity, bits of an f32. Each head begins at a multiple of NEAREST_TILE; padding undefined.
//   op_params[OWN_KIND + 1]: MergeRule::reach, a float. Above 0: nearest by distance; 0: nearest by angle.
// NearestHead: slot of the head's first pending row; start and number of kept rows in `kept`; start and number of results in dst.
enum NearestHead : int { NEAREST_FIRST, NEAREST_KEPT_AT, NEAREST_KEPT, NEAREST_AT, NEAREST_EVICTED, NEAREST_HEAD };

constexpr int NEAREST_TILE = 128;

// The quantities that OWN_LENGTHS can compute, as bits of a mask; the result holds the chosen quantities in this order.
enum OwnLengths : int { KEY_SQUARES = 1, VALUE_SQUARES = 2, PRODUCTS = 4, ENERGIES = 8 };

// A matrix "in fragments" is stored in the order in which the threads of a CUDA warp read it: tiles of 16 x 16 half-precision numbers,
// 8 numbers for each thread. fragment_at returns the index of an element of a matrix with `columns` columns.
constexpr size_t FRAGMENT = 16;

constexpr size_t fragment_at(size_t row, size_t column, size_t columns) {
    const size_t thread = row % 8 * 4 + column % 8 / 2, tile = row / FRAGMENT * (columns / FRAGMENT) + column / FRAGMENT;
    return (tile * 32 + thread) * 8 + column % FRAGMENT / 8 * 4 + row % FRAGMENT / 8 * 2 + column % 2;
}
