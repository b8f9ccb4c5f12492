// Nearest merge: an evicted row joins the kept row whose key is nearest, if it is near; others are dropped.
// pykvedge/plans/stages/reducer/nearest.py is its definition.

#include "primitives/merge.h"

namespace kvedge {

enum { REACH, MASS };

static const Param PARAMS[] = {
    setting::number("reach", 0.8, 0.01, 10.0, "how far away the kept key may be, in lengths of the evicted one"),
    setting::words("bias", "mass,none", "added to a row's logits: ln of the rows that it stands for, or nothing"),
    {}
};

static bool biases(const double * params) { return params[MASS] == 0; }

static void reduce(const ReduceInput & in, const ReducedRows & out) {
    MergeRule rule = { [](float own, float) { return own; }, [](float) { return 1.0f; }, false, biases(in.params) };
    rule.reach     = (float) in.params[REACH];
    merge_rows(in, rule, out);
}

extern const Reducer reducer_nearest = { { "nearest", PARAMS }, reduce, merge_scratch, nullptr, biases };

}  // namespace kvedge
