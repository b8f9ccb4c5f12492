#pragma once

#include "plan/plan.h"

#include <vector>

namespace kvedge {

struct Protection {
    int32_t sinks, recent;
};

// Returns the numbers of first tokens (sinks) and last tokens (recent) that are kept for any score, in a head that keeps
// `count` of n_tokens. If both do not fit, sinks are dropped first; with Scorer::sinks_first, recent tokens are.
Protection fit_protection(const kvedge_plan & plan, int32_t n_tokens, int32_t count);

// Returns the indices, ascending, of the pending rows that one head keeps: `count` rows, or more with text_overflow = keep_all.
//   1. protected rows
//   2. if reserve is not NULL: the best Scorer::reserved() rows by reserve [T]
//   3. the best other rows by scores [T]; ties go to the lower index
// weights [T] not NULL (critical rule): steps 1 to 3 choose half of `count` (critical_half = free: steps 2 and 3 choose half of the
// unprotected rows); the rest are the best by (score + 1e-4) * weight (Feng et al. 2025, algorithm 1; 1e-4: released code).
// With text_prior, text rows come before image rows in every choice. image [T]: 1 for an image token. 1 <= count < T.
std::vector<int32_t> select_tokens(
    const kvedge_plan & plan, int32_t n_tokens, int32_t count, const uint8_t * image, const float * scores, const float * reserve,
    const float * weights = nullptr);

}  // namespace kvedge
