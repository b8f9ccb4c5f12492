// Prefix: every layer keeps the shortest prefix of its tokens, by falling importance, that holds a given share of the layer's importance.
// Bisection finds the share, the same for all layers, that meets the budget (PrefixKV eq. 1-2). With a profile, the layers keep the shares
// of the prompt that they kept in the calibration.

#include "plan/profile.h"
#include "primitives/share.h"

#include <algorithm>
#include <cstdlib>

namespace kvedge {

namespace {

enum { SOURCE };

const Param PARAMS[] = { setting::words("source", "online,profile", "of the lengths: this prompt or a profile"), {} };

bool from_profile(const double * params) { return params[SOURCE] == 1; }

// Returns P [T]: P[k] is the share of a layer's importance that its k + 1 most important tokens hold.
std::vector<double> cumulative(const AllocateInput & in, size_t l) {
    const auto          T = (size_t) in.n_tokens, n_heads = (size_t) (*in.shapes)[l].n_heads_kv;
    std::vector<double> p(T, 0.0);
    double              total = 0.0;
    for (size_t t = 0; t < T; t++) {
        for (size_t h = 0; h < n_heads; h++) {
            p[t] += (double) (*in.scores)[l][h * T + t] / (double) n_heads;
        }
        p[t] = std::max(p[t], 0.0);
        total += p[t];
    }
    std::sort(p.begin(), p.end(), [](double a, double b) { return a > b; });
    double sum = 0.0;
    for (double & x : p) {
        sum += total > 0.0 ? x / total : 1.0 / (double) T;
        x = sum;
    }
    return p;
}

std::vector<double> prefixes(const std::vector<std::vector<double>> & layers, double share, int64_t & sum) {
    std::vector<double> k;
    sum = 0;
    for (const auto & p : layers) {
        const auto at = std::lower_bound(p.begin(), p.end(), share - 1e-12) - p.begin();
        k.push_back((double) std::min<std::ptrdiff_t>(at + 1, (std::ptrdiff_t) p.size()));
        sum += (int64_t) k.back();
    }
    return k;
}

std::vector<double> search(const AllocateInput & in, int64_t target) {
    std::vector<std::vector<double>> layers;
    for (size_t l = 0; l < in.shapes->size(); l++) {
        layers.push_back(cumulative(in, l));
    }
    std::vector<double> best;
    int64_t             best_gap = INT64_MAX;
    double              low = 0.0, high = 1.0;
    for (int32_t turn = 0; turn < 64 && best_gap > 0; turn++) {
        const double middle = (low + high) / 2.0;
        int64_t      sum;
        auto         k = prefixes(layers, middle, sum);
        if (std::llabs(sum - target) < best_gap) {
            best_gap = std::llabs(sum - target);
            best     = std::move(k);
        }
        (sum < target ? low : high) = middle;
    }
    return best;
}

// Returns each layer's share of the prompt, interpolated between the calibrated budgets; 0 at budget 0, 1 at budget 1.
std::vector<double> look_up(const AllocateInput & in) {
    const Profile &     p      = *in.profile;
    const double        budget = (double) in.budget / (double) in.n_tokens;
    const auto          at     = (size_t) (std::lower_bound(p.budgets.begin(), p.budgets.end(), budget) - p.budgets.begin());
    const double        x0     = at > 0 ? p.budgets[at - 1] : 0.0;
    const double        x1     = at < p.budgets.size() ? p.budgets[at] : 1.0;
    std::vector<double> shares;
    for (const LayerShape & s : (*in.shapes)) {
        const float * row = p.layer(s.il);
        const double  y0  = at > 0 ? row[at - 1] : 0.0;
        const double  y1  = at < p.budgets.size() ? row[at] : 1.0;
        shares.push_back(x1 > x0 ? y0 + (y1 - y0) * (budget - x0) / (x1 - x0) : y0);
    }
    return shares;
}

void allocate(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    const int64_t target = (int64_t) in.budget * (int64_t) out.size();
    auto          shares = from_profile(in.params) ? look_up(in) : search(in, target);
    const auto    counts = round_shares(std::move(shares), target, in.largest_budget, std::max(1, in.recent));
    for (size_t l = 0; l < out.size(); l++) {
        out[l].assign((size_t) (*in.shapes)[l].n_heads_kv, (int32_t) counts[l]);
    }
}

}  // namespace

extern const Allocator allocator_prefix = {
    { "prefix", PARAMS, nullptr, [](const double * params) { return from_profile(params) ? ProfileKind::prefix : ProfileKind::none; } },
    allocate,
    [](const kvedge_plan & plan) { return from_profile(plan.params[KVEDGE_STAGE_ALLOCATOR]) ? Reach::layer : Reach::scores; }
};

}  // namespace kvedge
