// Cumulative attention: the sum of the attention that all queries of the prompt pay to a token (H2O; LOOK-M eq. 4).

#include "plan/stages.h"
#include "primitives/share.h"

namespace kvedge {

enum { WINDOW, SHARE };

static const Param PARAMS[] = {
    setting::whole("window", 0, 0, 1 << 20, "last tokens that are kept, at most half of the budget; 0: that half, as in H2O"),
    // layer: all heads get their mean (Elastic Cache eq. 1, PrefixKV sec. 3.1)
    setting::words("share", "head,layer", "one score per KV head, or one for all heads of a layer"),
    {},
};

static int32_t auto_recent(int32_t kept, int32_t even, const double * params) {
    return params[WINDOW] > 0 ? window_recent((int32_t) params[WINDOW], kept, even) : kept / 2;
}

static bool joins_heads(const double * params) { return params[SHARE] == 1; }

static void score(const ScoreInput & in, float * out) {
    const int32_t      n_heads_kv = in.shape.n_heads_kv;
    const Columns &    seen       = in.observed->layer((size_t) in.layer).columns;
    for (int32_t h = 0; h < n_heads_kv; h++) {
        const double * sums = seen.sums().data() + (size_t) h * (size_t) seen.capacity;
        for (int32_t t = 0; t < in.n_tokens; t++) {
            out[(size_t) h * (size_t) in.n_tokens + (size_t) t] = (float) sums[t];
        }
    }
    if (joins_heads(in.params)) {
        share_among_heads(out, n_heads_kv, in.n_tokens);
    }
}

extern const Scorer scorer_cumulative = {
    { "cumulative", PARAMS, [](const double *, Observation & to) { to.columns[column::sums] = true; } }, score, auto_recent, nullptr, joins_heads, always_attention
};

}  // namespace kvedge
