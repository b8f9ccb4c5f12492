// Rows that operations of own.h measure where they lie.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <initializer_list>

namespace kvedge {

// Keys and values [d, rows, heads], or [d, rows] of all heads, and the row of each token, [n], or [n, heads].
struct MeasuredRows {
    ggml_tensor *k, *v, *list;
    int64_t      heads;
};

// An operation over them: its result is [ne0, ne1] f32. with: its numbers behind the heads (own.h).
ggml_tensor * own_operation(ggml_context * c, int kind, const MeasuredRows & rows, ggml_tensor * matrix, int64_t ne0, int64_t ne1,
                            std::initializer_list<int64_t> with);

}  // namespace kvedge
