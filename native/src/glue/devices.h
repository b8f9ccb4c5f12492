// Rows on devices: where a layer is placed, when a sequence's rows go there and come back, and which graphs may still run over these rows.

#pragma once

#include "glue/context.h"
#include "glue/layers.h"
#include "glue/run.h"

#include <memory>
#include <vector>

namespace kvedge {

class Devices {
  public:
    Devices(Context & context, Layers & layers, const Sequences & sequences)
        : context_(context), layers_(layers), sequences_(sequences) {}

    kvedge_devices allowed = KVEDGE_DEVICES_AUTO;
    kvedge_rotate  rotate  = KVEDGE_ROTATE_AUTO;  // the requested rotation; Sequences::storage has the actual one

    ggml_backend_dev_t place_of(const llama_attn_provider_layer & layer) const;  // NULL: the host holds rows and attends
    // Calls llama_set_attn_provider with enough graph nodes for the attention of layers on devices. Returns its code.
    int32_t attach();

    // Decides where a ubatch attends, and moves the sequences' rows there. False: no memory, which is reported.
    bool place(Runs & runs);
    bool active() const { return active_; }  // whether the current ubatch attends on devices
    void leave() { active_ = false; }        // the ubatch does not attend on devices
    // Makes room for the tokens of a run, which is one of n_runs. False: no memory, which is reported. Throws std::bad_alloc.
    bool reserve(Run & run, size_t n_runs);
    // Notes the graph that the runs need. Returns whether llama.cpp must build it.
    bool begin_graph(const Runs & runs);
    // Builds the attention of a layer on a device. NULL: the ubatch attends on the host. runs: NULL for a graph without a ubatch; llama.cpp
    // reserves memory with such graphs.
    ggml_tensor * build(const llama_attn_provider_layer & layer, size_t at, const Runs * runs);

    // Brings the rows of a sequence from devices to the host. False: no memory.
    bool to_host(SequenceState & state);
    // Lets the last ubatch's graph run while the next graph is built; waits instead if layers lie on several devices.
    void run_on(const Runs & runs);
    void wait();  // waits until no graph runs

    // Bring the queries or the attention sums of a prompt from devices to the host. Return the fetched bytes. Throw std::bad_alloc.
    uint64_t read_queries(SequenceState & state);
    uint64_t read_sums(SequenceState & state);

  private:
    bool     even(const SequenceState & state) const;
    bool     fits(const Run & run, bool even) const;
    bool     stays(const Run & run) const;
    uint32_t summing_nodes(size_t sequences) const;
    uint32_t nodes() const;
    bool     to_device(SequenceState & state, bool prompt);
    bool     needed_on_host(SequenceState & state);
    bool     report_full(const GraphRows & device, int32_t n);
    bool     one_at_a_time() const;
    void     note_queries(SequenceState & state, size_t layer, int32_t n, const std::vector<float> & queries);
    void     note_sums(SequenceState & state, size_t layer, int32_t rows, const AttentionSums & sums);

    Context &         context_;
    Layers &          layers_;
    const Sequences & sequences_;
    bool              active_ = false;
    uint64_t          stamps_ = 0;  // counts tensors on devices, for all sequences
    std::shared_ptr<Workers> workers_ = std::make_shared<Workers>();
    std::vector<GraphRows::Signature>       wanted_graph_, built_graph_;
    std::vector<std::shared_ptr<GraphRows>> running_;  // rows of earlier ubatches, whose graphs may still run
};

}  // namespace kvedge
