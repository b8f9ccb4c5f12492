#pragma once

#include "core/plan.h"

#include <vector>

namespace kvedge {

// Token indices (ascending) that one head keeps of a prompt: the protected ones, then the best of the others by class
// (text above image with the text prior) and score, ties to the lower index.
// image [T] 1 for an image token; scores [T]; count 1 <= count < T. Returns count indices; more only with text_overflow =
// keep_all.
std::vector<int32_t> select_tokens(
    const kvedge_plan & plan, int32_t n_tokens, int32_t count, const uint8_t * image, const float * scores);

}  // namespace kvedge
