// Heads: every KV head gets a fixed part, and calibrated scores of the query heads divide the rest (SparseMM, Wang et al. 2025; HeadKV, Fu
// et al. 2024).

#include "plan/profile.h"
#include "primitives/share.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

enum { RULE, RATIO, BETA, POWER, ROUNDING };

const Param PARAMS[] = {
    setting::words("rule", "sparsemm,headkv", "what every head gets by itself"),
    setting::number("ratio", 0.1, 0, 1, "with sparsemm, that share of the even budget"),
    setting::number("beta", 1.5, 1, 1000, "with headkv, all but 1 / beta of the even budget"),
    setting::number("power", 1, 0, 16, "of the scores before they share out the rest"),
    setting::words("rounding", "exact,official", "official misses the total as the released codes do"),
    {},
};

ProfileKind profile_kind(const double * params) { return params[RULE] == 0 ? ProfileKind::visual_heads : ProfileKind::retrieval_heads; }

// Returns a weight for each KV head, layer after layer, with sum 1: the sum over its query heads. All are equal if every score is 0.
std::vector<double> weights(const AllocateInput & in) {
    std::vector<double> out;
    double              total = 0.0, powered = 0.0;
    const auto          each = [&](const auto & visit) {
        for (const LayerShape & s : (*in.shapes)) {
            for (int32_t h = 0; h < s.n_heads; h++) {
                visit(s, h, (double) in.profile->layer(s.il)[h]);
            }
        }
    };
    each([&](const LayerShape &, int32_t, double x) { total += x; });
    each([&](const LayerShape & s, int32_t h, double x) {
        const double w = std::pow(total > 0.0 ? x / total : 1.0, in.params[POWER]);
        if (h % (s.n_heads / s.n_heads_kv) == 0) {
            out.push_back(0.0);
        }
        out.back() += w;
        powered += w;
    });
    for (double & w : out) {
        w /= powered;
    }
    return out;
}

void allocate(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    const int32_t held = std::max(in.recent, 1);  // pairs of every head, so that no head is empty
    const int32_t base = in.budget - held, most = in.n_tokens - held;
    const auto    own  = (int32_t) (in.params[RULE] == 0 ? std::floor(base * in.params[RATIO] + 1e-9)
                                                         : base - std::floor(base / in.params[BETA] + 1e-9));
    const auto    w    = weights(in);
    const int64_t left = (int64_t) (base - own) * (int64_t) w.size();

    std::vector<int64_t> counts;
    if (in.params[ROUNDING] == 0) {
        counts = round_shares(w, left, most - own);
    } else {
        for (double x : w) {
            counts.push_back(std::min<int64_t>((int64_t) std::nearbyint(x * (double) left), most - own));
        }
    }
    size_t i = 0;
    for (auto & layer : out) {
        for (int32_t & count : layer) {
            count = (int32_t) counts[i++] + own + held;
        }
    }
}

}  // namespace

extern const Allocator allocator_heads = {
    { "heads", PARAMS, nullptr, profile_kind }, allocate, [](const kvedge_plan &) { return Reach::layer; }
};

}  // namespace kvedge
