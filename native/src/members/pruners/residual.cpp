// Residual: keeps, one after another, the row that is farthest from what the model has read: first from the image's mean, which stands for
// the background, then also from the nearest kept row.

#include "kernels/kernels.h"
#include "plan/stages.h"
#include "system/threads.h"

#include <algorithm>

namespace kvedge {

static constexpr int32_t TILE = 64;  // rows in a task of a thread

// Returns the rows [n][d] minus their mean.
static std::vector<float> centred(const ImageRows & image) {
    const auto          n = (size_t) image.n, d = (size_t) image.d;
    std::vector<double> mean(d, 0.0);
    std::vector<float>  out(n * d);
    for (size_t i = 0; i < n * d; i++) {
        mean[i % d] += (double) image.rows[i] / (double) n;
    }
    for (size_t i = 0; i < n * d; i++) {
        out[i] = (float) ((double) image.rows[i] - mean[i % d]);
    }
    return out;
}

static void prune(const ImageRows & image, int32_t keep, const double *, int32_t n_threads, std::vector<int32_t> & kept) {
    const Kernels & kn   = kernels();
    const auto      d    = (size_t) image.d;
    const auto      rows = centred(image);
    // squared lengths, and squared distances to the nearest of the mean and the kept rows
    std::vector<float> length((size_t) image.n), away((size_t) image.n);
    for (size_t r = 0; r < length.size(); r++) {
        length[r] = away[r] = kn.dot(rows.data() + r * d, rows.data() + r * d, d);
    }
    for (int32_t i = 0; i < keep; i++) {
        const auto    last = std::max_element(away.begin(), away.end()) - away.begin();
        const float * to   = rows.data() + (size_t) last * d;
        kept.push_back((int32_t) last);
        away[(size_t) last] = -1.0f;
        parallel_for(n_threads, (image.n + TILE - 1) / TILE, [&](int32_t tile, int32_t) {
            for (size_t r = (size_t) tile * TILE; r < (size_t) std::min(image.n, (tile + 1) * TILE); r++) {
                if (away[r] >= 0.0f) {
                    const float by = length[r] + length[(size_t) last] - 2.0f * kn.dot(rows.data() + r * d, to, d);
                    away[r]        = std::min(away[r], std::max(by, 0.0f));
                }
            }
        });
    }
    std::sort(kept.begin(), kept.end());
}

extern const Pruner pruner_residual;
const Pruner        pruner_residual = { { "residual", nullptr }, prune };

}  // namespace kvedge
