// Global rank: one ranking of the scores of all layers and heads decides how many tokens each head keeps (KVzip, Kim et al. 2025,
// arXiv:2505.23416), with a floor for each head.

#include "primitives/share.h"
#include "system/threads.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace kvedge {

namespace {

enum { FLOOR };

const Param PARAMS[] = {
    setting::number("floor", 0.2, 0, 1, "share of the even budget that every head keeps"),
    {},
};

struct Head {
    size_t  layer;
    int32_t head;
};

// Writes to `all` [head][n] each head's n best scores after its `own` best ones. Returns the heads in the order of `all`.
std::vector<Head> gather(const AllocateInput & in, int32_t own, int32_t n, Bulk<float> & all) {
    const Scores &    scores = in.attention ? *in.attention : *in.scores;
    const int32_t     taken  = in.n_tokens - in.recent;
    std::vector<Head> heads;
    for (size_t l = 0; l < in.shapes->size(); l++) {
        for (int32_t h = 0; h < (*in.shapes)[l].n_heads_kv; h++) {
            heads.push_back({ l, h });
        }
    }
    all.resize(heads.size() * (size_t) n);
    parallel_for(in.n_threads, (int32_t) heads.size(), [&](int32_t i, int32_t) {
        const Head &       to  = heads[(size_t) i];
        const float *      row = scores[to.layer].data() + (size_t) to.head * (size_t) in.n_tokens;
        std::vector<float> sorted(row, row + taken);
        const auto         greater = std::greater<float>();
        std::nth_element(sorted.begin(), sorted.begin() + own, sorted.end(), greater);
        std::nth_element(sorted.begin() + own, sorted.begin() + own + n - 1, sorted.end(), greater);
        std::copy_n(sorted.begin() + own, n, all.begin() + (std::ptrdiff_t) i * n);
    });
    return heads;
}

// Returns whether all scores are equal: a ranking would then only reflect the order of tokens.
bool all_equal(const AllocateInput & in) {
    const Scores & scores = in.attention ? *in.attention : *in.scores;
    const float    first  = scores[0][0];
    for (size_t l = 0; l < in.shapes->size(); l++) {
        for (int32_t h = 0; h < (*in.shapes)[l].n_heads_kv; h++) {
            const float * row = scores[l].data() + (size_t) h * (size_t) in.n_tokens;
            if (std::any_of(row, row + in.n_tokens - in.recent, [&](float s) { return s != first; })) {
                return false;
            }
        }
    }
    return true;
}

void allocate(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    const int32_t held = std::max(in.recent, 1);  // pairs of every head, so that no head is empty
    const int32_t base = in.budget - held;
    const int32_t own  = (int32_t) std::floor(in.params[FLOOR] * base + 1e-9);
    if (own == base || in.n_tokens == in.recent || all_equal(in)) {
        for (auto & layer : out) {
            std::fill(layer.begin(), layer.end(), in.budget);
        }
        return;
    }
    const int32_t n = in.n_tokens - held - own;
    Bulk<float>   all;
    const auto    heads   = gather(in, own, n, all);
    const auto    winners = count_winners(all.data(), heads.size(), (size_t) n, heads.size() * (size_t) (base - own));
    for (size_t i = 0; i < heads.size(); i++) {
        out[heads[i].layer][(size_t) heads[i].head] = own + held + winners[i];
    }
}

}  // namespace

extern const Allocator allocator_global = { { "global", PARAMS }, allocate, [](const kvedge_plan &) { return Reach::scores; }, [](const double *) { return true; } };

}  // namespace kvedge
