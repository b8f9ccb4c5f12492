// Merging of evicted rows into the nearest kept row by position (Elastic Cache eq. 2-3, PrefixKV table 12).

#pragma once

#include "plan/stages.h"

namespace kvedge {

// Every evicted row joins the nearest anchor, on ties the one to its left; an anchor becomes the plain mean of itself and
// what joined it, keys and values alike. The anchors are the kept rows [first, last); without any, nothing is merged.
struct Anchors {
    int32_t first, last;
    bool    mass;  // rows count as what they stand for, and anchors get a bias (MergeRule in primitives/merge.h)
};

// in.scratch [n_kept].
void merge_buckets(const ReduceInput & in, const Anchors & anchors, const ReducedRows & out);

}  // namespace kvedge
