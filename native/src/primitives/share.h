#pragma once

#include "core/stages.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// Whole numbers close to the shares, which add up to total exactly: scaled to total, what exceeds `most` or falls below
// `least` settled by the others in proportion, rounded by the largest remainder (the lower index on ties). All shares >= 0; where none is
// left to take an excess in proportion, it is spread evenly. least * (number of shares) <= total
// <= most * (number of shares).
std::vector<int64_t> round_shares(std::vector<double> shares, int64_t total, int64_t most, int64_t least = 0);

}  // namespace kvedge
