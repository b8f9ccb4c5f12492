// Position: later tokens matter more; with sinks protected this is StreamingLLM.

#include "plan/stages.h"

namespace kvedge {

static void score(const ScoreInput & in, float * out) {
    const int32_t n_heads_kv = in.shape.n_heads_kv;
    for (int32_t h = 0; h < n_heads_kv; h++) {
        for (int32_t t = 0; t < in.n_tokens; t++) {
            *out++ = (float) t;
        }
    }
}

extern const Scorer scorer_position = [] {
    Scorer out{ { "position", nullptr }, score };
    out.sinks_first = true;
    return out;
}();

}  // namespace kvedge
