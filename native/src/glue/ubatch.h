// The current ubatch: a run for each of its sequences, from before its graph runs until it is over. Memory for all its tokens is taken
// before the graph runs, or no token is entered.

#pragma once

#include "glue/compressor.h"
#include "glue/run.h"

#include <atomic>

namespace kvedge {

class Ubatch {
  public:
    Ubatch(Context & context, const Layers & layers, Sequences & sequences, Devices & devices, Keeping & keeping, Working & working,
           Compressor & compressor)
        : context_(context), layers_(layers), sequences_(sequences), devices_(devices), keeping_(keeping), working_(working),
          compressor_(compressor) {}

    // Enters the tokens. -1: refused, which is reported; 1: the graph must be built anew; else 0. Throws std::bad_alloc.
    int  begin(const llama_attn_provider_ubatch & of);
    void leave();  // ends the ubatch; its graph may still run
    // Ends the graph. computed = false: the graph was stopped or never built; then the ubatch's changes are undone, or marked as half done.
    // A second call does nothing.
    void end(bool computed) noexcept;

    // Returns whether a graph of n tokens belongs to this ubatch: llama.cpp reserves memory with other graphs.
    bool is(int64_t n) const { return n == n_tokens; }

    // Begins a layer of the graph. Attention starts behind a barrier.
    void start_layer(const LayerShape & shape);

    Runs                 runs;
    bool                 causal       = true;
    int32_t              n_tokens     = 0;
    int32_t              most_threads = 1;    // the most threads that the context has computed with
    std::atomic<int32_t> next_task{ 0 };      // next task of the layer's attention, over all runs
    std::atomic<int32_t> finished{ 0 };       // finished pieces of a bounded prompt's layer

  private:
    bool collect(const llama_attn_provider_ubatch & of);
    Kind classify(const Run & run) const;
    bool repeats(const llama_attn_provider_ubatch & of, const Run & run) const;
    bool refused(const llama_attn_provider_ubatch & of, const Run & run);
    bool prepare(const llama_attn_provider_ubatch & of, Run & run);
    bool begin_answer(SequenceState & state);
    void note_places(const llama_attn_provider_ubatch & of, Run & run) const;
    bool decodes(const Run & run) const;
    bool store_all(const llama_attn_provider_ubatch & of);
    bool store(const llama_attn_provider_ubatch & of, Run & run);
    bool enter_bounded(const llama_attn_provider_ubatch & of, Run & run);
    bool reserve_working();
    void take_back() noexcept;
    void go_on(Run & run);
    void undo(Run & run) noexcept;
    bool no_memory(const char * what);  // reports it; false

    bool running_ = false;  // from begin() to end()

    Context &      context_;
    const Layers & layers_;
    Sequences &    sequences_;
    Devices &      devices_;
    Keeping &      keeping_;
    Working &      working_;
    Compressor &   compressor_;
};

}  // namespace kvedge
