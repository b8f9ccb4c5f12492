// Calibrated: shares of all pairs, one a KV head, that a calibration exchanged between the heads (`kvedge calibrate budgets`),
// become whole numbers.

#include "core/profile.h"
#include "primitives/share.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

enum { SHARE_OF };

const Param PARAMS[] = {
    setting::words("share_of", "budget,prompt", "what a share is a part of: all pairs of the budget; with prompt the budget is not met"),
    {},
};

void allocate(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    const int32_t       least = std::max(1, in.fixed_recent);
    std::vector<double> shares;
    for (const LayerShape & s : *in.shapes) {
        const float * row = in.profile->layer(s.il);
        shares.insert(shares.end(), row, row + s.n_heads_kv);
    }
    std::vector<int64_t> counts;
    if (in.params[SHARE_OF] == 0) {
        counts = round_shares(shares, (int64_t) in.budget * (int64_t) shares.size(), in.most, least);
    } else {
        for (double share : shares) {
            counts.push_back((int64_t) std::clamp(std::floor(share * in.n_tokens + 0.5), (double) least, (double) in.most));
        }
    }
    size_t i = 0;
    for (auto & layer : out) {
        for (int32_t & count : layer) {
            count = (int32_t) counts[i++];
        }
    }
}

}  // namespace

extern const Allocator allocator_calibrated = { { "calibrated", PARAMS, [](const double *) { return ProfileKind::head_shares; } }, allocate, nullptr, [](const kvedge_plan &) { return Reach::layer; } };

}  // namespace kvedge
