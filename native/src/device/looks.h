// What is measured of rows, as ggml's operations: of some heads of a layer, whose rows are [d, T, heads] in f32. Products of
// matrices are rounded to half precision on some devices, so that what is multiplied is what half precision holds; a matrix
// times one column is not, and sums are not.

#pragma once

#include "system/pages.h"
#include "ggml.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// The window's queries and what they see.
struct VoteInputs {
    // [d, 2 * G * W, heads] f16: of a head its query heads' queries, and what rounding left of them; or where `low` holds the
    // latter, both [d, G * W, heads] f32
    ggml_tensor * queries;
    ggml_tensor * low;
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

// Queries [W][H][d] of a layer, and what they are multiplied by, a power of two, so that half precision holds them in two halves.
struct WindowQueries {
    const float * q;
    int32_t       n_window, n_heads, d;
    float         factor;
};
float factor_of(const Bulk<float> & queries);
// The same on a device: x f32, and its two halves in f32. Half precision holds what is up to 2^18.
constexpr float RING_FACTOR = 0.25f;
struct Halves {
    ggml_tensor * high;
    ggml_tensor * low;
};
Halves split(ggml_context * c, ggml_tensor * x);
// Of some KV heads, as VoteInputs has them: [heads][2][G][W][d].
void split_queries(const WindowQueries & in, const std::vector<int32_t> & heads, int32_t group, ggml_fp16_t * out);

ggml_tensor * squares(ggml_context * c, ggml_tensor * rows);  // [1, T, heads] of lengths

// Of keys [d, T, heads]: the sum of those that count, of length 1 or as they are, d * heads numbers; and the products of all keys
// of length 1 with it, [T, 1, heads]. counts [T]: 1 or 0; NULL: all count.
struct Directions {
    ggml_tensor * sum;
    ggml_tensor * products;
};
Directions directions(ggml_context * c, ggml_tensor * keys, ggml_tensor * counts, bool unit);

}  // namespace kvedge
