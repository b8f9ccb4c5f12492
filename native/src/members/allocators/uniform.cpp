// Every layer and KV head keeps the same number of KV pairs.

#include "plan/stages.h"

namespace kvedge {

static void allocate(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    for (size_t l = 0; l < out.size(); l++) {
        out[l].assign((size_t) (*in.shapes)[l].n_heads_kv, in.budget);
    }
}

extern const Allocator allocator_uniform = { { "uniform", nullptr }, allocate, [](const kvedge_plan &) { return Reach::layer; } };

}  // namespace kvedge
