#include "primitives/shared.h"

#include <cstddef>

namespace kvedge {

void share_among_heads(float * scores, int32_t n_heads_kv, int32_t n_tokens) {
    const auto T = (size_t) n_tokens, n = (size_t) n_heads_kv;
    for (size_t t = 0; t < T; t++) {
        double sum = 0.0;
        for (size_t h = 0; h < n; h++) {
            sum += (double) scores[h * T + t];
        }
        for (size_t h = 0; h < n; h++) {
            scores[h * T + t] = (float) (sum / (double) n);
        }
    }
}

}  // namespace kvedge
