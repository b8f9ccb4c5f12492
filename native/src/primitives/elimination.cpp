#include "primitives/elimination.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

enum { DISTANCE, RELATIVE };

const Param DISTANCE_PARAMS[] = {
    setting::whole("distance", 25, 1, 1 << 20, "rows between the fixed place and the end of the compressed prompt"),
    setting::flag("relative", false, "the distance is from the newest row, so that the place moves along"),
    {},
};

int32_t evict_by_share(const DecodeInput & in, double share) {
    if (std::floor(in.length - (in.prompt + in.generated) * share + 1e-9) <= 0.0) {
        return -1;
    }
    const int32_t end = in.params[RELATIVE] == 0 ? in.length : in.kept;
    const int32_t row = end - (int32_t) in.params[DISTANCE];
    return row >= std::max(in.sinks, 1) ? row : std::max(in.sinks, end / 2);
}

}  // namespace kvedge
