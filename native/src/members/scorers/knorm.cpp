// Key norm: keys with a small norm draw the most attention (Devoto et al. 2024), so the lowest norms stay.

#include "plan/stages.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

static WantedMeasures wanted_measures(const double *, bool) {
    WantedMeasures out;
    out.key_norms = true;
    return out;
}

static void score(const ScoreInput & in, float * out) {
    const auto & squares = in.measures->key_squares;
    std::transform(squares.begin(), squares.end(), out, [](float square) { return -std::sqrt(square); });
}

extern const Scorer scorer_knorm = { { "knorm", nullptr }, score, nullptr, wanted_measures };

}  // namespace kvedge
