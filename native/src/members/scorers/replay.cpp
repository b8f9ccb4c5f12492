// Replay: the largest attention that a query of the prompt, or of a second pass over the prompt, pays to a token (KVzip, Kim et al. 2025).
// With `projected`, each query head's attention counts times the length of the value behind the output projection (KVzip+).

#include "plan/stages.h"

#include <algorithm>

namespace kvedge {

namespace {

enum { SOURCE, SCOPE, CHUNK, PROJECTED };

constexpr float FIRST = 1e18f;  // above any attention times any length; its square is finite

const Param PARAMS[] = {
    setting::words("source", "prompt,instruction,repeat",
                   "whose queries count: the prompt's own, those of an instruction that is read after it, or of the prompt read again"),
    setting::words("scope", "chunk,context",
                   "what the attention of a second pass is shared out among: the chunk that it repeats, or all"),
    setting::whole("chunk", 2000, 16, 1 << 20, "tokens that are read again at a time, images as a whole"),
    setting::flag("projected", false, "whether attention is weighed by how much the value adds through the output projection"),
    {},
};

void observes(const double * params, Observation & to) {
    to.peaks  = params[SOURCE] == 0.0;
    to.again  = !to.peaks;
    to.within = to.again && params[SCOPE] == 0.0;
    to.apart  = params[PROJECTED] == 0.0;
}

// Writes a KV head's scores [T]: the largest of its query heads' attention times the length [T] of the projected value.
void score_projected(const ScoreInput & in, int32_t head, float * out) {
    const Peaks & peaks = in.observed->layer((size_t) in.layer).peaks;
    const int32_t n = std::min(in.n_tokens, peaks.capacity), group = in.shape.n_heads / in.shape.n_heads_kv;
    std::fill_n(out, in.n_tokens, 0.0f);
    for (int32_t h = head * group; h < (head + 1) * group; h++) {
        const float * paid = peaks.highest.data() + (size_t) h * (size_t) peaks.capacity, * length = in.lengths + (size_t) h * (size_t) in.n_tokens;
        for (int32_t t = 0; t < n; t++) {
            out[t] = std::max(out[t], paid[t] >= KEPT_FIRST ? FIRST : paid[t] * length[t]);
        }
    }
}

void score(const ScoreInput & in, float * out) {
    if (in.lengths) {
        for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
            score_projected(in, h, out + (size_t) h * (size_t) in.n_tokens);
        }
        return;
    }
    const Peaks & peaks = in.observed->layer((size_t) in.layer).peaks;
    for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
        const float * of_head = peaks.highest.data() + (size_t) h * (size_t) peaks.capacity;
        for (int32_t t = 0; t < in.n_tokens; t++) {
            *out++ = t < peaks.capacity ? of_head[t] : 0.0f;  // tokens that came later were not observed
        }
    }
}

}  // namespace

extern const Scorer scorer_replay = { { "replay", PARAMS, observes }, score };

}  // namespace kvedge
