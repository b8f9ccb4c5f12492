// Averaged merge (LOOK-M eq. 10): k_j <- (k_j + sum of k_i) / (L + 1).

#include "primitives/merge.h"

namespace kvedge {

static const Param PARAMS[] = { BIAS, {} };

static void reduce(const ReduceInput & in, const ReducedRows & out) {
    merge_rows(in, { [](float own, float) { return own; }, [](float) { return 1.0f; }, false, has_mass(in.params[0]) }, out);
}

static bool biases(const double * params) { return has_mass(params[0]); }

extern const Reducer reducer_averaged = { { "averaged", PARAMS }, reduce, merge_scratch, nullptr, biases };

}  // namespace kvedge
