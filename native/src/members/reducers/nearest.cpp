// Nearest merge: an evicted row joins the kept row with the nearest key, if that key is in reach; other evicted rows are dropped.
// pykvedge/reference/stages/reducer/nearest.py is the definition.

#include "primitives/merge.h"

namespace kvedge {

enum { REACH, MASS };

static const Param PARAMS[] = {
    setting::number("reach", 0.8, 0.01, 10.0, "how far away the kept key may be, in lengths of the evicted one"),
    setting::words("bias", "mass,none", "added to a row's logits: ln of the rows that it stands for, or nothing"),
    {}
};

static MergeRule rule(const double * params) {
    return { [](float own, float) { return own; }, [](float) { return 1.0f; }, false, params[MASS] == 0, (float) params[REACH] };
}

extern const Reducer reducer_nearest = { { "nearest", PARAMS }, reduce_by<rule>, merge_scratch, nullptr, biases_of<rule>, nullptr, rule };

}  // namespace kvedge
