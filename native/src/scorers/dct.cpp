// Deviation from the low-frequency part of keys and values along the tokens: outliers in the frequency domain matter
// (FlashCache eq. 10).

#include "primitives/dct.h"
#include "primitives/shared.h"

#include <algorithm>

namespace kvedge {

namespace {

enum { GAMMA, SHARE };

const Param PARAMS[] = {
    { "gamma", 0.2, 0, 1, 0, nullptr },        // share of the frequencies that counts as low
    { "share", 0, 0, 0, 0, "layer,head" },  // layer: all heads have the mean
    {},
};

// out [T] += mean over the channels of the squared deviation.
void add_deviation(const LowPass & low, std::vector<float> & x, int32_t d, float * out) {
    low.take_away(x, d);
    const auto ld = (size_t) pad16(d);
    for (size_t t = 0; t < x.size() / ld; t++) {
        double sum = 0.0;
        for (size_t i = 0; i < (size_t) d; i++) {
            sum += (double) x[t * ld + i] * (double) x[t * ld + i];
        }
        out[t] += (float) (sum / d);
    }
}

void score(const ScoreInput & in, float * out) {
    const LayerShape & shape = in.seq->shapes()[(size_t) in.layer];
    const LowPass      low(in.n_tokens, in.params[GAMMA]);
    std::vector<float> x;
    std::fill(out, out + (size_t) shape.n_heads_kv * (size_t) in.n_tokens, 0.0f);
    for (int32_t h = 0; h < shape.n_heads_kv; h++) {
        for (bool values : { false, true }) {
            widen_pending(*in.seq, in.layer, h, values, x);
            add_deviation(low, x, values ? shape.d_v : shape.d_k, out + (size_t) h * (size_t) in.n_tokens);
        }
    }
    if (in.params[SHARE] == 0) {
        share_among_heads(out, shape.n_heads_kv, in.n_tokens);
    }
}

}  // namespace

extern const Scorer scorer_dct;
const Scorer        scorer_dct = { { "dct", PARAMS }, false, nullptr, false, nullptr, score };

}  // namespace kvedge
