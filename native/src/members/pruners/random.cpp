// Random: the baseline that every pruner must beat.

#include "plan/stages.h"
#include "primitives/mix.h"

#include <algorithm>
#include <utility>

namespace kvedge {

static const Param PARAMS[] = { setting::whole("seed", 0, 0, INT32_MAX, "another seed, other rows"), {} };

// Keeps the rows with the smallest mix(mix(seed) + row).
static void prune(const ImageRows & image, int32_t keep, const double * params, int32_t, std::vector<int32_t> & kept) {
    const uint64_t                            seed = mix((uint64_t) params[0]);
    std::vector<std::pair<uint64_t, int32_t>> drawn;
    for (int32_t r = 0; r < image.n; r++) {
        drawn.emplace_back(mix(seed + (uint64_t) r), r);
    }
    std::nth_element(drawn.begin(), drawn.begin() + (keep - 1), drawn.end());
    for (int32_t i = 0; i < keep; i++) {
        kept.push_back(drawn[(size_t) i].second);
    }
    std::sort(kept.begin(), kept.end());
}

extern const Pruner pruner_random;
const Pruner        pruner_random = { { "random", PARAMS }, prune };

}  // namespace kvedge
