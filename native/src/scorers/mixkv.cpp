// Importance and diversity mixed by each head's redundancy (MixKV, sec. 3): attention of the last queries plus the norm
// of the value, and distance from the mean key direction; the more alike a head's keys, the more diversity counts.

#include "core/profile.h"
#include "core/stages.h"
#include "primitives/mixture.h"
#include "primitives/window.h"

#include <algorithm>

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

int32_t window(const double * params) { return (int32_t) params[WINDOW]; }

int32_t auto_recent(int32_t kept, int32_t even, const double * params) { return window_recent(window(params), kept, even, (int32_t) params[PARTS]); }

bool from_profile(const double * params) { return params[SOURCE] == 1 && params[MODE] == HEADWISE; }

ProfileKind profile_kind(const double * params) { return from_profile(params) ? ProfileKind::kv_heads : ProfileKind::none; }

double redundancy_by_profile(const ScoreInput & in, int32_t head) {
    return (double) in.profile->layer(in.shape.il)[head];
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
    std::vector<uint8_t> before((size_t) in.n_tokens);  // the window
    std::fill_n(before.begin(), n, (uint8_t) 1);
    const std::vector<double> attention(out, out + n);
    Keys                      keys = read_keys(view, in.shape, in.n_tokens, nullptr, before.data());
    std::vector<double>       importance = in.params[VALUE] == 0 ? value_norms(view, in.shape, before.data()) : keys.minus_norm;
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
