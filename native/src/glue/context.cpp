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

bool Context::enter_position(int32_t seq_id, int32_t pos) {
    llama_batch batch  = llama_batch_init(1, 0, 1);
    batch.n_tokens     = 1;
    batch.token[0]     = 0;
    batch.pos[0]       = pos;
    batch.n_seq_id[0]  = 1;
    batch.seq_id[0][0] = seq_id;
    batch.logits[0]    = 0;
    entering           = true;
    const int status   = llama_decode(llama, batch);
    llama_synchronize(llama);
    entering = false;
    llama_batch_free(batch);
    return status == 0;
}

int Context::report(kvedge_status status, const char * what) {
    if (error.status == KVEDGE_OK) {
        fail(&error, status, "%s", what);
    }
    return -1;
}

bool Context::deny(kvedge_status status, const char * what) {
    denied = true;
    return report(status, what) == 0;
}

}  // namespace kvedge
