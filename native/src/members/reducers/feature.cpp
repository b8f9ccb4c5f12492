// By feature: every evicted token is averaged into the kept one with the most similar key (PrefixKV table 12), which is
// LOOK-M's averaged merge under the other paper's name.

#include "primitives/merge.h"

namespace kvedge {

static const Param PARAMS[] = { BIAS, {} };

extern const Reducer reducer_feature = { { "feature", PARAMS }, reduce_by<averaging>, merge_scratch, nullptr, biases_of<averaging>, nullptr, averaging };

}  // namespace kvedge
