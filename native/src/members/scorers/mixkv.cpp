// Importance and diversity, mixed by each head's redundancy (MixKV, sec. 3). Importance: attention of the last queries plus the norm of the
// value. Diversity: distance from the mean key direction. The more alike a head's keys, the more diversity counts.

#include "plan/profile.h"
#include "plan/stages.h"
#include "primitives/mixture.h"
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
    setting::words("scale", "imp,ex", "diversity has the mean of: importance or attention"),  // imp: the paper; ex: the released code
    setting::words("source", "online,profile", "of a head's redundancy: this prompt or a profile"),  // online: the paper; profile: the released code
    setting::whole("parts", 2, 1, 64, "one in so many kept pairs is the window's at most, whatever its score"),
    {},
};

int32_t window(const double * params) { return (int32_t) params[WINDOW]; }

void observes(const double * params, Observation & to) { to.window = window(params); }

int32_t auto_recent(int32_t kept, int32_t even, const double * params) { return window_recent(window(params), kept, even, (int32_t) params[PARTS]); }

bool from_profile(const double * params) { return params[SOURCE] == 1 && params[MODE] == HEADWISE; }

ProfileKind profile_kind(const double * params) { return from_profile(params) ? ProfileKind::redundancy : ProfileKind::none; }

double redundancy_by_profile(const ScoreInput & in, int32_t head) {
    return (double) in.profile->layer(in.shape.il)[head];
}

WantedMeasures wanted_measures(const double * params, bool) {
    WantedMeasures out;
    out.votes       = WantedMeasures::Votes::mean;
    out.value_norms = params[VALUE] == 0;
    out.key_norms   = !out.value_norms;
    out.anchor      = WantedMeasures::Anchor::unit;
    return out;
}

// Returns the number of tokens before the window: the candidates.
int32_t n_before(const ScoreInput & in) { return in.n_tokens - std::min(window(in.params), in.n_tokens); }

// Writes the pooled attention [T] of one head to out.
void attend_head(const ScoreInput & in, int32_t head, float * out) {
    std::copy_n(in.measures->votes.data() + (size_t) head * (size_t) in.n_tokens, in.n_tokens, out);
    pool((Pooling) (int32_t) in.params[POOL], (int32_t) in.params[KERNEL], out, n_before(in));
}

void score_head(const ScoreInput & in, int32_t head, float * out) {
    const auto     n = (size_t) n_before(in), at = (size_t) head * (size_t) in.n_tokens;
    const Measures & m = *in.measures;
    attend_head(in, head, out);
    if (n == 0) {
        return;
    }
    const std::vector<double> attention(out, out + n);
    std::vector<double>       importance(n), diversity(n);
    for (size_t i = 0; i < n; i++) {
        importance[i] = in.params[VALUE] == 0 ? std::sqrt((double) m.value_squares[at + i]) : -std::sqrt((double) m.key_squares[at + i]);
        diversity[i]  = -m.cosines[at + i];
    }
    scale_to(importance, mean(attention));
    for (size_t i = 0; i < n; i++) {
        importance[i] += attention[i];
    }
    scale_to(diversity, mean(in.params[SCALE] == 0 ? importance : attention));

    const auto   mode = (int32_t) in.params[MODE];
    const double own  = from_profile(in.params) ? redundancy_by_profile(in, head) : redundancy(m.anchor_squares[(size_t) head], in.n_tokens);
    const double r    = mode == HEADWISE ? own : mode == DIVERSITY ? 1.0 : mode == EVEN ? 0.5 : 0.0;
    for (size_t i = 0; i < n; i++) {
        out[i] = (float) ((1.0 - r) * importance[i] + r * diversity[i]);
    }
}

void attention(const ScoreInput & in, float * out) {
    for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
        attend_head(in, h, out + (size_t) h * (size_t) in.n_tokens);
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
    { "mixkv", PARAMS, observes, profile_kind }, score, auto_recent, wanted_measures, nullptr, nullptr, attention
};

}  // namespace kvedge
