#pragma once

#include <cstdint>

namespace kvedge {

// scores [Hkv][T]: every head gets the mean over the heads, for methods whose layers choose for all heads alike.
void share_among_heads(float * scores, int32_t n_heads_kv, int32_t n_tokens);

}  // namespace kvedge
