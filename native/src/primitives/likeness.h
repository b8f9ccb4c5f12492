// How much rows of an image are alike: by their cosine.

#pragma once

#include "plan/stages.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// The rows with length 1, [n][d]; a row of zeros stays one. Throws std::bad_alloc.
std::vector<float> unit_rows(const ImageRows & image);

// n rows of unit [image.n][d] in the order in which they are taken: first the row whose nearest other row is farthest, then
// always the one farthest from the nearest that is taken; of equal ones the first. Throws std::bad_alloc.
std::vector<int32_t> farthest_rows(const std::vector<float> & unit, int32_t d, int32_t n, int32_t n_threads);

}  // namespace kvedge
