// The rows of one sequence on devices: where they lie, the attention over them in ggml's operations, what that leaves of a prompt,
// and their compression.

#pragma once

#include "device/attention.h"
#include "device/inputs.h"
#include "device/seen.h"
#include "device/slots.h"
#include "plan/away.h"

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvedge {

class GraphRows : public AwayRows {
  public:
    using Form = Slots::Form;

    // places [layers]: NULL for a layer whose rows stay with the store. stamps counts the tensors of a cache that were made.
    GraphRows(const std::vector<LayerShape> & shapes, const std::vector<ggml_backend_dev_t> & places, const Form & form, uint64_t & stamps,
              std::shared_ptr<Workers> workers = std::make_shared<Workers>())
        : slots_(shapes, places, form, stamps, std::move(workers)), inputs_(slots_), queries(slots_), sums(slots_) {}

    // The rows of `from` go to the devices, and its memory is given back. False: a device has no memory (full_device), and
    // nothing has changed. Throws std::bad_alloc.
    bool load(Store & from, int32_t n_threads);
    // And back; what is on the devices is freed. False: no memory, and nothing has changed.
    bool fetch(Store & to, int32_t n_threads);

    // Whether more tokens can be entered while the graph of the last ones runs: there is room for all that reserve() makes.
    bool may_follow(const Incoming & incoming) const;
    // Room and inputs for more tokens, for the queries that are kept, and to add up their attention. False: a device has no
    // memory, and nothing has changed that matters. Throws std::bad_alloc.
    bool reserve(const Incoming & incoming, int32_t n_threads);
    // Enters them, where there is room; the graph that follows writes their rows. No other graph than that of the tokens
    // entered last may run, and that one only where may_follow().
    void enter(int32_t n, bool causal);

    // Quantised rows become plain ones, as those of a prompt are. False: a device lacks an operation of that, or memory; rows can
    // be fetched and nothing else. Throws std::bad_alloc.
    bool make_plain(int32_t n_threads);

    // The last n tokens of `from`, whose rows the host has, are entered behind those that are here, with their rows. False: a device
    // has no memory, and nothing has changed that matters. No graph may run. Throws std::bad_alloc.
    bool append(const Store & from, int32_t n, int32_t n_threads);

    // Takes out the rows of the last n tokens, which were entered last; not where single rows are dropped. No graph may run.
    void take_back(int32_t n);

    // Takes out a row of a head, in token order; nothing where the layer lies on no device.
    void drop(size_t layer, int32_t head, int32_t row);

    // Attention of the tokens entered last: [d_v * H, n].
    ggml_tensor * attend(const GraphLayer & in, size_t layer);

    // Two graphs are the same where this is.
    using Signature = std::array<uint64_t, 4>;
    Signature signature() const { return { slots_.stamp, (uint64_t) inputs_.n(), (uint64_t) slots_.visible(), inputs_.turn() }; }

    bool    holds(size_t layer) const override { return slots_.layers[layer].device != nullptr; }
    bool    keeps_window(int32_t n) const override { return queries.holds(n); }
    Outcome measure(const MeasureJob & job, std::vector<Measures> & out) override;  // measure.cpp
    Outcome take(const TakeJob & job) override;                                     // take.cpp

    const Form &        form() const { return slots_.form; }
    bool                even() const { return slots_.even; }  // all heads hold as many rows, none of them with a bias
    uint64_t            bytes() const;                        // of keys and values, and what goes with them
    const std::string & full_device() const { return slots_.full_device; }  // the one that had no memory

  private:
    struct Measuring;  // by what rows are measured (measure.cpp)
    struct Taking;     // a compression (taking.h)
    struct Merging;

    ggml_tensor * attend_even(const GraphLayer & in, size_t layer) const;
    ggml_tensor * attend_group(const GraphLayer & in, const DeviceLayer & layer, const Group & group) const;
    ggml_tensor * attend_regions(const GraphLayer & in, const DeviceLayer & layer, const Group & group) const;
    ggml_tensor * attend_several(const GraphLayer & in, const DeviceLayer & layer) const;
    Outcome       fail(Outcome outcome, ggml_backend_dev_t device, const std::string & what);  // notes the problem
    Outcome       measure_on(size_t device, const MeasureJob & job, std::vector<Measures> & out);

    Slots              slots_;
    Inputs             inputs_;
    std::vector<float> scales_;  // [layer] of the logits, once a graph was built

  public:
    bool own = true;  // by the operations of own.h, where the device has them; false: for tests and benches
    Ring queries;  // of the last tokens of a prompt
    Sums sums;     // of its attention
};

}  // namespace kvedge
