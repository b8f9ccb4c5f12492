// Max-min diversity: no two rows that are kept are much alike (DivPrune, Alvar et al. 2025, arXiv:2503.02175).

#include "plan/stages.h"
#include "primitives/likeness.h"

#include <algorithm>

namespace kvedge {

static void prune(const ImageRows & image, int32_t keep, const double *, int32_t n_threads, std::vector<int32_t> & kept) {
    kept = farthest_rows(unit_rows(image), image.d, keep, n_threads);
    std::sort(kept.begin(), kept.end());
}

extern const Pruner pruner_maxmin;
const Pruner        pruner_maxmin = { { "maxmin", nullptr }, prune, nullptr };

}  // namespace kvedge
