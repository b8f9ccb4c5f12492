// What is measured of rows, as ggml's operations: of some heads of a layer, whose rows are [d, T, heads] in f32. Products of
// matrices are rounded to half precision on some devices, so that what is multiplied is what half precision holds; a matrix
// times one column is not, and sums are not.

#pragma once

#include "ggml.h"

#include <cstdint>

namespace kvedge {

// Numbers in two halves, each of them f32 that half precision holds. A product with both is one with the numbers.
struct Halves {
    ggml_tensor * high;
    ggml_tensor * low;
};
// Of x f32, times a factor by which half precision holds it.
Halves split(ggml_context * c, ggml_tensor * x, float factor);

// The window's queries and what they see.
struct VoteInputs {
    Halves        queries;  // [d, G * W, heads]: of a head its query heads' queries
    ggml_tensor * mask;     // [N, W] or [N, W, 1, heads] f16
    ggml_tensor * weights;  // [T, W] f32 by which a query's vote for a token counts; NULL: all alike
    ggml_tensor * sinks;    // [G * heads] f32 or NULL
    int64_t       n_window, group;  // W, G
    int64_t       n_tokens;         // T: the last of N rows
    float         scale, softcap;   // what products with the queries are multiplied by; softcap 0: none
    bool          largest;          // over query heads, not their mean
};

// [T, 1, heads]: mean over the queries and query heads of the votes for keys [d, N, heads], or the largest over query heads.
ggml_tensor * vote(ggml_context * c, ggml_tensor * keys, const VoteInputs & in);

// Of keys [d, T, heads]: the sum of those that count, of length 1 or as they are, d * heads numbers; and the products of all keys
// of length 1 with it, [T, 1, heads]. counts [T]: 1 or 0; NULL: all count.
struct Directions {
    ggml_tensor * sum;
    ggml_tensor * products;
};
Directions directions(ggml_context * c, ggml_tensor * keys, ggml_tensor * counts, bool unit);

}  // namespace kvedge
