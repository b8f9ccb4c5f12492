// Merging of evicted rows into the kept row with the most similar key (LOOK-M sec. 3.2).

#pragma once

#include "core/stages.h"

namespace kvedge {

// With L evicted rows i pointing at kept row j, the one whose key has the largest cosine similarity with row i's (the
// lowest on ties):
//   row_j = (self(L) * row_j + sum_i weight(similarity_i) * row_i) / (L + 1)
// for keys and values alike, all from the original rows; rows with L = 0 stay as they are. An evicted zero key merges
// into nothing, a kept zero key receives nothing.
struct MergeRule {
    float (*self)(float n_merged);
    float (*weight)(float similarity);
    bool above_mean = false;  // only rows that are at least as similar as the mean of all, but for rounding
};

void merge_rows(const ReduceInput & in, const MergeRule & rule, float * k, float * v);

// Reducer::scratch of every reducer that calls merge_rows.
size_t merge_scratch(int32_t n_tokens, int32_t n_kept, int32_t d_k);

}  // namespace kvedge
