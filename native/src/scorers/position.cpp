// Position: the later a token, the more it matters; with sinks protected this is StreamingLLM.

#include "core/stages.h"

namespace kvedge {

static void score(const ScoreInput & in, int32_t, float * out) {
    for (int32_t t = 0; t < in.n_tokens; t++) {
        out[t] = (float) t;
    }
}

extern const Scorer scorer_position;
const Scorer        scorer_position = { "position", false, false, score };

}  // namespace kvedge
