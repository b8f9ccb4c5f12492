// kvedge_cache: the attention provider of one llama_context, made of what it holds, from llama.cpp's side up to the current
// ubatch. Each knows only those before it.

#pragma once

#include "glue/compressor.h"
#include "glue/context.h"
#include "glue/devices.h"
#include "glue/keeping.h"
#include "glue/layers.h"
#include "glue/sequences.h"
#include "glue/ubatch.h"
#include "glue/working.h"
#include "system/claim.h"

struct kvedge_cache {
    kvedge::Context    context;
    kvedge::Layers     layers;
    kvedge::Sequences  sequences{ layers };
    kvedge::Devices    devices{ context, layers, sequences };
    kvedge::Working    working;
    kvedge::Keeping    keeping{ context, layers, sequences, devices };
    kvedge::Compressor compressor{ context, layers, sequences, devices, keeping, working };
    kvedge::Ubatch     ubatch{ context, layers, sequences, devices, keeping, working, compressor };

    mutable kvedge::Owner owner;  // the thread in a call, or in a ubatch

    // What llama.cpp asks for: the attention of a layer while a graph is built (NULL: its own), room for a ubatch (-1: there is
    // none; 1: the graph must be built anew), and that sequences change as its own do. They throw std::bad_alloc.
    ggml_tensor * build_attn(const llama_attn_provider_layer & layer);
    int           ubatch_begin(const llama_attn_provider_ubatch & of);
    void          clear();
    void          seq_rm(int32_t seq_id, int32_t p0, int32_t p1);
    bool          seq_cp(int32_t from, int32_t to, int32_t p0, int32_t p1);
    void          seq_keep(int32_t seq_id);

    // Ends when no graph runs: before sequences change. The last ubatch is over then.
    void settle();
    // The rows of a sequence come to the host, for a caller to read; where rows lie is nothing that a caller sees.
    // Errors: KVEDGE_E_MEMORY.
    kvedge_status to_host(const kvedge::SequenceState & state, kvedge_error * err) const;

  private:
    ggml_tensor * build_reader(const llama_attn_provider_layer & layer);
};

namespace kvedge {

// The operations of a layer in the graph; see ggml_custom_4d.
void store_op(ggml_tensor * dst, int ith, int nth, void * layer_op);   // src: k, v
void start_op(ggml_tensor * dst, int ith, int nth, void * layer_op);   // src: q; in its place, of a layer that stores nothing
void attend_op(ggml_tensor * dst, int ith, int nth, void * layer_op);  // src: q, the result of either, sinks (optional)

}  // namespace kvedge
