// None: the model reads every row of an image.

#include "plan/stages.h"

#include <numeric>

namespace kvedge {

static void prune(const ImageRows & image, int32_t, const double *, int32_t, std::vector<int32_t> & kept) {
    kept.resize((size_t) image.n);
    std::iota(kept.begin(), kept.end(), 0);
}

extern const Pruner pruner_none;
const Pruner        pruner_none = { { "none", nullptr }, prune };

}  // namespace kvedge
