// Weighted merge (LOOK-M eq. 12): k_j <- (k_j + sum of w_i k_i) / (L + 1), w_i the cosine similarity, also a negative one unless clamped.
// With sim_filter, rows that are less similar than the mean are dropped, as in the released code.

#include "primitives/merge.h"

namespace kvedge {

enum { SIM_FILTER, CLAMP, MASS };

static const Param PARAMS[] = {
    setting::flag("sim_filter", false, "merge only what is at least as similar as the mean, drop the rest"),
    setting::flag("clamp", false, "count negative similarities as 0"),
    BIAS,
    {},
};

static float as_is(float similarity) { return similarity; }
static float clamped(float similarity) { return similarity > 0.0f ? similarity : 0.0f; }

static MergeRule rule(const double * params) {
    const bool clamp = params[CLAMP] == 0, filter = params[SIM_FILTER] == 0;
    return { [](float own, float) { return own; }, clamp ? clamped : as_is, filter, has_mass(params[MASS]), 0.0f, true };
}

extern const Reducer reducer_weighted = { { "weighted", PARAMS }, reduce_by<rule>, merge_scratch, nullptr, biases_of<rule>, nullptr, rule };

}  // namespace kvedge
