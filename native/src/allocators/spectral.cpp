// Spectral: a layer's share is the part of its keys' and values' energy that lies in high frequencies (FlashCache eq. 12-13).

#include "core/threads.h"
#include "primitives/dct.h"
#include "primitives/share.h"

#include <algorithm>

namespace kvedge {

namespace {

enum { GAMMA };

const Param PARAMS[] = { { "gamma", 0.2, 0, 1, 0, nullptr }, {} };  // share of the frequencies that counts as low

double energy(const std::vector<float> & x) {
    double sum = 0.0;
    for (float v : x) {
        sum += (double) v * (double) v;
    }
    return sum;
}

// E(high) / E(all) of a layer's keys or values, over all heads and channels; high is what the low pass takes away.
double high_share(const AllocateInput & in, const LowPass & low, int32_t l, bool values) {
    const LayerShape & shape = in.seq->shapes()[(size_t) l];
    std::vector<float> x;
    double             all = 0.0, high = 0.0;
    for (int32_t h = 0; h < shape.n_heads_kv; h++) {
        widen_pending(*in.seq, l, h, values, x);
        all += energy(x);
        low.take_away(x, values ? shape.d_v : shape.d_k);
        high += energy(x);
    }
    return all > 0.0 ? high / all : 0.0;
}

void allocate(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    const auto          n_layers = (int32_t) in.seq->shapes().size();
    const LowPass       low(in.n_tokens, in.params[GAMMA]);
    std::vector<double> shares((size_t) n_layers);
    parallel_for(in.n_threads, n_layers,
                 [&](int32_t l, int32_t) { shares[(size_t) l] = high_share(in, low, l, false) + high_share(in, low, l, true); });
    const auto counts = round_shares(shares, (int64_t) in.budget * n_layers, in.n_tokens, std::max(1, in.recent));
    for (size_t l = 0; l < out.size(); l++) {
        out[l].assign((size_t) in.seq->shapes()[l].n_heads_kv, (int32_t) counts[l]);
    }
}

}  // namespace

extern const Allocator allocator_spectral;
const Allocator        allocator_spectral = { { "spectral", PARAMS }, allocate };

}  // namespace kvedge
