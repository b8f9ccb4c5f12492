// Memory that attention on the host works in; it goes back when a prompt is complete.

#pragma once

#include "attention/attention.h"
#include "glue/layers.h"

#include <memory>
#include <vector>

namespace kvedge {

struct Working {
    std::vector<Scratch>        scratch;  // one for each thread
    std::vector<MomentsScratch> turning;  // likewise, where queries are turned back
    std::unique_ptr<SpinLock[]> locks;    // [KV heads]

    // Room for queries that meet n_keys at most, on so many threads. False: no memory.
    bool reserve(const Layers & layers, int32_t n_keys, int32_t n_threads);
    bool reserve_turning(const Layers & layers, int32_t n_threads);
    void release();
};

}  // namespace kvedge
