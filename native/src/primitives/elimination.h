#pragma once

#include "plan/stages.h"

namespace kvedge {

extern const Param DISTANCE_PARAMS[];

// Returns the row to drop so that a head holds `share` of all tokens so far, or -1. The row is always `distance` rows before the end of the
// compressed prompt, so that newer rows of the prompt and generated rows slide over this place. If fewer rows follow the sinks, returns the
// middle row.
int32_t evict_by_share(const DecodeInput & in, double share);

}  // namespace kvedge
