// Image tokens and text tokens each by what tells among their kind: votes of the last queries for both, mixed for image tokens with
// norms of values and diversity of keys, as MixKV mixes them; and the end of the text stays, in proportion to what is kept.

#include "core/stages.h"
#include "primitives/mixture.h"
#include "primitives/window.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace kvedge {

namespace {

enum { WINDOW, FADE, KERNEL, PARTS };

const Param PARAMS[] = {
    setting::whole("window", 24, 1, 4096, "last queries, which vote, and tokens of the end of the text"),
    setting::number("fade", 0.15, 0, 100, "a query counts e^-fade of the one behind it"),
    setting::whole("kernel", 5, 1, 255, "width over which votes for neighbouring image tokens are averaged, odd", 2),
    setting::whole("parts", 3, 2, 64, "one in so many kept pairs is the end of the text's at least"),
    {},
};

int32_t window(const double * params) { return (int32_t) params[WINDOW]; }

int32_t last_one(int32_t kept, int32_t, const double *) { return std::min(kept, 1); }

// [T] 1 for the tokens that are mixed: the image's, or all where there is none.
std::vector<uint8_t> kind_of(const uint8_t * image, int32_t n_tokens) {
    std::vector<uint8_t> kind(image, image + n_tokens);
    for (uint8_t & one : kind) {
        one = one != 0;
    }
    if (std::find(kind.begin(), kind.end(), 1) == kind.end()) {
        std::fill(kind.begin(), kind.end(), (uint8_t) 1);
    }
    return kind;
}

// The tokens of the kind, in place: pooled votes and norms of values, and diversity by how alike the kind's keys are.
void mix(const ScoreInput & in, const HeadView & view, const std::vector<uint8_t> & kind, float * out) {
    std::vector<float> pooled;
    for (size_t t = 0; t < kind.size(); t++) {
        if (kind[t]) {
            pooled.push_back(out[t]);
        }
    }
    pool(Pooling::avg, (int32_t) in.params[KERNEL], pooled.data(), (int32_t) pooled.size());
    const std::vector<double> votes(pooled.begin(), pooled.end());
    std::vector<double>       importance = value_norms(view, in.shape, kind.data());
    Keys                      keys       = read_keys(view, in.shape, in.n_tokens, kind.data(), kind.data());
    scale_to(importance, mean(votes));
    for (size_t i = 0; i < votes.size(); i++) {
        importance[i] += votes[i];
    }
    scale_to(keys.diversity, mean(importance));
    for (size_t t = 0, i = 0; t < kind.size(); t++) {
        if (kind[t]) {
            out[t] = (float) ((1.0 - keys.redundancy) * importance[i] + keys.redundancy * keys.diversity[i]);
            i++;
        }
    }
}

// Raises the tokens behind the last image, the last one first, such that the a-th last has at most a * (parts - 1) of the tokens
// that come before it in the text above it in rank. So however many stay, one in `parts` of them is the end of the text.
void raise_end(const double * params, const uint8_t * image, int32_t n_tokens, float * out) {
    int32_t first = n_tokens;
    while (first > std::max(0, n_tokens - window(params)) && !image[first - 1]) {
        first--;
    }
    if (!std::all_of(out, out + n_tokens, [](float x) { return std::isfinite(x); })) {
        return;  // rows that are no numbers have no ranks
    }
    const auto         more = (size_t) params[PARTS] - 1;
    std::vector<float> earlier(out, out + n_tokens);  // the largest first
    std::sort(earlier.begin(), earlier.end(), std::greater<float>());
    for (int32_t t = n_tokens - 1; t >= first; t--) {
        const size_t above = more * (size_t) (n_tokens - t);
        earlier.erase(std::lower_bound(earlier.begin(), earlier.end(), out[t], std::greater<float>()));
        if (above >= earlier.size()) {
            return;
        }
        out[t] = std::max(out[t], (float) (0.5 * ((double) earlier[above - 1] + (double) earlier[above])));
    }
}

void votes(const ScoreInput & in, float * out) {
    for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
        faded_votes(in, in.view->head(in.layer, h), h, in.params[FADE], out + (size_t) h * (size_t) in.n_tokens);
    }
}

void score(const ScoreInput & in, float * out) {
    for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
        const HeadView  view  = in.view->head(in.layer, h);
        const uint8_t * image = in.heads ? in.heads + (size_t) h * (size_t) in.n_tokens : in.image;
        float *         row   = out + (size_t) h * (size_t) in.n_tokens;
        faded_votes(in, view, h, in.params[FADE], row);
        mix(in, view, kind_of(image, in.n_tokens), row);
        raise_end(in.params, image, in.n_tokens, row);
    }
}

}  // namespace

extern const Scorer scorer_modal = {
    { "modal", PARAMS }, false, last_one, false, window, score, nullptr, nullptr, false, nullptr, nullptr, votes
};

}  // namespace kvedge
