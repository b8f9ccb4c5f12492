// Fixed-point elimination (Elastic Cache sec. 3.3): the cache keeps the budget's share of all tokens so far. A surplus row is dropped at
// one fixed place, so that the oldest and the newest rows stay.

#include "primitives/elimination.h"

namespace kvedge {

static int32_t evict(const DecodeInput & in) {
    return evict_by_share(in, (double) in.budget / in.prompt);
}

extern const DecodePolicy decode_fixed_point = { { "fixed-point", DISTANCE_PARAMS }, false, evict };

}  // namespace kvedge
