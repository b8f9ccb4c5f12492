// Key norm: keys with a small norm draw the most attention (Devoto et al. 2024), so the lowest norms stay.

#include "primitives/norm.h"

namespace kvedge {

static void score(const ScoreInput & in, float * out) { score_norms(in, false, -1.0f, out); }

extern const Scorer scorer_knorm = { { "knorm", nullptr }, false, nullptr, false, nullptr, score };

}  // namespace kvedge
