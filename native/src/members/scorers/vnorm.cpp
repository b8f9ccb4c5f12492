// Value norm: a value with a large norm moves the output more, so the highest norms stay.

#include "plan/stages.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

static WantedMeasures wanted_measures(const double *, bool) {
    WantedMeasures out;
    out.value_norms = true;
    return out;
}

static void score(const ScoreInput & in, float * out) {
    const auto & squares = in.measures->value_squares;
    std::transform(squares.begin(), squares.end(), out, [](float square) { return std::sqrt(square); });
}

extern const Scorer scorer_vnorm = { { "vnorm", nullptr }, score, nullptr, wanted_measures };

}  // namespace kvedge
