// GraphRows: the rows of one sequence on devices. Builds the attention over these rows, keeps queries and attention sums of a
// prompt, and compresses the rows on the devices.

#pragma once

#include "device/attention.h"
#include "device/inputs.h"
#include "device/seen.h"
#include "device/slots.h"
#include "plan/device_rows.h"

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvedge {

class GraphRows : public DeviceRows {
  public:
    using Form = Slots::Form;

    // places [layers]: device of each layer; NULL: the host's store keeps the layer's rows. stamps: counter of the tensors of a cache.
    GraphRows(const std::vector<LayerShape> & shapes, const std::vector<ggml_backend_dev_t> & places, const Form & form, uint64_t & stamps,
              std::shared_ptr<Workers> workers = std::make_shared<Workers>())
        : slots_(shapes, places, form, stamps, std::move(workers)), inputs_(slots_), queries(slots_), sums(slots_) {}

    // Copies the rows of `from` to the devices and frees their host memory. False: a device is out of memory (full_device), and
    // nothing changed. Throws std::bad_alloc.
    bool load(Store & from, int32_t n_threads);
    // Copies the rows back to the host and frees the device memory. False: the host is out of memory, and nothing changed.
    bool fetch(Store & to, int32_t n_threads);

    // Returns whether n more tokens may be entered while the previous graph still runs: reserve() needs no new memory for them.
    bool may_follow(const Incoming & incoming) const;
    // Makes room for the rows, graph inputs, kept queries and attention sums of more tokens. False: a device is out of memory;
    // the rows are unchanged. Throws std::bad_alloc.
    bool reserve(const Incoming & incoming, int32_t n_threads);
    // Enters n tokens after reserve(); the next graph writes their rows. Meanwhile only the graph of the tokens that were
    // entered before may run, and only if may_follow() is true.
    void enter(int32_t n, bool causal);

    // Converts quantised rows to plain rows, as a prompt needs them. False: a device lacks an operation or memory; after that only
    // fetch() may be called. Throws std::bad_alloc.
    bool make_plain(int32_t n_threads);

    // Copies the rows of the last n tokens of `from`, which the host holds, behind the rows on the devices. False: a device is out
    // of memory; the rows are unchanged. No graph may run. Throws std::bad_alloc.
    bool append(const Store & from, int32_t n, int32_t n_threads);

    // Removes the rows of the last n tokens. Not for rows under a decode policy (form().dropping). No graph may run.
    void take_back(int32_t n);

    // Removes row `row`, counted in token order, of a KV head. Does nothing for a layer that lies on no device.
    void drop(size_t layer, int32_t head, int32_t row);

    // Builds the graph that writes the rows of the entered tokens and returns their attention output [d_v * H, n].
    ggml_tensor * attend(const GraphLayer & in, size_t layer);

    // Identifies a graph: a graph with an equal signature can be used again.
    using Signature = std::array<uint64_t, 4>;
    Signature signature() const { return { slots_.stamp, (uint64_t) inputs_.n(), (uint64_t) slots_.visible(), inputs_.turn() }; }

    bool    holds(size_t layer) const override { return slots_.layers[layer].device != nullptr; }
    bool    keeps_window(int32_t n) const override { return queries.holds(n); }
    Outcome measure(const MeasureJob & job, std::vector<Measures> & out) override;  // measure.cpp
    Outcome compress(const CompressJob & job) override;                             // compressing.cpp

    const Form &        form() const { return slots_.form; }
    bool                even() const { return slots_.even; }  // all KV heads hold the same number of rows, and no row has a bias
    uint64_t            bytes() const;                        // device memory of rows, graph inputs, queries and sums
    const std::string & full_device() const { return slots_.full_device; }  // name of the device that was out of memory

  private:
    struct Measuring;    // the graph that measures rows for scorers (measuring.h)
    struct Compressing;  // one compression (compressing.h)
    struct Merging;

    ggml_tensor * attend_even(const GraphLayer & in, size_t layer) const;
    ggml_tensor * attend_group(const GraphLayer & in, const DeviceLayer & layer, const Group & group) const;
    ggml_tensor * attend_regions(const GraphLayer & in, const DeviceLayer & layer, const Group & group) const;
    ggml_tensor * attend_several(const GraphLayer & in, const DeviceLayer & layer) const;
    Outcome       fail(Outcome outcome, ggml_backend_dev_t device, const char * what, const char * which = "");  // sets problem_
    Outcome       measure_on(size_t device, const MeasureJob & job, std::vector<Measures> & out);

    Slots              slots_;
    Inputs             inputs_;
    std::vector<float> scales_;  // [layer] scale of the logits, set when a graph is built

  public:
    bool own = true;  // measure by kvedge's operations (own.h) where the device has them; tests and benches set false
    Ring queries;  // queries of the last tokens of a prompt
    Sums sums;     // sums of the prompt's attention
};

}  // namespace kvedge
