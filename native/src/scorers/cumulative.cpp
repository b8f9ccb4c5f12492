// Cumulative attention: what every query of the prompt paid to a token (H2O; LOOK-M eq. 4).

#include "core/stages.h"

namespace kvedge {

static void score(const ScoreInput & in, int32_t head, float * out) {
    const double * sums = in.column_sums + (size_t) head * (size_t) in.sums_capacity;
    for (int32_t t = 0; t < in.n_tokens; t++) {
        out[t] = (float) sums[t];
    }
}

extern const Scorer scorer_cumulative;
const Scorer        scorer_cumulative = { "cumulative", true, true, score };

}  // namespace kvedge
