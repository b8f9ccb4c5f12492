// Ratio-keeping elimination (PrefixKV sec. 3.1): like fixed-point, with the share that the head's layer was granted.

#include "primitives/elimination.h"

namespace kvedge {

static int32_t evict(const DecodeInput & in) {
    return evict_by_share(in, (double) in.kept / in.prompt);
}

extern const DecodePolicy decode_ratio = { { "ratio", DISTANCE_PARAMS }, false, evict };

}  // namespace kvedge
