// Value norm: a value with a large norm moves the output more, so the highest norms stay.

#include "primitives/norm.h"

namespace kvedge {

static void score(const ScoreInput & in, float * out) { score_norms(in, true, 1.0f, out); }

extern const Scorer scorer_vnorm = { { "vnorm", nullptr }, false, nullptr, false, nullptr, score };

}  // namespace kvedge
