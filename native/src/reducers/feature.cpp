// By feature: every evicted token is averaged into the kept one with the most similar key (PrefixKV table 12), which is
// LOOK-M's averaged merge under the other paper's name.

#include "primitives/merge.h"

namespace kvedge {

static const Param PARAMS[] = { BIAS, {} };

static void reduce(const ReduceInput & in, const ReducedRows & out) {
    merge_rows(in, { [](float own, float) { return own; }, [](float) { return 1.0f; }, false, has_mass(in.params[0]) }, out);
}

static bool biases(const double * params) { return has_mass(params[0]); }

extern const Reducer reducer_feature = { { "feature", PARAMS }, reduce, merge_scratch, nullptr, biases };

}  // namespace kvedge
