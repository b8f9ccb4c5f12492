#pragma once

#include "plan/stages.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// Scales the shares to total, none above `most` and none below `least`; the others share what that frees or costs, in
// proportion, or evenly where none has a share. What exceeds `most` is fixed there first. All shares >= 0;
// least * (number of shares) <= total <= most * (number of shares).
void fill_up(std::vector<double> & shares, double total, double most, double least);

// Whole numbers close to the shares, which add up to total exactly: those of fill_up, rounded by the largest remainder (the
// lower index on ties).
std::vector<int64_t> round_shares(std::vector<double> shares, int64_t total, int64_t most, int64_t least = 0);

// The k-th largest of n numbers, k < n from 0 on. Not with NaN.
float nth_largest(const float * x, size_t n, size_t k);

// [n_heads] how many of the `left` largest scores [n_heads][n] each head has; ties go to the lower head, then token.
std::vector<int32_t> count_winners(const float * scores, size_t n_heads, size_t n, size_t left);

// scores [Hkv][T]: every head gets the mean over the heads, for methods whose layers choose for all heads alike.
void share_among_heads(float * scores, int32_t n_heads_kv, int32_t n_tokens);

}  // namespace kvedge
