// The llama_context of a cache, how it is called, and the errors that llama_decode cannot return.

#pragma once

#include "glue/intermediate.h"
#include "kvedge.h"
#include "llama-attn-provider.h"

#include <atomic>

namespace kvedge {

struct Context {
    llama_context *     llama = nullptr;  // NULL after llama.cpp freed it
    llama_attn_provider provider{};
    int32_t             n_threads = 0;      // threads of a compression; 0: n_threads_batch of the context
    bool                entering  = false;  // llama.cpp decodes a placeholder token (enter_position)
    bool                releasing = false;  // llama.cpp removes its own cells; the rows stay
    Intermediate        intermediate;       // results of the last graph; building a graph can move them
    kvedge_error        error{};            // the first error that llama_decode could not return
    bool                denied    = false;  // `error` comes from a llama.cpp function that returns nothing: tokens are refused
    std::atomic<bool>   refused{ false };   // a second thread called a function of llama.cpp, and was refused

    int32_t threads() const;        // threads of a compression
    int32_t graph_threads() const;  // the most threads that a graph runs on
    void    synchronize() const;    // waits until no graph runs
    void    release_cells(int32_t seq_id, int32_t p0, int32_t p1);  // frees llama.cpp's own cells; the rows stay
    // Makes `pos` the sequence's newest position. llama.cpp enters positions only for decoded tokens: a placeholder token is decoded, and
    // stored nowhere. The logits of the last token are gone. False: llama.cpp failed.
    bool    enter_position(int32_t seq_id, int32_t pos);
    int     report(kvedge_status status, const char * what);        // keeps the first error for kvedge_take_error; returns -1
    bool    deny(kvedge_status status, const char * what);          // report(), and refuses tokens until kvedge_take_error; returns false
};

}  // namespace kvedge
