#pragma once

#include "core/stages.h"

namespace kvedge {

// out [Hkv][T] = sign * Euclidean norm of every pending key (or value) of the layer.
void score_norms(const ScoreInput & in, bool of_values, float sign, float * out);

}  // namespace kvedge
