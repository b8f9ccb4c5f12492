// KeyDiff: keys that point elsewhere than the mean of their head's keys matter (Park et al. 2025, arXiv:2504.15364).

#include "backend/cpu/kernels/kernels.h"
#include "core/stages.h"

#include <cmath>

namespace kvedge {

namespace {

enum { ANCHOR };

constexpr int32_t RECENT = 32;  // tokens at the end that recent = auto protects; the paper protects none

const Param PARAMS[] = {
    setting::words("anchor", "unit,mean", "the mean of what: keys of length 1, or keys as they are"),
    {},
};

int32_t auto_recent(int32_t kept, int32_t even, const double *) { return window_recent(RECENT, kept, even); }

// visit(row) for the head's pending keys, widened.
template <class F> void each_key(const HeadView & view, size_t d, const F & visit) {
    std::vector<float> row(d);
    for (const Segment & seg : view.pending) {
        for (int32_t r = 0; r < seg.n; r++) {
            kernels().widen(seg.k.from(r), 1, (int32_t) d, row.data(), d);
            visit(row.data());
        }
    }
}

// The anchor's direction, of length 1, or 0 where it has none. inverse [T]: one over the length of each key.
std::vector<float> direction(const ScoreInput & in, const HeadView & view, std::vector<float> & inverse) {
    const auto          d = (size_t) in.shape.d_k;
    std::vector<double> sum(d, 0.0);
    inverse.clear();
    each_key(view, d, [&](const float * row) {
        const double norm = std::sqrt((double) kernels().dot(row, row, d));
        inverse.push_back(norm > 0.0 ? (float) (1.0 / norm) : 0.0f);
        const double weight = in.params[ANCHOR] == 0 ? (double) inverse.back() : 1.0;
        for (size_t i = 0; i < d; i++) {
            sum[i] += weight * (double) row[i];
        }
    });
    double square = 0.0;
    for (double x : sum) {
        square += x * x;
    }
    std::vector<float> out(d, 0.0f);
    for (size_t i = 0; i < d && square > 0.0; i++) {
        out[i] = (float) (sum[i] / std::sqrt(square));
    }
    return out;
}

void score(const ScoreInput & in, float * out) {
    const auto         d = (size_t) in.shape.d_k;
    std::vector<float> inverse;
    inverse.reserve((size_t) in.n_tokens);
    for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
        const HeadView           view   = in.view->head(in.layer, h);
        const std::vector<float> anchor = direction(in, view, inverse);
        size_t                   t      = 0;
        each_key(view, d, [&](const float * row) {
            *out++ = -inverse[t++] * kernels().dot(row, anchor.data(), d);
        });
    }
}

}  // namespace

extern const Scorer scorer_keydiff = { { "keydiff", PARAMS }, false, auto_recent, false, nullptr, score };

}  // namespace kvedge
