// How MixKV mixes what it measured.

#pragma once

#include "plan/stages.h"

#include <vector>

namespace kvedge {

double mean(const std::vector<double> & x);

// Min-max to [0, 1], what is constant but for rounding to 0, then scaled so that the mean is `to`.
void scale_to(std::vector<double> & x, double to);

// How alike n keys are whose mean direction has this square (MixKV, eq. 4), in [0, 1].
double redundancy(double square, double n);

}  // namespace kvedge
