// The largest attention that a query of the prompt, or of a second pass over it, pays to a token (KVzip, Kim et al. 2025).

#include "core/stages.h"

namespace kvedge {

namespace {

enum { SOURCE, SCOPE, CHUNK };

const Param PARAMS[] = {
    setting::words("source", "prompt,instruction,repeat",
                   "whose queries count: the prompt's own, those of an instruction that is read after it, or of the prompt read again"),
    setting::words("scope", "chunk,context",
                   "what the attention of a second pass is shared out among: the chunk that it repeats, or all"),
    setting::whole("chunk", 2000, 16, 1 << 20, "tokens that are read again at a time, images as a whole"),
    {},
};

uint32_t peaks(const double * params) {
    if (params[SOURCE] == 0.0) {
        return WANTS_PEAKS;
    }
    return params[SCOPE] == 0.0 ? WANTS_PEAKS | WANTS_REPLAY | WITHIN_CHUNK : WANTS_PEAKS | WANTS_REPLAY;
}

void score(const ScoreInput & in, float * out) {
    for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
        const float * of_head = in.peaks + (size_t) h * (size_t) in.peaks_capacity;
        for (int32_t t = 0; t < in.n_tokens; t++) {
            *out++ = t < in.peaks_capacity ? of_head[t] : 0.0f;  // nothing was seen of tokens that followed
        }
    }
}

}  // namespace

extern const Scorer scorer_replay = {
    { "replay", PARAMS }, false, nullptr, false, nullptr, score, nullptr, nullptr, false, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, peaks
};

}  // namespace kvedge
