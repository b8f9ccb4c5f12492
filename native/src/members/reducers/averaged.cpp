// Averaged merge (LOOK-M eq. 10): k_j <- (k_j + sum of k_i) / (L + 1).

#include "primitives/merge.h"

namespace kvedge {

static const Param PARAMS[] = { BIAS, {} };

extern const Reducer reducer_averaged = { { "averaged", PARAMS }, reduce_by<averaging>, merge_scratch, nullptr, biases_of<averaging>, nullptr, averaging };

}  // namespace kvedge
