#include "primitives/mixture.h"

#include "backend/cpu/kernels/kernels.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

constexpr double EPS  = 1e-8;
constexpr double SAME = 1e-6;  // of the largest: what differs by less does so by rounding, as two keys that are as far from their mean

// visit(row, t) for the head's pending keys, widened.
template <class F> void each_key(const HeadView & view, size_t d, const F & visit) {
    std::vector<float> row(d);
    int32_t            t = 0;
    for (const Segment & seg : view.pending) {
        for (int32_t r = 0; r < seg.n; r++, t++) {
            kernels().to_f32(seg.k.type, seg.k.data + (size_t) r * seg.k.stride, row.data(), d);
            visit(row.data(), t);
        }
    }
}

}  // namespace

double mean(const std::vector<double> & x) {
    double sum = 0.0;
    for (double v : x) {
        sum += v;
    }
    return sum / (double) x.size();
}

void scale_to(std::vector<double> & x, double to) {
    const auto [low, high] = std::minmax_element(x.begin(), x.end());
    const double a = *low, width = *high - *low, least = SAME * std::max(std::abs(*low), std::abs(*high));
    for (double & v : x) {
        v = width > least ? (v - a) / (width + EPS) : 0.0;
    }
    const double factor = to / (mean(x) + EPS);
    for (double & v : x) {
        v *= factor;
    }
}

Keys read_keys(const HeadView & view, const LayerShape & shape, int32_t n_tokens, const uint8_t * counts, const uint8_t * wanted) {
    constexpr int32_t   CHUNK = 64;  // directions that are summed in float32 before the sum goes on in double
    const Kernels &     kn = kernels();
    const auto          d = (size_t) shape.d_k;
    const auto          n = (double) (counts ? std::count(counts, counts + n_tokens, (uint8_t) 1) : n_tokens);
    std::vector<float>  inverse((size_t) n_tokens), part(d, 0.0f);
    std::vector<double> center(d, 0.0);
    Keys                keys{ {}, {}, 0.0 };
    each_key(view, d, [&](const float * row, int32_t t) {
        const double norm = std::sqrt((double) kn.dot(row, row, d));
        inverse[(size_t) t] = norm > 0.0 ? (float) (1.0 / norm) : 0.0f;
        if (!counts || counts[t]) {
            kn.axpy(inverse[(size_t) t], row, part.data(), d);
        }
        if (t % CHUNK == CHUNK - 1 || t + 1 == n_tokens) {
            for (size_t i = 0; i < d; i++) {
                center[i] += (double) part[i] / n;
                part[i] = 0.0f;
            }
        }
        if (wanted[t]) {
            keys.minus_norm.push_back(-norm);
        }
    });
    double             sq = 0.0;
    std::vector<float> mean_direction(center.begin(), center.end());
    for (double c : center) {
        sq += c * c;
    }
    each_key(view, d, [&](const float * row, int32_t t) {
        if (wanted[t]) {
            keys.diversity.push_back(-(double) inverse[(size_t) t] * (double) kn.dot(row, mean_direction.data(), d));
        }
    });
    keys.redundancy = n > 1.0 ? std::clamp((n * sq - 1.0) / (n - 1.0), 0.0, 1.0) : 0.0;
    return keys;
}

std::vector<double> value_norms(const HeadView & view, const LayerShape & shape, const uint8_t * wanted) {
    const auto          d = (size_t) shape.d_v;
    std::vector<float>  row(d);
    std::vector<double> norms;
    int32_t             t = 0;
    for (const Segment & seg : view.pending) {
        for (int32_t r = 0; r < seg.n; r++, t++) {
            if (wanted[t]) {
                kernels().widen(seg.v.from(r), 1, (int32_t) d, row.data(), d);
                norms.push_back(std::sqrt((double) kernels().dot(row.data(), row.data(), d)));
            }
        }
    }
    return norms;
}

}  // namespace kvedge
