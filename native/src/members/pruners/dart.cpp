// DART: keeps the rows that are least like a few pivots (Wen et al. 2025, arXiv:2502.11494), on embeddings instead of keys.

#include "kernels/kernels.h"
#include "plan/stages.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvedge {

enum { PIVOTS };

static const Param PARAMS[] = { setting::whole("pivots", 4, 1, 64, "rows of the largest norm, which the others are compared with"), {} };

// Returns the rows with length 1, [n][d]; a row of zeros stays zero.
static std::vector<float> unit_rows(const ImageRows & image) {
    const auto         d = (size_t) image.d;
    std::vector<float> out(image.rows, image.rows + (size_t) image.n * d);
    for (size_t r = 0; r < (size_t) image.n; r++) {
        double sum = 0.0;
        for (size_t i = 0; i < d; i++) {
            sum += (double) out[r * d + i] * (double) out[r * d + i];
        }
        const double length = sum > 0.0 ? std::sqrt(sum) : 1.0;
        for (size_t i = 0; i < d; i++) {
            out[r * d + i] = (float) ((double) out[r * d + i] / length);
        }
    }
    return out;
}

static std::vector<int32_t> by_norm(const ImageRows & image) {
    std::vector<double>  norms((size_t) image.n, 0.0);
    std::vector<int32_t> order((size_t) image.n);
    for (size_t i = 0; i < (size_t) image.n * (size_t) image.d; i++) {
        norms[i / (size_t) image.d] += std::fabs((double) image.rows[i]);
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return norms[(size_t) a] > norms[(size_t) b]; });
    return order;
}

static void prune(const ImageRows & image, int32_t keep, const double * params, int32_t, std::vector<int32_t> & kept) {
    const auto           unit   = unit_rows(image);
    const auto           d      = (size_t) image.d;
    std::vector<int32_t> pivots = by_norm(image);
    pivots.resize((size_t) std::min((int32_t) params[PIVOTS], keep));
    std::vector<char> taken((size_t) image.n, 0);
    for (const int32_t p : pivots) {
        taken[(size_t) p] = 1;
    }
    const int32_t n_pivots = (int32_t) pivots.size(), rest = keep - n_pivots;
    for (int32_t j = 0; j < n_pivots; j++) {
        std::vector<std::pair<float, int32_t>> left;
        for (int32_t r = 0; r < image.n; r++) {
            if (!taken[(size_t) r]) {
                left.emplace_back(kernels().dot(unit.data() + (size_t) r * d, unit.data() + (size_t) pivots[(size_t) j] * d, d), r);
            }
        }
        const int32_t share = rest / n_pivots + (j < rest % n_pivots ? 1 : 0);
        std::partial_sort(left.begin(), left.begin() + share, left.end());
        for (int32_t i = 0; i < share; i++) {
            taken[(size_t) left[(size_t) i].second] = 1;
        }
    }
    for (int32_t r = 0; r < image.n; r++) {
        if (taken[(size_t) r]) {
            kept.push_back(r);
        }
    }
}

extern const Pruner pruner_dart;
const Pruner        pruner_dart = { { "dart", PARAMS }, prune };

}  // namespace kvedge
