// Pivotal merge (LOOK-M eq. 11): k_j <- (k_j + sum of (k_i + k_j) / 2) / (L + 1), so the kept row weighs 1 + L / 2.

#include "primitives/merge.h"

namespace kvedge {

static void reduce(const ReduceInput & in, float * k, float * v) {
    merge_rows(in, { [](float n) { return 1.0f + 0.5f * n; }, [](float) { return 0.5f; } }, k, v);
}

extern const Reducer reducer_pivotal = { { "pivotal", nullptr }, reduce, merge_scratch };

}  // namespace kvedge
