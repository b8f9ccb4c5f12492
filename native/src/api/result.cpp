#include "api/result.h"

extern "C" void kvedge_result_free(kvedge_result * result) try { delete result; } catch (...) { }

// Returns read(head) for a head of a result; `none` if there is no such head.
template <class T, class F> static T of_head(const kvedge_result * result, int32_t layer, int32_t head, T none, const F & read) noexcept {
    const auto * h = result ? result->head(layer, head) : nullptr;
    return h ? read(*h) : none;
}

extern "C" int32_t kvedge_result_length(const kvedge_result * result, int32_t layer, int32_t head) {
    return of_head(result, layer, head, -1, [](const auto & h) { return (int32_t) h.kept.size(); });
}

extern "C" const int32_t * kvedge_result_kept(const kvedge_result * result, int32_t layer, int32_t head) {
    return of_head(result, layer, head, (const int32_t *) nullptr, [](const auto & h) { return h.kept.data(); });
}

extern "C" const float * kvedge_result_k(const kvedge_result * result, int32_t layer, int32_t head) {
    return of_head(result, layer, head, (const float *) nullptr, [](const auto & h) { return h.k.data(); });
}

extern "C" const float * kvedge_result_v(const kvedge_result * result, int32_t layer, int32_t head) {
    return of_head(result, layer, head, (const float *) nullptr, [](const auto & h) { return h.v.data(); });
}

extern "C" const float * kvedge_result_biases(const kvedge_result * result, int32_t layer, int32_t head) {
    return of_head(result, layer, head, (const float *) nullptr, [](const auto & h) { return h.biases.empty() ? nullptr : h.biases.data(); });
}

extern "C" const float * kvedge_result_scores(const kvedge_result * result, int32_t layer, int32_t head) {
    return of_head(result, layer, head, (const float *) nullptr, [&](const auto &) -> const float * {
        const size_t at = (size_t) head * (size_t) result->n_tokens;
        return result->scores.empty() ? nullptr : result->scores[(size_t) layer].data() + at;
    });
}

extern "C" const float * kvedge_result_attention(const kvedge_result * result, int32_t layer) {
    return of_head(result, layer, 0, (const float *) nullptr, [&](const auto &) { return result->attention[(size_t) layer].data(); });
}
