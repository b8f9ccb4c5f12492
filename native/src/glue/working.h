// Working memory of attention on the host. Released when a prompt is complete.

#pragma once

#include "attention/attention.h"
#include "glue/layers.h"

#include <memory>
#include <vector>

namespace kvedge {

struct Working {
    std::vector<Scratch>        scratch;  // one for each thread
    std::vector<MomentsScratch> turning;  // one for each thread, if queries are rotated back
    std::unique_ptr<SpinLock[]> locks;    // [KV heads]

    // Makes room for n_threads threads, whose queries meet at most n_keys keys. False: no memory.
    bool reserve(const Layers & layers, int32_t n_keys, int32_t n_threads);
    bool reserve_turning(const Layers & layers, int32_t n_threads);
    void release();
};

}  // namespace kvedge
