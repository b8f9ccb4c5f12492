// By feature: every evicted token is averaged into the kept one with the most similar key (PrefixKV table 12), which is
// LOOK-M's averaged merge under the other paper's name.

#include "primitives/merge.h"

namespace kvedge {

static void reduce(const ReduceInput & in, float * k, float * v) {
    merge_rows(in, { [](float) { return 1.0f; }, [](float) { return 1.0f; } }, k, v);
}

extern const Reducer reducer_feature = { { "feature", nullptr }, reduce, merge_scratch };

}  // namespace kvedge
