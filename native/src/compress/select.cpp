#include "compress/select.h"

#include <algorithm>

namespace kvedge {

Protection fit_protection(const kvedge_plan & plan, int32_t n_tokens, int32_t count) {
    const int32_t recent = plan_recent(plan, n_tokens, count);
    if ((int64_t) plan.sinks + recent <= count) {
        return { plan.sinks, recent };
    }
    if (!plan.scorer->sinks_first) {
        const int32_t kept = std::min(recent, count);
        return { std::min(plan.sinks, count - kept), kept };
    }
    const int32_t sinks = std::min(plan.sinks, count);
    return { sinks, count - sinks };
}

namespace {

constexpr float CRITICAL_EPS = 1e-4f;

bool mixed(int32_t n_tokens, const uint8_t * image) {
    const bool first = image[0] != 0;
    return std::any_of(image, image + n_tokens, [&](uint8_t i) { return (i != 0) != first; });
}

// Tokens that are not protected and that the critical rule's first step chooses, of a head that keeps `count`.
int32_t critical_half(const kvedge_plan & plan, int32_t count, int32_t n_protected) {
    return plan.critical_free ? (count - n_protected) / 2 : std::max(0, count / 2 - n_protected);
}

std::vector<float> weigh(int32_t n_tokens, const float * scores, const float * weights) {
    std::vector<float> out((size_t) n_tokens);
    for (size_t t = 0; t < out.size(); t++) {
        out[t] = (scores[t] + CRITICAL_EPS) * weights[t];
    }
    return out;
}

}  // namespace

std::vector<int32_t> select_tokens(
    const kvedge_plan & plan, int32_t n_tokens, int32_t count, const uint8_t * image, const float * scores, const float * reserve,
    const float * weights) {
    const Protection     p          = fit_protection(plan, n_tokens, count);
    const bool           text_first = plan.text_prior && mixed(n_tokens, image);
    std::vector<int32_t> kept, rest;
    int32_t              n_text = 0;
    for (int32_t t = 0; t < n_tokens; t++) {
        if (t < p.sinks || t >= n_tokens - p.recent) {
            kept.push_back(t);
        } else {
            rest.push_back(t);
            n_text += image[t] ? 0 : 1;
        }
    }
    const auto n_protected = (int32_t) kept.size();
    int32_t    fill        = count - n_protected;
    if (text_first && plan.keep_all_text) {
        fill = std::max(fill, n_text);
    }
    fill = std::clamp(fill, 0, (int32_t) rest.size());
    auto       next = rest.begin();
    const auto take = [&](const float * by, int32_t n) {
        std::nth_element(next, n < rest.end() - next ? next + n : rest.end(), rest.end(), [&](int32_t a, int32_t b) {
            if (text_first && image[a] != image[b]) {
                return image[a] < image[b];
            }
            return by[a] != by[b] ? by[a] > by[b] : a < b;
        });
        next += n;
    };
    if (reserve) {
        take(reserve, std::min(fill, plan.scorer->reserved(count, plan.params[KVEDGE_STAGE_SCORER])));
    }
    const auto left = [&] { return fill - (int32_t) (next - rest.begin()); };
    if (weights) {
        const int32_t reserved = fill - left(), half = std::min(fill, critical_half(plan, count, n_protected));
        take(scores, std::max(0, half - reserved));
        take(weigh(n_tokens, scores, weights).data(), left());
    } else {
        take(scores, left());
    }
    kept.insert(kept.end(), rest.begin(), rest.begin() + fill);
    std::sort(kept.begin(), kept.end());
    return kept;
}

}  // namespace kvedge
