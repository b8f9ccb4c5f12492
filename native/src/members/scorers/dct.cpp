// DCT: the deviation of a token's key and value from the low-frequency part along the tokens: outliers matter (FlashCache eq. 10).

#include "plan/stages.h"
#include "primitives/share.h"

#include <algorithm>

namespace kvedge {

namespace {

enum { GAMMA, SHARE };

const Param PARAMS[] = {
    setting::number("gamma", 0.2, 0, 1, "share of the low frequencies that make up the curve"),
    setting::words("share", "layer,head", "one score for all heads of a layer, or one per KV head"),
    {},
};

bool joins_heads(const double * params) { return params[SHARE] == 0; }

double low_share(const double * params) { return params[GAMMA]; }

WantedMeasures wanted_measures(const double * params, bool) {
    WantedMeasures out;
    out.gamma = params[GAMMA];
    return out;
}

void score(const ScoreInput & in, float * out) {
    const int32_t  n_heads_kv = in.shape.n_heads_kv;
    std::copy(in.measures->deviation.begin(), in.measures->deviation.end(), out);
    if (in.spectrum) {
        *in.spectrum = { in.params[GAMMA], in.measures->high, {} };
    }
    if (joins_heads(in.params)) {
        share_among_heads(out, n_heads_kv, in.n_tokens);
    }
}

}  // namespace

extern const Scorer scorer_dct = { { "dct", PARAMS }, score, nullptr, wanted_measures, joins_heads, nullptr, nullptr, low_share };

}  // namespace kvedge
