// Averaged merge (LOOK-M eq. 10): k_j <- (k_j + sum of k_i) / (L + 1).

#include "primitives/merge.h"

namespace kvedge {

static void reduce(const ReduceInput & in, float * k, float * v) {
    merge_rows(in, { [](float) { return 1.0f; }, [](float) { return 1.0f; } }, k, v);
}

extern const Reducer reducer_averaged = { { "averaged", nullptr }, reduce, merge_scratch };

}  // namespace kvedge
