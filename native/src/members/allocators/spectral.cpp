// Spectral: a layer's share is the part of its keys' and values' energy that lies in high frequencies (FlashCache eq. 12-13).

#include "plan/plan.h"
#include "system/threads.h"
#include "primitives/dct.h"
#include "primitives/share.h"

#include <algorithm>

namespace kvedge {

namespace {

enum { GAMMA };

const Param PARAMS[] = { setting::number("gamma", 0.2, 0, 1, "share of the frequencies that count as low"), {} };

void allocate(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    const auto          n_layers = (int32_t) in.shapes->size();
    std::vector<double> shares((size_t) n_layers);
    const auto          measured = [&](const Spectrum & s) { return s.gamma == in.params[GAMMA]; };
    if (in.spectra && std::all_of(in.spectra->begin(), in.spectra->end(), measured)) {
        std::transform(in.spectra->begin(), in.spectra->end(), shares.begin(), [](const Spectrum & s) { return s.high; });
    } else {
        const HighPass filter(in.n_tokens, in.params[GAMMA]);
        parallel_for(in.n_threads, n_layers, [&](int32_t l, int32_t) { shares[(size_t) l] = filter.measure(*in.view, l, (*in.shapes)[(size_t) l], nullptr); });
    }
    const auto counts = round_shares(shares, (int64_t) in.budget * n_layers, in.largest_budget, std::max(1, in.recent));
    for (size_t l = 0; l < out.size(); l++) {
        out[l].assign((size_t) (*in.shapes)[l].n_heads_kv, (int32_t) counts[l]);
    }
}

// The scorer's measurement suffices if its gamma is the same.
Reach reach(const kvedge_plan & plan) {
    const double gamma = plan.params[KVEDGE_STAGE_ALLOCATOR][GAMMA];
    return plan.scorer->gamma && plan.scorer->gamma(plan.params[KVEDGE_STAGE_SCORER]) == gamma ? Reach::scores : Reach::rows;
}

}  // namespace

extern const Allocator allocator_spectral = { { "spectral", PARAMS }, allocate, reach };

}  // namespace kvedge
