// Weighted merge (LOOK-M eq. 12): k_j <- (k_j + sum of w_i k_i) / (L + 1), w_i the cosine similarity, negative ones too.

#include "primitives/merge.h"

namespace kvedge {

static void reduce(const ReduceInput & in, float * k, float * v) {
    merge_rows(in, { [](float) { return 1.0f; }, [](float similarity) { return similarity; } }, k, v);
}

extern const Reducer reducer_weighted;
const Reducer        reducer_weighted = { { "weighted", nullptr }, reduce, merge_scratch };

}  // namespace kvedge
