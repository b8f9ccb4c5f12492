#pragma once

#include "plan/stages.h"

namespace kvedge {

extern const Param DISTANCE_PARAMS[];

// The row to drop so that a head holds `share` of all tokens so far, or -1: always the one that lay `distance` rows before
// the end of the compressed prompt, so that the newest rows of the prompt and what was generated slide over that place.
// Short of that many rows beyond the sinks, the middle one.
int32_t evict_by_share(const DecodeInput & in, double share);

}  // namespace kvedge
