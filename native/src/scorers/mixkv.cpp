// Importance and diversity mixed by each head's redundancy (MixKV, sec. 3): attention of the last queries plus the norm
// of the value, and distance from the mean key direction; the more alike a head's keys, the more diversity counts.

#include "backend/cpu/kernels/kernels.h"
#include "core/profile.h"
#include "core/stages.h"
#include "primitives/window.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

enum { WINDOW, KERNEL, POOL, VALUE, MODE, SCALE, SOURCE, PARTS };
enum { HEADWISE, IMPORTANCE, DIVERSITY, EVEN };

const Param PARAMS[] = {
    setting::whole("window", 32, 1, 4096, "last queries, which vote, and tokens kept, as far as parts lets them"),
    setting::whole("kernel", 5, 1, 255, "pooling width, odd", 2),
    setting::words("pool", "avg,max", "pooling: avg or max"),
    setting::words("value", "vnorm,knorm", "beside attention: large values or small keys"),
    setting::words("mode", "headwise,importance,diversity,even",
                   "what counts: headwise (by redundancy), importance, diversity, or both evenly"),
    setting::words("scale", "imp,ex", "diversity has the mean of: importance or attention"),  // the paper; the code
    setting::words("source", "online,profile", "of a head's redundancy: this prompt or a profile"),  // the paper; the code
    setting::whole("parts", 2, 1, 64, "one in so many kept pairs is the window's at most, whatever its score"),
    {},
};

constexpr double EPS = 1e-8;

int32_t window(const double * params) { return (int32_t) params[WINDOW]; }

int32_t auto_recent(int32_t kept, int32_t even, const double * params) { return window_recent(window(params), kept, even, (int32_t) params[PARTS]); }

bool from_profile(const double * params) { return params[SOURCE] == 1 && params[MODE] == HEADWISE; }

ProfileKind profile_kind(const double * params) { return from_profile(params) ? ProfileKind::kv_heads : ProfileKind::none; }

double redundancy_by_profile(const ScoreInput & in, int32_t head) {
    return (double) in.profile->layer(in.shape.il)[head];
}

double mean(const std::vector<double> & x) {
    double sum = 0.0;
    for (double v : x) {
        sum += v;
    }
    return sum / (double) x.size();
}

// Min-max to [0, 1], a constant to 0, then scaled so that the mean is `to`.
void scale_to(std::vector<double> & x, double to) {
    const auto [low, high] = std::minmax_element(x.begin(), x.end());
    const double a = *low, width = *high - *low;
    for (double & v : x) {
        v = width > 0.0 ? (v - a) / (width + EPS) : 0.0;
    }
    const double factor = to / (mean(x) + EPS);
    for (double & v : x) {
        v *= factor;
    }
}

// What the head's keys say: norms, distance of the candidates from the mean direction, and redundancy (eq. 4).
struct Keys {
    std::vector<double> minus_norm;  // [n candidates]
    std::vector<double> diversity;   // [n candidates]
    double              redundancy;
};

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

Keys read_keys(const ScoreInput & in, const HeadView & view, int32_t n) {
    constexpr int32_t   CHUNK = 64;  // directions that are summed in float32 before the sum goes on in double
    const Kernels &     kn = kernels();
    const auto          d = (size_t) in.shape.d_k;
    const auto          T = (double) in.n_tokens;
    std::vector<float>  inverse((size_t) in.n_tokens), part(d, 0.0f);
    std::vector<double> center(d, 0.0);
    Keys                keys{ {}, {}, 0.0 };
    each_key(view, d, [&](const float * row, int32_t t) {
        const double norm = std::sqrt((double) kn.dot(row, row, d));
        inverse[(size_t) t] = norm > 0.0 ? (float) (1.0 / norm) : 0.0f;
        kn.axpy(inverse[(size_t) t], row, part.data(), d);
        if (t % CHUNK == CHUNK - 1 || t + 1 == in.n_tokens) {
            for (size_t i = 0; i < d; i++) {
                center[i] += (double) part[i] / T;
                part[i] = 0.0f;
            }
        }
        if (t < n) {
            keys.minus_norm.push_back(-norm);
        }
    });
    double             sq = 0.0;
    std::vector<float> mean_direction(center.begin(), center.end());
    for (double c : center) {
        sq += c * c;
    }
    each_key(view, d, [&](const float * row, int32_t t) {
        if (t < n) {
            keys.diversity.push_back(-(double) inverse[(size_t) t] * (double) kn.dot(row, mean_direction.data(), d));
        }
    });
    keys.redundancy = T > 1.0 ? std::clamp((T * sq - 1.0) / (T - 1.0), 0.0, 1.0) : 0.0;
    return keys;
}

std::vector<double> value_norms(const ScoreInput & in, const HeadView & view, int32_t n) {
    const auto          d = (size_t) in.shape.d_v;
    std::vector<float>  row(d);
    std::vector<double> norms;
    for (const Segment & seg : view.pending) {
        for (int32_t r = 0; r < seg.n && (int32_t) norms.size() < n; r++) {
            kernels().widen(seg.v.from(r), 1, (int32_t) d, row.data(), d);
            norms.push_back(std::sqrt((double) kernels().dot(row.data(), row.data(), d)));
        }
    }
    return norms;
}

// Pooled attention of one head; returns the number of candidates, the tokens before the window.
int32_t attend_head(const ScoreInput & in, const HeadView & view, int32_t head, float * out) {
    const int32_t n = in.n_tokens - std::min(window(in.params), in.n_tokens);
    window_attention(in, view, head, GroupReduction::mean, out);
    pool((Pooling) (int32_t) in.params[POOL], (int32_t) in.params[KERNEL], out, n);
    return n;
}

void score_head(const ScoreInput & in, int32_t head, float * out) {
    const HeadView view = in.view->head(in.layer, head);
    const int32_t  n    = attend_head(in, view, head, out);
    if (n == 0) {
        return;
    }
    Keys                      keys = read_keys(in, view, n);
    const std::vector<double> attention(out, out + n);
    std::vector<double>       importance = in.params[VALUE] == 0 ? value_norms(in, view, n) : keys.minus_norm;
    scale_to(importance, mean(attention));
    for (size_t i = 0; i < attention.size(); i++) {
        importance[i] += attention[i];
    }
    scale_to(keys.diversity, mean(in.params[SCALE] == 0 ? importance : attention));

    const auto   mode = (int32_t) in.params[MODE];
    const double own  = from_profile(in.params) ? redundancy_by_profile(in, head) : keys.redundancy;
    const double r    = mode == HEADWISE ? own : mode == DIVERSITY ? 1.0 : mode == EVEN ? 0.5 : 0.0;
    for (size_t i = 0; i < attention.size(); i++) {
        out[i] = (float) ((1.0 - r) * importance[i] + r * keys.diversity[i]);
    }
}

void attention(const ScoreInput & in, float * out) {
    const int32_t n_heads_kv = in.shape.n_heads_kv;
    for (int32_t h = 0; h < n_heads_kv; h++) {
        attend_head(in, in.view->head(in.layer, h), h, out + (size_t) h * (size_t) in.n_tokens);
    }
}

void score(const ScoreInput & in, float * out) {
    const int32_t n_heads_kv = in.shape.n_heads_kv;
    for (int32_t h = 0; h < n_heads_kv; h++) {
        score_head(in, h, out + (size_t) h * (size_t) in.n_tokens);
    }
}

}  // namespace

extern const Scorer scorer_mixkv = {
    { "mixkv", PARAMS, profile_kind }, false, auto_recent, false, window, score, nullptr, nullptr, false, nullptr, nullptr, attention
};

}  // namespace kvedge
