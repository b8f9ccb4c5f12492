// llama.cpp's side of a cache: its context and how it is called, and the errors that llama_decode could not return.

#pragma once

#include "glue/intermediate.h"
#include "kvedge.h"
#include "llama-attn-provider.h"

#include <atomic>

namespace kvedge {

struct Context {
    llama_context *     llama = nullptr;  // NULL once llama.cpp has freed it
    llama_attn_provider provider{};
    int32_t             n_threads = 0;      // for compressions; 0: as many as the context has
    bool                entering  = false;  // the token being decoded is a place holder
    bool                releasing = false;  // llama.cpp removes its own cells only
    Intermediate        intermediate;       // results of the last graph; a graph that is built can move them
    kvedge_error        error{};            // the first that llama_decode could not return
    bool                denied    = false;  // `error` is of a function of llama.cpp that returns nothing
    std::atomic<bool>   refused{ false };   // a second thread's call inside llama.cpp, which could not return it either

    int32_t threads() const;        // of a compression
    int32_t graph_threads() const;  // the most that a graph runs on
    void    synchronize() const;    // ends when no graph runs
    void    release_cells(int32_t seq_id, int32_t p0, int32_t p1);  // llama.cpp's own; the rows stay
    // The sequence's newest position is now `pos`: llama.cpp enters positions only for what it decodes, so that one token stands in
    // for all, and is stored nowhere. The logits of the last token are gone. False: llama.cpp could not.
    bool    enter_position(int32_t seq_id, int32_t pos);
    int     report(kvedge_status status, const char * what);        // for kvedge_take_error; returns -1
    bool    deny(kvedge_status status, const char * what);          // the same where nobody is told: no tokens until it is asked; false
};

}  // namespace kvedge
