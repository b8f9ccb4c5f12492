#include "glue/context.h"

#include "system/error.h"
#include "system/threads.h"

#include <algorithm>

namespace kvedge {

int32_t Context::threads() const {
    const int32_t n = n_threads > 0 ? n_threads : llama ? llama_n_threads_batch(llama) : available_threads();
    return std::max(1, n);
}

int32_t Context::graph_threads() const { return std::max({ 1, llama_n_threads(llama), llama_n_threads_batch(llama) }); }

void Context::synchronize() const {
    if (llama) {
        llama_synchronize(llama);
    }
}

void Context::release_cells(int32_t seq_id, int32_t p0, int32_t p1) {
    releasing = true;
    llama_memory_seq_rm(llama_get_memory(llama), seq_id, p0, p1);
    releasing = false;
}

int Context::report(kvedge_status status, const char * what) {
    if (error.status == KVEDGE_OK) {
        fail(&error, status, "%s", what);
    }
    return -1;
}

}  // namespace kvedge
