// Random: the baseline that every method must beat. A token's score depends on the seed, the layer, the head and the token alone, so that
// two runs, and both engines, agree.

#include "plan/stages.h"
#include "primitives/mix.h"

namespace kvedge {

// Scores have 24 bits, exact in float32: mix(mix(mix(mix(seed) + layer) + head) + token) / 2^64, rounded down.
static void score(const ScoreInput & in, float * out) {
    const int32_t  n_heads_kv = in.shape.n_heads_kv;
    const uint64_t layer      = mix(mix((uint64_t) in.params[0]) + (uint64_t) in.layer);
    for (int32_t h = 0; h < n_heads_kv; h++) {
        const uint64_t head = mix(layer + (uint64_t) h);
        for (int32_t t = 0; t < in.n_tokens; t++) {
            *out++ = (float) (mix(head + (uint64_t) t) >> 40) / 16777216.0f;
        }
    }
}

static const Param PARAMS[] = { setting::whole("seed", 0, 0, INT32_MAX, "another seed, other tokens"), {} };

extern const Scorer scorer_random = { { "random", PARAMS }, score };

}  // namespace kvedge
