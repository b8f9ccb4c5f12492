// Merging of evicted rows into the nearest kept row by position (Elastic Cache eq. 2-3, PrefixKV table 12).

#pragma once

#include "plan/stages.h"

namespace kvedge {

// Merges every evicted row into the nearest anchor, on ties into the left one. An anchor becomes the plain mean of itself and the rows that
// joined it, for keys and values alike. The anchors are the kept rows [first, last); without anchors nothing is merged.
struct Anchors {
    int32_t first, last;
    bool    mass;  // rows count by the mass that they stand for, and anchors get a bias (MergeRule in primitives/merge.h)
};

// in.scratch: [n_kept] floats.
void merge_buckets(const ReduceInput & in, const Anchors & anchors, const ReducedRows & out);

}  // namespace kvedge
