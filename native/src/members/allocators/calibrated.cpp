// Calibrated: shares of all pairs, one a KV head, that a calibration exchanged between the heads (`kvedge calibrate budgets`),
// become whole numbers. For a model that nobody calibrated the prompt decides, as allocator ada has it.

#include "plan/profile.h"
#include "primitives/share.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvedge {

extern const Allocator allocator_ada;

namespace {

enum { SHARE_OF, UNMEASURED, MEASURED };

const Param PARAMS[] = {
    setting::words("share_of", "budget,prompt", "what a share is a part of: all pairs of the budget; with prompt the budget is not met"),
    setting::words("unmeasured", "refuse,ada", "a model without a profile: refuse, or share out by the prompt as allocator ada does"),
    setting::number("measured", 0.2, 0, 1, "share of the prompt up to which budgets go by the profile; what is beyond raises the heads that have least"),
    {},
};

bool by_prompt(const double * params) { return params[UNMEASURED] != 0; }

// What an even budget has beyond the mean of what is granted raises the heads below a level: the lowest that any number of
// the poorest would have together.
void raise_poorest(std::vector<double> & granted, int32_t budget) {
    std::vector<double> ascending = granted;
    std::sort(ascending.begin(), ascending.end());
    double poorest = (double) budget * (double) granted.size() - std::accumulate(granted.begin(), granted.end(), 0.0);
    double level   = INFINITY;
    for (size_t i = 0; i < ascending.size(); i++) {
        poorest += ascending[i];
        level = std::min(level, poorest / (double) (i + 1));
    }
    for (double & pairs : granted) {
        pairs = std::max(pairs, level);
    }
}

// As allocator ada with its defaults.
void allocate_by_prompt(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    double usual[MAX_PARAMS] = {};
    for (int32_t i = 0; allocator_ada.params[i].name; i++) {
        usual[i] = allocator_ada.params[i].fallback;
    }
    AllocateInput without = in;
    without.params        = usual;
    allocator_ada.allocate(without, out);
}

void allocate(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    if (!in.profile) {
        allocate_by_prompt(in, out);
        return;
    }
    const int32_t       least = std::max(1, in.fixed_recent);
    std::vector<double> shares;
    for (const LayerShape & s : *in.shapes) {
        const float * row = in.profile->layer(s.il);
        shares.insert(shares.end(), row, row + s.n_heads_kv);
    }
    std::vector<int64_t> counts;
    if (in.params[SHARE_OF] == 0) {
        const auto measured = (int32_t) std::floor(in.params[MEASURED] * in.n_tokens + 1e-9);
        if (in.budget > measured) {
            fill_up(shares, (double) measured * (double) shares.size(), in.most, std::min(least, measured));
            raise_poorest(shares, in.budget);
        }
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

extern const Allocator allocator_calibrated = {
    { "calibrated", PARAMS, nullptr, [](const double *) { return ProfileKind::head_budgets; }, by_prompt },
    allocate,
    [](const kvedge_plan &) { return Reach::layer; },
    by_prompt,
};

}  // namespace kvedge
