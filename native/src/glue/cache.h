// kvedge_cache: the attention provider of one llama_context. Its members are ordered from llama.cpp's side to the current ubatch; a member
// knows only the members before it.

#pragma once

#include "glue/compressor.h"
#include "glue/context.h"
#include "glue/devices.h"
#include "glue/keeping.h"
#include "glue/layers.h"
#include "glue/sequences.h"
#include "glue/ubatch.h"
#include "glue/working.h"
#include "system/handle_guard.h"

struct kvedge_cache {
    kvedge::Context    context;
    kvedge::Layers     layers;
    kvedge::Sequences  sequences{ layers };
    kvedge::Devices    devices{ context, layers, sequences };
    kvedge::Working    working;
    kvedge::Keeping    keeping{ context, layers, sequences, devices };
    kvedge::Compressor compressor{ context, layers, sequences, devices, keeping, working };
    kvedge::Ubatch     ubatch{ context, layers, sequences, devices, keeping, working, compressor };

    mutable kvedge::HandleGuard guard;  // the thread that is inside a call or a ubatch

    // What llama.cpp calls; all throw std::bad_alloc. build_attn: returns the attention of a layer for a graph; NULL: llama.cpp builds it.
    // ubatch_begin: makes room for a ubatch; -1: refused; 1: the graph must be built anew; else 0. The others change sequences as
    // llama.cpp changes its own.
    ggml_tensor * build_attn(const llama_attn_provider_layer & layer);
    int           ubatch_begin(const llama_attn_provider_ubatch & of);
    void          clear();
    void          seq_rm(int32_t seq_id, int32_t p0, int32_t p1);
    bool          seq_cp(int32_t from, int32_t to, int32_t p0, int32_t p1);
    void          seq_keep(int32_t seq_id);

    // Waits until no graph runs; the last ubatch is over then. Call this function before sequences change.
    void finish_graphs();
    // Brings the rows of a sequence to the host, for a caller to read; callers do not see where rows lie. Errors: KVEDGE_E_MEMORY.
    kvedge_status to_host(const kvedge::SequenceState & state, kvedge_error * err) const;

  private:
    ggml_tensor * build_reader(const llama_attn_provider_layer & layer);
};

namespace kvedge {

// The operations of a layer in the graph; see ggml_custom_4d.
void store_op(ggml_tensor * dst, int ith, int nth, void * layer_op);   // src: k, v
void start_op(ggml_tensor * dst, int ith, int nth, void * layer_op);   // src: q; replaces store_op in a layer that stores nothing
void attend_op(ggml_tensor * dst, int ith, int nth, void * layer_op);  // src: q, the result of store_op or start_op, sinks (optional)

}  // namespace kvedge
