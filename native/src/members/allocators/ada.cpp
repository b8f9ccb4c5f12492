// Adaptive heads: a layer's budget goes to the heads that have the largest scores of the layer, with a floor for each head (AdaKV, Feng et
// al. 2024).

#include "system/threads.h"
#include "primitives/share.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

enum { FLOOR, NORMALIZE, BUDGET_SCORE, ROUNDING };

const Param PARAMS[] = {
    setting::number("floor", 0.2, 0, 1, "share of the even budget that every head keeps"),
    setting::flag("normalize", true, "weigh a head's scores by how concentrated they are"),
    setting::words("budget_score", "attention,mix",
                   "what counts where the scorer mixes attention with more: attention or mix"),
    setting::words("rounding", "exact,official", "exact meets the budget; official, head by head, can miss it"),
    {},
};

void normalize(float * scores, int32_t n, int32_t base) {
    const float worst = base > 0 ? nth_largest(scores, (size_t) n, (size_t) base - 1) : INFINITY;  // the smallest of the `base` largest
    double      top = 0.0, total = 0.0;
    int32_t     better = 0;
    for (int32_t i = 0; i < n; i++) {
        const bool counts = scores[i] > worst;
        better += counts ? 1 : 0;
        top += counts ? (double) scores[i] : 0.0;
        total += (double) scores[i];
    }
    top += base > better ? (double) worst * (base - better) : 0.0;
    const auto share = total > 0.0 ? (float) (top / total) : 0.0f;
    for (int32_t i = 0; i < n; i++) {
        scores[i] *= share;
    }
}

bool by_attention(const double * params) { return params[BUDGET_SCORE] == 0; }

// Returns the pairs of each head beyond those that every head holds, at most `most`.
std::vector<int64_t> round_counts(const AllocateInput & in, const std::vector<int32_t> & winners, int32_t base, int32_t most) {
    const double floor = in.params[FLOOR];
    if (in.params[ROUNDING] == 0) {
        std::vector<double> shares;
        for (int32_t w : winners) {
            shares.push_back(w * (1.0 - floor) + base * floor);
        }
        return round_shares(shares, (int64_t) base * (int64_t) winners.size(), most);
    }
    std::vector<int64_t> counts;
    for (int32_t w : winners) {  // half to even
        counts.push_back(std::min((int64_t) std::nearbyint(w * (1.0 - floor) + std::floor(base * floor)), (int64_t) most));
    }
    return counts;
}

void allocate_layer(const AllocateInput & in, size_t l, std::vector<int32_t> & out) {
    const int32_t      held = std::max(in.recent, 1);  // pairs of every head, so that no head is empty
    const int32_t      base = in.budget - held, n = in.n_tokens - in.recent;
    const int32_t      n_heads = (*in.shapes)[l].n_heads_kv;
    const auto &       all     = in.attention ? *in.attention : *in.scores;
    std::vector<float> scores;
    scores.reserve((size_t) n_heads * (size_t) n);
    for (int32_t h = 0; h < n_heads; h++) {
        const float * row = all[l].data() + (size_t) h * (size_t) in.n_tokens;
        scores.insert(scores.end(), row, row + n);
    }
    // The mass of a head has no meaning if scores are negative.
    if (in.params[NORMALIZE] == 0 && std::none_of(scores.begin(), scores.end(), [](float s) { return s < 0.0f; })) {
        for (int32_t h = 0; h < n_heads; h++) {
            normalize(scores.data() + (size_t) h * (size_t) n, n, base);
        }
    }
    const auto counts = round_counts(in, count_winners(scores.data(), (size_t) n_heads, (size_t) n, (size_t) n_heads * (size_t) base), base, in.n_tokens - held);
    for (int32_t h = 0; h < n_heads; h++) {
        out[(size_t) h] = (int32_t) counts[(size_t) h] + held;
    }
}

void allocate(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    if (in.layer >= 0) {
        allocate_layer(in, (size_t) in.layer, out[(size_t) in.layer]);
        return;
    }
    parallel_for(in.n_threads, (int32_t) out.size(), [&](int32_t l, int32_t) { allocate_layer(in, (size_t) l, out[(size_t) l]); });
}

}  // namespace

extern const Allocator allocator_ada = { { "ada", PARAMS }, allocate, [](const kvedge_plan &) { return Reach::layer; }, by_attention };

}  // namespace kvedge
