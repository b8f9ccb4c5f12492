// Expected attention: the attention that future queries are expected to pay to a token, times the length of the token's value (Devoto et
// al. 2025, arXiv:2510.00636, section 3, as kvpress computes it).

#include "kernels/kernels.h"
#include "plan/stages.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

enum { N_FUTURE, N_SINK, COVARIANCE, VNORM, EPS };

constexpr int32_t RECENT = 32;   // tokens at the end that recent = auto protects; the paper protects none
constexpr int32_t BLOCK  = 128;  // keys at a time

const Param PARAMS[] = {
    setting::whole("n_future", 512, 1, 65536, "positions to come that queries are expected at"),
    setting::whole("n_sink", 4, 0, 4096, "first tokens, which stay, and whose queries do not count"),
    setting::flag("covariance", true, "go by the covariance of the queries beside their mean"),
    setting::flag("vnorm", true, "weigh by the length of the value"),
    setting::number("eps", 0, 0, 1, "added to the attention before it is weighed"),
    {},
};

int32_t auto_recent(int32_t kept, int32_t even, const double *) { return window_recent(RECENT, kept, even); }

bool scores_are_attention(const double * params) { return params[VNORM] != 0.0; }

int32_t first_counted(const double * params) { return (int32_t) params[N_SINK]; }

void observes(const double * params, Observation & to) { to.moments = first_counted(params); }

// The expected future queries of one head: a key's logit is its product with mean + spread * key.
struct Future {
    std::vector<float> mean, spread;  // [ld], [d][ld]
};

Future future_of(const ScoreInput & in, const Turn & by, int32_t query_head, size_t ld) {
    const auto          d = (size_t) in.shape.d_k;
    std::vector<double> mean(d, 0.0), covariance(d * d, 0.0);
    const auto layer = (size_t) in.layer;
    if (in.observed->have().moments >= 0 && in.observed->layer(layer).moments.count(query_head) > 0) {  // else every key is as likely
        const Rotation & rotation = in.observed->rotation(layer);
        in.observed->layer(layer).moments.read(query_head, mean, covariance);
        turn(rotation, by, mean.data(), 1);
        for (size_t i = 0; i < d; i++) {
            turn(rotation, by, covariance.data() + i, d);
        }
        for (size_t i = 0; i < d; i++) {
            turn(rotation, by, covariance.data() + i * d, 1);
        }
    }
    Future out{ std::vector<float>(ld, 0.0f), std::vector<float>(d * ld, 0.0f) };
    std::copy(mean.begin(), mean.end(), out.mean.begin());
    for (size_t i = 0; i < d && in.params[COVARIANCE] == 0.0; i++) {
        for (size_t j = 0; j < d; j++) {
            out.spread[i * ld + j] = (float) (covariance[i * d + j] / 2.0);
        }
    }
    return out;
}

// Writes the expected logits [T] of the pending keys of a head.
void logits(const HeadView & view, const Future & future, int32_t d, std::vector<float> & keys, std::vector<float> & seen, float * out) {
    const size_t    ld = future.mean.size();
    const Kernels & kn = kernels();
    for (const Segment & seg : view.pending) {
        for (int32_t r = 0; r < seg.n; r += BLOCK) {
            const int32_t n = std::min(BLOCK, seg.n - r);
            kn.widen(seg.k.from(r), n, d, keys.data(), ld);
            for (int32_t t = 0; t < n; t++) {
                std::copy(future.mean.begin(), future.mean.end(), seen.begin() + (std::ptrdiff_t) ((size_t) t * ld));
            }
            kn.gemm_pv({ keys.data(), ld }, n, d, { future.spread.data(), ld }, d, seen.data());
            for (int32_t t = 0; t < n; t++) {
                const float bias = seg.bias ? seg.bias[r + t] : 0.0f;
                *out++ = kn.dot(keys.data() + (size_t) t * ld, seen.data() + (size_t) t * ld, (size_t) d) + bias;
            }
        }
    }
}

// x [T] becomes the softmax of x over the tokens from n_sink on; earlier tokens get 0.
void softmax(const int32_t * tokens, int32_t n_sink, std::vector<float> & x) {
    float top = -INFINITY;
    for (size_t t = 0; t < x.size(); t++) {
        x[t] = tokens[t] < n_sink ? -INFINITY : x[t];
        top  = std::max(top, x[t]);
    }
    double total = 0.0;
    for (float & a : x) {
        a = top > -INFINITY ? std::exp(a - top) : 0.0f;
        total += (double) a;
    }
    for (float & a : x) {
        a = total > 0.0 ? (float) ((double) a / total) : 0.0f;
    }
}

// out [T] becomes (out + eps) times the length of the token's value.
void weigh(const HeadView & view, int32_t d, float eps, float * out) {
    std::vector<float> row((size_t) d);
    for (const Segment & seg : view.pending) {
        for (int32_t r = 0; r < seg.n; r++) {
            kernels().widen(seg.v.from(r), 1, d, row.data(), (size_t) d);
            *out = (*out + eps) * std::sqrt(kernels().dot(row.data(), row.data(), (size_t) d));
            out++;
        }
    }
}

void score(const ScoreInput & in, float * out) {
    const auto         T     = (size_t) in.n_tokens;
    const size_t       ld    = (size_t) pad16(in.shape.d_k), all = T * (size_t) in.shape.n_heads_kv;
    const int32_t      group = in.shape.n_heads / in.shape.n_heads_kv, n_sink = first_counted(in.params);
    const Turn         by    = mean_turn(in.observed->rotation((size_t) in.layer), in.next_position, (int32_t) in.params[N_FUTURE]);
    std::vector<float> keys((size_t) BLOCK * ld), seen((size_t) BLOCK * ld), shares(T);
    const auto         token_of = [&](size_t i) { return in.tokens[in.heads ? i : i % T]; };
    std::fill(out, out + all, 0.0f);
    for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
        const HeadView view = in.view->head(in.layer, h);
        float *        row  = out + (size_t) h * T;
        for (int32_t g = 0; g < group; g++) {
            logits(view, future_of(in, by, h * group + g, ld), in.shape.d_k, keys, seen, shares.data());
            softmax(in.tokens + (in.heads ? (size_t) h * T : 0), n_sink, shares);
            for (size_t t = 0; t < T; t++) {
                row[t] += shares[t] / (float) group;
            }
        }
        if (in.params[VNORM] == 0.0) {
            weigh(view, in.shape.d_v, (float) in.params[EPS], row);
        }
    }
    float top = 0.0f;
    for (size_t i = 0; i < all; i++) {
        top = token_of(i) < n_sink ? top : std::max(top, out[i]);
    }
    for (size_t i = 0; i < all; i++) {
        out[i] = token_of(i) < n_sink ? top + 1.0f : out[i];
    }
}

}  // namespace

extern const Scorer scorer_expected = {
    { "expected", PARAMS, observes }, score, auto_recent, nullptr, nullptr, scores_are_attention
};

}  // namespace kvedge
