// Pivotal merge (LOOK-M eq. 11): k_j <- (k_j + sum of (k_i + k_j) / 2) / (L + 1), so the kept row weighs 1 + L / 2.

#include "primitives/merge.h"

namespace kvedge {

static const Param PARAMS[] = { BIAS, {} };

static MergeRule rule(const double * params) {
    return { [](float own, float merged) { return own + 0.5f * merged; }, [](float) { return 0.5f; }, false, has_mass(params[0]) };
}

extern const Reducer reducer_pivotal = { { "pivotal", PARAMS }, reduce_by<rule>, merge_scratch, nullptr, biases_of<rule>, nullptr, rule };

}  // namespace kvedge
