// The input rows of kvedge's measuring operations (own.h), which read rows in the cache tensors without a copy.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <initializer_list>

namespace kvedge {

// k, v: keys and values [d, rows, heads], or [d, rows] if all heads share one list. list: the row of each token, [n] or [n, heads] i32.
struct MeasuredRows {
    ggml_tensor *k, *v, *list;
    int64_t      heads;
};

// Builds operation `kind` (OwnKind): [ne0, ne1] f32. matrix: src[2] or NULL. with: parameters behind the number of heads.
ggml_tensor * own_operation(ggml_context * c, int kind, const MeasuredRows & rows, ggml_tensor * matrix, int64_t ne0, int64_t ne1,
                            std::initializer_list<int64_t> with);

}  // namespace kvedge
