// Which rows lie on devices: where a layer is placed, when a sequence's rows go there and come back, and the graphs that may
// still run over them.

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
    kvedge_rotate  rotate  = KVEDGE_ROTATE_AUTO;  // as it was asked for; Sequences::storage says what became of it

    ggml_backend_dev_t place_of(const llama_attn_provider_layer & layer) const;  // NULL: rows and attention are the host's
    // llama_set_attn_provider, with as many nodes as the attention of layers on devices may take. Returns its code.
    int32_t attach();

    // Where a ubatch attends, whose rows then go there or come back. False: no memory, which is reported.
    bool place(Runs & runs);
    bool active() const { return active_; }  // the current ubatch attends on devices
    void leave() { active_ = false; }        // it attends nowhere
    // Room for a run's tokens, one of n_runs. False: no memory, which is reported. Throws std::bad_alloc.
    bool reserve(Run & run, size_t n_runs);
    // Its graph is about to be built or used again. Returns whether it must be built.
    bool begin_graph(const Runs & runs);
    // The attention of a layer on a device; NULL: the ubatch attends on the host. runs: NULL where the graph is of no ubatch, as
    // those are with which llama.cpp reserves memory.
    ggml_tensor * build(const llama_attn_provider_layer & layer, size_t at, const Runs * runs);

    // Rows that are on devices come to the host. False: no memory.
    bool to_host(SequenceState & state);
    // The last ubatch's graph may run while the next one is built, but for layers on several devices.
    void run_on(const Runs & runs);
    void wait();  // ends when no graph runs

    // What graphs left of a sequence's prompt on devices comes to the host: bytes that were fetched. They throw std::bad_alloc.
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
    uint64_t          stamps_ = 0;  // of tensors on devices, of all sequences
    std::shared_ptr<Workers> workers_ = std::make_shared<Workers>();
    std::vector<GraphRows::Signature>       wanted_graph_, built_graph_;
    std::vector<std::shared_ptr<GraphRows>> running_;  // of earlier ubatches, whose graphs may run still
};

}  // namespace kvedge
