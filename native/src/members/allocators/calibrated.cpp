// Calibrated: the shares of all pairs in a model's profile (`kvedge calibrate budgets`), one for each KV head, become whole numbers.
// Without a profile the setting `unmeasured` decides: refuse, allocate like ada, or by how much values vary.

#include "plan/profile.h"
#include "primitives/share.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kvedge {

extern const Allocator allocator_ada;

namespace {

enum { SHARE_OF, UNMEASURED, MEASURED };

const Param PARAMS[] = {
    setting::words("share_of", "budget,prompt", "what a share is a part of: all pairs of the budget; with prompt the budget is not met"),
    setting::words("unmeasured", "refuse,ada,variation",
                   "a model without a profile: refuse, share out as allocator ada does, or up to `measured` by how image values vary"),
    setting::number("measured", 0.2, 0, 1, "share of the prompt up to which budgets go by the profile; what is beyond raises the heads that have least"),
    {},
};

bool by_prompt(const double * params) { return params[UNMEASURED] != 0; }

int32_t measured_up_to(const double * params, int32_t n_tokens) { return (int32_t) std::floor(params[MEASURED] * n_tokens + 1e-9); }

bool by_variation(const double * params, int32_t n_tokens, int32_t budget) {
    return params[UNMEASURED] == 2 && budget <= measured_up_to(params, n_tokens);
}

// Returns how much the values of all heads vary; empty: unknown for a layer, or the budget is beyond `measured`.
std::vector<double> variations(const AllocateInput & in) {
    std::vector<double> out;
    if (in.layer >= 0 || !in.spectra || !by_variation(in.params, in.n_tokens, in.budget)) {
        return out;
    }
    for (const Spectrum & layer : *in.spectra) {
        if (layer.variation.empty()) {
            return {};
        }
        out.insert(out.end(), layer.variation.begin(), layer.variation.end());
    }
    return out;
}

double mean(const std::vector<double> & x) { return std::accumulate(x.begin(), x.end(), 0.0) / (double) x.size(); }

// Replaces each variation by its fourth power, or by a lower power if the logarithms of the shares would deviate by more than SPREAD.
void to_shares(std::vector<double> & x) {
    constexpr double POWER = 4.0, SPREAD = 0.8, LEAST = 1e-3;  // LEAST: relative to the mean variation
    const double     least = std::max(LEAST * mean(x), std::numeric_limits<double>::min());
    std::transform(x.begin(), x.end(), x.begin(), [&](double v) { return std::log(std::max(v, least)); });
    const double center = mean(x);
    double       square = 0.0;
    for (double & v : x) {
        v -= center;
        square += v * v / (double) x.size();
    }
    const double power = std::min(POWER, SPREAD / std::max(std::sqrt(square), 1e-9));
    std::transform(x.begin(), x.end(), x.begin(), [&](double v) { return std::exp(v * power); });
}

// Raises the heads that have least until the mean is `budget`. Heads below a level get the level: the lowest mean that any number of the
// poorest heads has together with the added pairs.
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

// Allocates like allocator ada with its default settings.
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
    const int32_t       least  = std::max(1, in.fixed_recent);
    std::vector<double> shares = in.profile ? std::vector<double>() : variations(in);
    if (!in.profile && shares.empty()) {
        allocate_by_prompt(in, out);
        return;
    }
    if (!in.profile) {
        to_shares(shares);
    }
    for (const LayerShape & s : *in.shapes) {
        if (!in.profile) {
            break;
        }
        const float * row = in.profile->layer(s.il);
        shares.insert(shares.end(), row, row + s.n_heads_kv);
    }
    std::vector<int64_t> counts;
    if (!in.profile || in.params[SHARE_OF] == 0) {
        const int32_t measured = measured_up_to(in.params, in.n_tokens);
        if (in.budget > measured) {
            fill_up(shares, (double) measured * (double) shares.size(), in.largest_budget, std::min(least, measured));
            raise_poorest(shares, in.budget);
        }
        counts = round_shares(shares, (int64_t) in.budget * (int64_t) shares.size(), in.largest_budget, least);
    } else {
        for (double share : shares) {
            counts.push_back((int64_t) std::clamp(std::floor(share * in.n_tokens + 0.5), (double) least, (double) in.largest_budget));
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
    nullptr,
    by_variation,
};

}  // namespace kvedge
