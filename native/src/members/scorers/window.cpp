// Window attention: the answer needs what the prompt's last queries look at (SnapKV, Li et al. 2024).

#include "primitives/window.h"

#include <algorithm>

namespace kvedge {

namespace {

enum { WINDOW, KERNEL, POOL, GQA };

const Param PARAMS[] = {
    setting::whole("window", 32, 1, 4096, "last queries, which vote, and tokens kept, at most half of the budget"),
    setting::whole("kernel", 5, 1, 255, "pooling width, odd", 2),
    setting::words("pool", "avg,max", "pooling: avg or max"),
    setting::words("gqa", "mean,max", "over the query heads of a KV head: mean or max"),
    {},
};

int32_t window(const double * params) { return (int32_t) params[WINDOW]; }

void observes(const double * params, Observation & to) { to.window = window(params); }

int32_t auto_recent(int32_t kept, int32_t even, const double * params) { return window_recent(window(params), kept, even); }

WantedMeasures wanted_measures(const double * params, bool) {
    WantedMeasures out;
    out.votes = params[GQA] == 0 ? WantedMeasures::Votes::mean : WantedMeasures::Votes::largest;
    return out;
}

// The window's own tokens keep their unpooled attention, and compete by it unless recent = auto protects them.
void score(const ScoreInput & in, float * out) {
    const int32_t n_heads_kv = in.shape.n_heads_kv;
    for (int32_t h = 0; h < n_heads_kv; h++) {
        float * row = out + (size_t) h * (size_t) in.n_tokens;
        std::copy_n(in.measures->votes.data() + (size_t) h * (size_t) in.n_tokens, in.n_tokens, row);
        pool((Pooling) (int32_t) in.params[POOL], (int32_t) in.params[KERNEL], row, std::max(0, in.n_tokens - window(in.params)));
    }
}

}  // namespace

extern const Scorer scorer_window = {
    { "window", PARAMS, observes }, score, auto_recent, wanted_measures, nullptr, always_attention
};

}  // namespace kvedge
