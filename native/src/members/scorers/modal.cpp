// Modal: image tokens and text tokens each have their own rule. Both get votes of the last queries. For image tokens the votes are mixed
// with norms of values and diversity of keys, as in MixKV, and with outliers, as in FlashCache (eq. 10). The end of the text, and text
// between images, stay in proportion to what is kept.

#include "plan/stages.h"
#include "primitives/measure.h"
#include "primitives/mixture.h"
#include "primitives/window.h"

#include <algorithm>
#include <cmath>
#include <functional>

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

void observes(const double * params, Observation & to) { to.window = window(params); }

int32_t last_one(int32_t kept, int32_t, const double *) { return std::min(kept, 1); }

WantedMeasures wanted_measures(const double * params, bool images) {
    WantedMeasures out;
    out.votes       = WantedMeasures::Votes::faded;
    out.fade        = params[FADE];
    out.value_norms = true;
    out.anchor      = WantedMeasures::Anchor::unit;
    out.gamma       = params[OUTLIER] > 0.0 && images ? params[GAMMA] : -1.0;
    out.by_kind     = true;
    return out;
}

// Large buffers, which the heads share one after the other.
struct Work {
    std::vector<double> votes, importance, diversity, far;
    std::vector<float>  pooled;
};

// Writes what was measured of the tokens of a kind to out [n]. x [T].
template <class X, class Y> void of_kind(const X * x, const std::vector<uint8_t> & kind, std::vector<Y> & out) {
    out.resize(kind.size());
    size_t n = 0;
    for (size_t t = 0; t < kind.size(); t++) {
        out[n] = (Y) x[t];
        n += kind[t];
    }
    out.resize(n);
}

// Fills x.importance [n] for the tokens of the kind: pooled votes plus norms of values, mixed with diversity of the kind's keys.
void mix(const ScoreInput & in, size_t head, const std::vector<uint8_t> & kind, Work & x) {
    const size_t at = head * (size_t) in.n_tokens;
    of_kind(in.measures->votes.data() + at, kind, x.pooled);
    pool(Pooling::avg, (int32_t) in.params[KERNEL], x.pooled.data(), (int32_t) x.pooled.size());
    x.votes.assign(x.pooled.begin(), x.pooled.end());
    of_kind(in.measures->value_squares.data() + at, kind, x.importance);
    of_kind(in.measures->cosines.data() + at, kind, x.diversity);
    const double r = redundancy(in.measures->anchor_squares[head], (double) x.votes.size());
    for (size_t i = 0; i < x.votes.size(); i++) {
        x.importance[i] = std::sqrt(x.importance[i]);
        x.diversity[i]  = -x.diversity[i];
    }
    scale_to(x.importance, mean(x.votes));
    for (size_t i = 0; i < x.votes.size(); i++) {
        x.importance[i] += x.votes[i];
    }
    scale_to(x.diversity, mean(x.importance));
    for (size_t i = 0; i < x.votes.size(); i++) {
        x.importance[i] = (1.0 - r) * x.importance[i] + r * x.diversity[i];
    }
}

// Raises the first `count` tokens, which begin with the last text token. Above the a-th of them then rank at most a * (parts - 1) tokens
// that are not among the first a: of any number of kept tokens, one in `parts` is a raised one. scores [n]: before anything is raised.
void raise(const int32_t * tokens, size_t count, int32_t parts, const std::vector<float> & scores, float * out) {
    const auto         more = (size_t) parts - 1;
    std::vector<float> ranked(std::min(scores.size(), (size_t) parts * count + 1));  // ranks behind these do not matter
    std::partial_sort_copy(scores.begin(), scores.end(), ranked.begin(), ranked.end(), std::greater<float>());
    std::vector<uint8_t> gone(ranked.size(), 0);
    size_t               at = 0, before = 0;  // tokens before this place that are not in `gone`
    for (size_t a = 1; a <= count; a++) {
        const auto t = (size_t) tokens[a - 1];
        auto own = (size_t) (std::lower_bound(ranked.begin(), ranked.end(), scores[t], std::greater<float>()) - ranked.begin());
        while (own < gone.size() && gone[own]) {
            own++;
        }
        if (own < gone.size()) {
            gone[own] = 1;
        }
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

// Raises text. One in `parts` kept tokens is from the end of the text: behind the last image, among the last `window` tokens. One in `text`
// kept tokens is text, at any place among images.
void raise_text(const double * params, const uint8_t * image, int32_t n_tokens, float * out) {
    if (!std::all_of(out, out + n_tokens, [](float x) { return std::isfinite(x); })) {
        return;  // NaN and infinity have no ranks
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
    raise(text.data(), end, (int32_t) params[PARTS], scores, out);
    if (text.size() < (size_t) n_tokens) {
        raise(text.data(), text.size(), (int32_t) params[TEXT], scores, out);
    }
}

void votes(const ScoreInput & in, float * out) { std::copy(in.measures->votes.begin(), in.measures->votes.end(), out); }

void score_head(const ScoreInput & in, size_t head, Work & x, float * out) {
    const size_t    at     = head * (size_t) in.n_tokens;
    const uint8_t * image  = in.heads ? in.heads + at : in.image;
    const bool      images = std::any_of(image, image + in.n_tokens, [](uint8_t one) { return one != 0; });
    const auto      kind   = kind_of(image, in.n_tokens);
    std::copy_n(in.measures->votes.data() + at, in.n_tokens, out);
    mix(in, head, kind, x);
    std::vector<double> & mixture = x.importance;
    if (in.params[OUTLIER] > 0.0 && images) {
        of_kind(in.measures->deviation.data() + at, kind, x.far);
        scale_to(x.far, in.params[OUTLIER] * mean(mixture));
        std::transform(mixture.begin(), mixture.end(), x.far.begin(), mixture.begin(), std::plus<double>());
    }
    for (size_t t = 0, i = 0; t < kind.size(); t++) {
        if (kind[t]) {
            out[t] = (float) mixture[i++];
        }
    }
    raise_text(in.params, image, in.n_tokens, out);
}

void score(const ScoreInput & in, float * out) {
    Work work;
    for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
        score_head(in, (size_t) h, work, out + (size_t) h * (size_t) in.n_tokens);
    }
}

}  // namespace

extern const Scorer scorer_modal = {
    { "modal", PARAMS, observes }, score, last_one, wanted_measures, nullptr, nullptr, votes
};

}  // namespace kvedge
