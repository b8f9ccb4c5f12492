// Mean attention per query that saw the token. Tokens whose attention varies the most get a reserved part (RoCo, Ren & Zhu 2024).

#include "plan/stages.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

enum { SPREAD };

const Param PARAMS[] = { setting::number("spread", 0.3, 0, 1, "share of the kept tokens that have the largest deviation"), {} };

int32_t part(double share, int32_t of) { return (int32_t) std::floor(share * of + 1e-9); }

int32_t auto_recent(int32_t kept, int32_t, const double *) { return std::max(1, part(0.1, kept)); }

int32_t reserved(int32_t kept, const double * params) { return part(params[SPREAD], kept); }

// out [Hkv][T] = of(mean, mean of the squares) of each token's attention; 0 if no query saw the token.
template <class F> void each_token(const ScoreInput & in, float * out, const F & of) {
    const Columns & columns = in.observed->layer((size_t) in.layer).columns;
    for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
        const size_t at = (size_t) h * (size_t) columns.capacity;
        for (size_t t = 0; t < (size_t) in.n_tokens; t++) {
            const double n = in.observed->seen()[t];
            *out++         = n > 0 ? (float) of(columns.sums()[at + t] / n, columns.of[column::squares][at + t] / n) : 0.0f;
        }
    }
}

void score(const ScoreInput & in, float * out) {
    each_token(in, out, [](double mean, double) { return mean; });
}

// Writes the standard deviation of each token's attention. Rounding can make a tiny variance negative.
void reserve(const ScoreInput & in, float * out) {
    each_token(in, out, [](double mean, double square) { return std::sqrt(std::max(0.0, square - mean * mean)); });
}

}  // namespace

extern const Scorer scorer_mean = {
    { "mean", PARAMS, [](const double *, Observation & to) { to.columns[column::sums] = to.columns[column::squares] = true; } },
    score, auto_recent, nullptr, nullptr, always_attention, nullptr, nullptr, reserved, reserve
};

}  // namespace kvedge
