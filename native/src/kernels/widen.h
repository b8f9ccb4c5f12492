#pragma once

#include "rows/rows.h"

#include <vector>

namespace kvedge {

// Widens all rows of the segments to float32: keys to k [n][d_k], values to v [n][d_v]. Returns n.
size_t widen_rows(const std::vector<Segment> & segments, const LayerShape & shape, float * k, float * v);

}  // namespace kvedge
