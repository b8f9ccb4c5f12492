// Merging of evicted rows into the nearest kept row by position (Elastic Cache eq. 2-3, PrefixKV table 12).

#pragma once

#include "core/stages.h"

namespace kvedge {

// Every evicted row joins the nearest anchor, on ties the one to its left; an anchor becomes the plain mean of itself and
// what joined it, keys and values alike. The anchors are the kept rows [first, last); without any, nothing is merged.
void merge_buckets(const ReduceInput & in, int32_t first, int32_t last, float * k, float * v);

}  // namespace kvedge
