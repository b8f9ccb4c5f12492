#pragma once

#include "plan/plan.h"

#include <vector>

namespace kvedge {

struct Protection {
    int32_t sinks, recent;
};

// First and last tokens that stay whatever their score, when `count` of n_tokens do. What gives way when the budget is
// too small: recent tokens outlast sinks, except where the method is made of sinks.
Protection fit_protection(const kvedge_plan & plan, int32_t n_tokens, int32_t count);

// Token indices (ascending) that one head keeps of a prompt: the protected ones, then the best of the others by class
// (text above image with the text prior) and score, ties to the lower index.
// With a second score, reserve [T] or NULL, the scorer's reserved() first of them are the best by that.
// With weights, [T] or NULL, the critical rule follows: the best by score until half of `count` is chosen, protected and
// reserved tokens included (critical_half = free: half of what is not protected), and then the best by (score + 1e-4) * weight
// (Feng et al. 2025, algorithm 1; 1e-4 is the released code's).
// image [T] 1 for an image token; scores [T]; count 1 <= count < T. Returns count indices; more only with text_overflow =
// keep_all.
std::vector<int32_t> select_tokens(
    const kvedge_plan & plan, int32_t n_tokens, int32_t count, const uint8_t * image, const float * scores, const float * reserve,
    const float * weights = nullptr);

}  // namespace kvedge
