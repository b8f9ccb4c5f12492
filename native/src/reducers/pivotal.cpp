// Pivotal merge (LOOK-M eq. 11): k_j <- (k_j + sum of (k_i + k_j) / 2) / (L + 1), so the kept row weighs 1 + L / 2.

#include "primitives/merge.h"

namespace kvedge {

static const Param PARAMS[] = { BIAS, {} };

static void reduce(const ReduceInput & in, const ReducedRows & out) {
    merge_rows(in, { [](float own, float merged) { return own + 0.5f * merged; }, [](float) { return 0.5f; }, false, has_mass(in.params[0]) }, out);
}

static bool biases(const double * params) { return has_mass(params[0]); }

extern const Reducer reducer_pivotal = { { "pivotal", PARAMS }, reduce, merge_scratch, nullptr, biases };

}  // namespace kvedge
