// Means: rows that are alike become their mean, around rows that differ from each other the most.

#include "kernels/kernels.h"
#include "plan/stages.h"
#include "system/threads.h"
#include "primitives/likeness.h"

#include <algorithm>

namespace kvedge {

static void prune(const ImageRows & image, int32_t keep, const double *, int32_t n_threads, std::vector<int32_t> & kept) {
    kept = farthest_rows(unit_rows(image), image.d, keep, n_threads);
    std::sort(kept.begin(), kept.end());
}

// Of each kept row and those that are more like it than like any other kept one; of equal ones the first.
static void merge(const ImageRows & image, const std::vector<int32_t> & kept, const double *, int32_t n_threads, float * out) {
    const auto           unit = unit_rows(image);
    const auto           d    = (size_t) image.d;
    std::vector<int32_t> of((size_t) image.n, 0), count(kept.size(), 0);
    parallel_for(n_threads, image.n, [&](int32_t r, int32_t) {
        float best = -2.0f;
        for (size_t i = 0; i < kept.size(); i++) {
            const float like = kernels().dot(unit.data() + (size_t) r * d, unit.data() + (size_t) kept[i] * d, d);
            if (like > best) {
                best           = like;
                of[(size_t) r] = (int32_t) i;
            }
        }
    });
    for (size_t i = 0; i < kept.size(); i++) {
        of[(size_t) kept[i]] = (int32_t) i;
    }
    std::vector<double> sums(kept.size() * d, 0.0);
    for (size_t r = 0; r < (size_t) image.n; r++) {
        count[(size_t) of[r]]++;
        for (size_t i = 0; i < d; i++) {
            sums[(size_t) of[r] * d + i] += (double) image.rows[r * d + i];
        }
    }
    for (size_t i = 0; i < sums.size(); i++) {
        out[i] = (float) (sums[i] / count[i / d]);
    }
}

extern const Pruner pruner_means;
const Pruner        pruner_means = { { "means", nullptr }, prune, merge };

}  // namespace kvedge
