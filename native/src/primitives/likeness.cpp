#include "primitives/likeness.h"

#include "kernels/kernels.h"
#include "system/threads.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvedge {

namespace {

constexpr int32_t TILE = 64;  // rows that a thread compares with all others at a time

// Of each row the largest cosine to any other.
std::vector<float> nearest_others(const std::vector<float> & unit, int32_t d, int32_t n_threads) {
    const Kernels & kn = kernels();
    const auto      n  = (int32_t) (unit.size() / (size_t) d);
    const int32_t   ld = (n + kn.panel - 1) / kn.panel * kn.panel;
    std::vector<float> packed((size_t) ld * (size_t) d), nearest((size_t) n, -std::numeric_limits<float>::infinity());
    kn.pack({ (const uint8_t *) unit.data(), (size_t) d * sizeof(float), Type::f32 }, n, d, packed.data());
    std::vector<std::vector<float>> scratch((size_t) std::max(1, n_threads));
    parallel_for(n_threads, (n + TILE - 1) / TILE, [&](int32_t tile, int32_t worker) {
        const int32_t        first = tile * TILE, m = std::min(TILE, n - first);
        std::vector<float> & s     = scratch[(size_t) worker];
        s.resize((size_t) TILE * (size_t) ld);
        kn.gemm_qk({ unit.data() + (size_t) first * (size_t) d, (size_t) d }, m, packed.data(), n, d, { s.data(), (size_t) ld });
        for (int32_t r = 0; r < m; r++) {
            float * row    = s.data() + (size_t) r * (size_t) ld;
            row[first + r] = -std::numeric_limits<float>::infinity();
            nearest[(size_t) (first + r)] = kn.max(row, (size_t) n);
        }
    });
    return nearest;
}

}  // namespace

std::vector<float> unit_rows(const ImageRows & image) {
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

std::vector<int32_t> farthest_rows(const std::vector<float> & unit, int32_t d, int32_t n, int32_t n_threads) {
    const Kernels &    kn     = kernels();
    const auto         rows   = (int32_t) (unit.size() / (size_t) d);
    const auto         others = nearest_others(unit, d, n_threads);
    std::vector<float> nearest((size_t) rows, -std::numeric_limits<float>::infinity());
    std::vector<int32_t> taken = { (int32_t) (std::min_element(others.begin(), others.end()) - others.begin()) };
    for (;;) {
        const float * last = unit.data() + (size_t) taken.back() * (size_t) d;
        parallel_for(n_threads, (rows + TILE - 1) / TILE, [&](int32_t tile, int32_t) {
            for (int32_t r = tile * TILE; r < std::min(rows, (tile + 1) * TILE); r++) {
                float & to = nearest[(size_t) r];
                to         = std::max(to, kn.dot(unit.data() + (size_t) r * (size_t) d, last, (size_t) d));
            }
        });
        nearest[(size_t) taken.back()] = std::numeric_limits<float>::infinity();
        if ((int32_t) taken.size() == n) {
            return taken;
        }
        taken.push_back((int32_t) (std::min_element(nearest.begin(), nearest.end()) - nearest.begin()));
    }
}

}  // namespace kvedge
