// Image tokens and text tokens each by what tells among their kind: votes of the last queries for both, mixed for image tokens with
// norms of values and diversity of keys, as MixKV mixes them, and with outliers, as FlashCache scores them (eq. 10); and the
// end of the text stays, and text between images, in proportion to what is kept.

#include "core/stages.h"
#include "primitives/dct.h"
#include "primitives/mixture.h"
#include "primitives/window.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

namespace kvedge {

namespace {

enum { WINDOW, FADE, KERNEL, PARTS, OUTLIER, GAMMA, TEXT };

const Param PARAMS[] = {
    setting::whole("window", 24, 1, 4096, "last queries, which vote, and tokens of the end of the text"),
    setting::number("fade", 0.15, 0, 100, "a query counts e^-fade of the one behind it"),
    setting::whole("kernel", 5, 1, 255, "width over which votes for neighbouring image tokens are averaged, odd", 2),
    setting::whole("parts", 3, 2, 64, "one in so many kept pairs is the end of the text's at least"),
    setting::number("outlier", 0.5, 0, 100, "weight of how far an image token is from its neighbours, beside what is mixed"),
    setting::number("gamma", 0.2, 0, 1, "share of the low frequencies that make up the curve through image tokens"),
    setting::whole("text", 16, 2, 64, "one in so many kept pairs is text at least, between images too"),
    {},
};

int32_t window(const double * params) { return (int32_t) params[WINDOW]; }

int32_t last_one(int32_t kept, int32_t, const double *) { return std::min(kept, 1); }

// [T] 1 for the tokens that are mixed: the image's, or all where there is none.
std::vector<uint8_t> kind_of(const uint8_t * image, int32_t n_tokens, bool images) {
    std::vector<uint8_t> kind((size_t) n_tokens);
    std::transform(image, image + n_tokens, kind.begin(), [images](uint8_t one) { return !images || one != 0; });
    return kind;
}

// [n] How far the tokens of a kind are from a smooth curve through them. The filter is kept for heads with as many of them.
class Outliers {
  public:
    Outliers(const ScoreInput & in) : in_(in) {}

    std::vector<double> operator()(const HeadView & view, const std::vector<uint8_t> & kind) {
        const auto n = (size_t) std::count(kind.begin(), kind.end(), (uint8_t) 1);
        if (!filter_ || n != n_) {
            filter_ = std::make_unique<HighPass>((int32_t) n, in_.params[GAMMA]);
            n_      = n;
        }
        std::vector<float> out(n, 0.0f);
        filter_->add_deviation(view, in_.shape, kind.data(), out.data(), work_);
        return { out.begin(), out.end() };
    }

  private:
    const ScoreInput &        in_;
    std::unique_ptr<HighPass> filter_;
    size_t                    n_ = 0;
    HighPass::Work            work_;
};

// [n] Of the tokens of the kind: pooled votes and norms of values, and diversity by how alike the kind's keys are.
std::vector<double> mix(const ScoreInput & in, const HeadView & view, const std::vector<uint8_t> & kind, const float * out) {
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
    for (size_t i = 0; i < votes.size(); i++) {
        importance[i] = (1.0 - keys.redundancy) * importance[i] + keys.redundancy * keys.diversity[i];
    }
    return importance;
}

// Raises tokens, the last one of the text first, such that the a-th has at most a * (parts - 1) of all that are not among the
// first a above it in rank. So however many stay, one in `parts` of them is among these. scores [n] as they were, and ranked.
void raise(const int32_t * tokens, size_t count, int32_t parts, const std::vector<float> & scores, const std::vector<float> & ranked,
           float * out) {
    const auto           more = (size_t) parts - 1;
    std::vector<uint8_t> gone(ranked.size(), 0);
    size_t               at = 0, before = 0;  // so many of the others are before this place
    for (size_t a = 1; a <= count; a++) {
        const auto t = (size_t) tokens[a - 1];
        auto own = (size_t) (std::lower_bound(ranked.begin(), ranked.end(), scores[t], std::greater<float>()) - ranked.begin());
        while (gone[own]) {
            own++;
        }
        gone[own] = 1;
        before -= own < at ? 1 : 0;
        for (; at < ranked.size() && (gone[at] || before < more * a); at++) {
            before += gone[at] ? 0 : 1;
        }
        if (at == ranked.size()) {
            return;
        }
        size_t above = at - 1;
        while (gone[above]) {
            above--;
        }
        out[t] = std::max(out[t], (float) (0.5 * ((double) ranked[above] + (double) ranked[at])));
    }
}

// Of what stays one in `parts` is the end of the text, which is behind the last image, and at most `window` tokens; one in
// `text` is text, wherever it stands among images.
void raise_text(const double * params, const uint8_t * image, int32_t n_tokens, float * out) {
    if (!std::all_of(out, out + n_tokens, [](float x) { return std::isfinite(x); })) {
        return;  // rows that are no numbers have no ranks
    }
    std::vector<int32_t> text;
    size_t               end = 0;
    for (int32_t t = n_tokens - 1; t >= 0; t--) {
        if (!image[t]) {
            text.push_back(t);
            if (t >= n_tokens - window(params) && (int32_t) text.size() == n_tokens - t) {
                end = text.size();
            }
        }
    }
    const std::vector<float> scores(out, out + n_tokens);
    std::vector<float>       ranked(scores);
    std::sort(ranked.begin(), ranked.end(), std::greater<float>());
    raise(text.data(), end, (int32_t) params[PARTS], scores, ranked, out);
    if (text.size() < (size_t) n_tokens) {
        raise(text.data(), text.size(), (int32_t) params[TEXT], scores, ranked, out);
    }
}

void votes(const ScoreInput & in, float * out) {
    for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
        faded_votes(in, in.view->head(in.layer, h), h, in.params[FADE], out + (size_t) h * (size_t) in.n_tokens);
    }
}

void score_head(const ScoreInput & in, int32_t head, Outliers & outliers, float * out) {
    const HeadView  view   = in.view->head(in.layer, head);
    const uint8_t * image  = in.heads ? in.heads + (size_t) head * (size_t) in.n_tokens : in.image;
    const bool      images = std::any_of(image, image + in.n_tokens, [](uint8_t one) { return one != 0; });
    const auto      kind   = kind_of(image, in.n_tokens, images);
    faded_votes(in, view, head, in.params[FADE], out);
    std::vector<double> mixture = mix(in, view, kind, out);
    if (in.params[OUTLIER] > 0.0 && images) {
        std::vector<double> far = outliers(view, kind);
        scale_to(far, in.params[OUTLIER] * mean(mixture));
        std::transform(mixture.begin(), mixture.end(), far.begin(), mixture.begin(), std::plus<double>());
    }
    for (size_t t = 0, i = 0; t < kind.size(); t++) {
        if (kind[t]) {
            out[t] = (float) mixture[i++];
        }
    }
    raise_text(in.params, image, in.n_tokens, out);
}

void score(const ScoreInput & in, float * out) {
    Outliers outliers(in);
    for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
        score_head(in, h, outliers, out + (size_t) h * (size_t) in.n_tokens);
    }
}

}  // namespace

extern const Scorer scorer_modal = {
    { "modal", PARAMS }, false, last_one, false, window, score, nullptr, nullptr, false, nullptr, nullptr, votes
};

}  // namespace kvedge
