// How MixKV mixes its measurements.

#pragma once

#include "plan/stages.h"

#include <vector>

namespace kvedge {

double mean(const std::vector<double> & x);

// Scales x: min-max to [0, 1], then to the mean `to`. Values that differ by rounding alone become 0.
void scale_to(std::vector<double> & x, double to);

// Returns how alike n keys are, in [0, 1]. square: the squared length of their mean direction (MixKV, eq. 4).
double redundancy(double square, double n);

}  // namespace kvedge
