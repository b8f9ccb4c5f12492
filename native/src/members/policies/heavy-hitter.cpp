// Heavy hitters (H2O sec. 4): the size stays as it was after the prompt. Of the rows before the recent ones, the row with the least
// attention is dropped.

#include "plan/stages.h"

#include <algorithm>

namespace kvedge {

enum { RECENT };

static const Param PARAMS[] = {
    setting::whole("recent", 0, 0, 1 << 20,
                   "last rows that stay; 0: as many as the plan protects of the prompt, or half of the head"),
    {},
};

static int32_t evict(const DecodeInput & in) {
    if (in.length <= in.kept) {
        return -1;
    }
    const int32_t set    = (int32_t) in.params[RECENT];
    const int32_t asked  = set > 0 ? set : in.recent > 0 ? in.recent : in.kept / 2;
    const int32_t recent = std::max(1, std::min(asked, in.kept));
    int32_t       lowest = -1;
    for (int32_t r = std::clamp(in.kept - recent, 0, in.sinks); r < in.length - recent; r++) {
        if (lowest < 0 || in.scores[r] <= in.scores[lowest]) {  // of equal rows the older one stays
            lowest = r;
        }
    }
    return lowest;
}

extern const DecodePolicy decode_heavy_hitter = { { "heavy-hitter", PARAMS }, true, evict };

}  // namespace kvedge
