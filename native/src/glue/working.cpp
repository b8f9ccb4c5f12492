#include "glue/working.h"

#include <algorithm>

namespace kvedge {

bool Working::reserve(const Layers & layers, int32_t n_keys, int32_t n_threads) {
    scratch.resize((size_t) n_threads);
    if (!locks) {
        locks.reset(new SpinLock[(size_t) layers.most_kv_heads()]);
    }
    return std::all_of(scratch.begin(), scratch.end(), [&](Scratch & s) { return s.reserve(layers.shapes, n_keys); });
}

bool Working::reserve_turning(const Layers & layers, int32_t n_threads) {
    turning.resize((size_t) n_threads);
    return std::all_of(turning.begin(), turning.end(), [&](MomentsScratch & x) { return x.reserve(layers.widest_key()); });
}

void Working::release() {
    for (auto & s : scratch) {
        s.release();
    }
    turning = {};
}

}  // namespace kvedge
