#include "compress/select.h"

#include "primitives/share.h"

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

// Returns how many unprotected tokens the first step of the critical rule chooses, in a head that keeps `count`.
int32_t critical_half(const kvedge_plan & plan, int32_t count, int32_t n_protected) {
    return plan.critical_free ? (count - n_protected) / 2 : std::max(0, count / 2 - n_protected);
}

// Moves the n best rows of an ascending range to its front; ties go to the lower row. Both parts stay ascending.
void take_best(std::vector<int32_t>::iterator begin, std::vector<int32_t>::iterator end, const float * by, std::ptrdiff_t n) {
    if (n <= 0 || n >= end - begin) {
        return;
    }
    std::vector<float> values((size_t) (end - begin));
    std::transform(begin, end, values.begin(), [by](int32_t t) { return by[t]; });
    const float    worst = nth_largest(values.data(), values.size(), (size_t) n - 1);
    std::ptrdiff_t alike = n - std::count_if(begin, end, [&](int32_t t) { return by[t] > worst; });
    std::vector<int32_t> others;
    auto                 to = begin;
    for (auto row = begin; row != end; ++row) {
        if (by[*row] > worst || (by[*row] == worst && alike-- > 0)) {
            *to++ = *row;
        } else {
            others.push_back(*row);
        }
    }
    std::copy(others.begin(), others.end(), to);
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
    rest.reserve((size_t) n_tokens);
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
        const auto images = text_first ? std::stable_partition(next, rest.end(), [&](int32_t t) { return image[t] == 0; }) : rest.end();
        const auto first  = std::min((std::ptrdiff_t) n, images - next);
        take_best(next, images, by, first);
        take_best(images, rest.end(), by, n - first);
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
    std::vector<uint8_t> stays((size_t) n_tokens, 0);
    kept.insert(kept.end(), rest.begin(), rest.begin() + fill);
    for (const int32_t t : kept) {
        stays[(size_t) t] = 1;
    }
    kept.clear();
    for (int32_t t = 0; t < n_tokens; t++) {
        if (stays[(size_t) t]) {
            kept.push_back(t);
        }
    }
    return kept;
}

}  // namespace kvedge
