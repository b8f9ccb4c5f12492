// KeyDiff: a key matters if it points away from the mean of its head's keys (Park et al. 2025, arXiv:2504.15364).

#include "plan/stages.h"

#include <cmath>

namespace kvedge {

namespace {

enum { ANCHOR };

constexpr int32_t RECENT = 32;  // tokens at the end that recent = auto protects; the paper protects none

const Param PARAMS[] = {
    setting::words("anchor", "unit,mean", "the mean of what: keys of length 1, or keys as they are"),
    {},
};

int32_t auto_recent(int32_t kept, int32_t even, const double *) { return window_recent(RECENT, kept, even); }

WantedMeasures wanted_measures(const double * params, bool) {
    WantedMeasures out;
    out.anchor = params[ANCHOR] == 0 ? WantedMeasures::Anchor::unit : WantedMeasures::Anchor::mean;
    return out;
}

void score(const ScoreInput & in, float * out) {
    const auto T = (size_t) in.n_tokens;
    for (size_t i = 0; i < in.measures->cosines.size(); i++) {
        const double length = std::sqrt(in.measures->anchor_squares[i / T]);
        out[i]              = length > 0.0 ? (float) -(in.measures->cosines[i] / length) : 0.0f;
    }
}

}  // namespace

extern const Scorer scorer_keydiff = { { "keydiff", PARAMS }, score, auto_recent, wanted_measures };

}  // namespace kvedge
