#pragma once

#include "plan/stages.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// Scales the shares to the sum total, each between `least` and `most`. A share beyond a limit is fixed at the limit, those above `most`
// first; the other shares divide the rest in proportion, or evenly if all of them are 0. All shares >= 0; least * (number of shares) <=
// total <= most * (number of shares).
void fill_up(std::vector<double> & shares, double total, double most, double least);

// Returns whole numbers with the sum total, close to the shares: the shares of fill_up, rounded by the largest remainder (the lower index
// on ties).
std::vector<int64_t> round_shares(std::vector<double> shares, int64_t total, int64_t most, int64_t least = 0);

// Returns the k-th largest of n numbers; k counts from 0, k < n. Not for NaN.
float nth_largest(const float * x, size_t n, size_t k);

// Returns [n_heads] how many of the `left` largest scores [n_heads][n] each head has; ties go to the lower head, then token.
std::vector<int32_t> count_winners(const float * scores, size_t n_heads, size_t n, size_t left);

// scores [Hkv][T]: every head gets the mean over the heads, for methods that choose the same tokens in all heads of a layer.
void share_among_heads(float * scores, int32_t n_heads_kv, int32_t n_tokens);

}  // namespace kvedge
