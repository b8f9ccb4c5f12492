// Measuring: the graph that measures pending rows on one device for a scorer, with its inputs and results.

#pragma once

#include "device/graph_rows.h"
#include "device/highpass.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace kvedge {

// Numbers split into high + low. Both are f32 tensors whose numbers are exact in half precision.
struct Halves {
    ggml_tensor * high;
    ggml_tensor * low;
};

// The mean direction of keys [d, T, heads]. sum: d * heads numbers, the sum of the counted keys, normalised or as stored.
// products: [T, 1, heads], each normalised key times the sum.
struct Directions {
    ggml_tensor * sum;
    ggml_tensor * products;
};

struct GraphRows::Measuring {
    using T = ggml_tensor *;

    // KV heads of a group that are measured together, with the tensors of their results; NULL: not measured.
    struct Part {
        size_t               layer;
        const Group *        group;
        size_t               first;  // index of the first KV head in group->heads
        std::vector<int32_t> heads;
        int32_t              rows;  // N: rows of the longest KV head
        T                    votes = nullptr;
        Directions           directions{};
        T squares[2] = {}, deviation[2] = {}, energy[2] = {};  // [0]: keys, [1]: values
        T lengths = nullptr, high = nullptr;                   // results of kvedge's operations (own.h)
    };
    // Sums of squares of a layer's keys [0] and values [1]: before the high pass, and after.
    struct Energy {
        double all[2] = {}, high[2] = {};
    };
    // A list of row places that several layers may share, with the properties by which a layer finds the list.
    struct Places {
        int64_t slots;
        int32_t head, n_heads, rows;
        bool    filtered;
        T       list;
    };

    // Builds the graph for the layers of one device. own: use kvedge's operations (own.h), too. Throws std::bad_alloc.
    Measuring(const GraphRows & rows, const MeasureJob & job, const DeviceTotals & on, ggml_tensor * ring, bool own);

    bool  asks_votes() const { return job.wanted.votes != WantedMeasures::Votes::none && job.n_window > 0; }
    bool  asks_high() const { return job.wanted.gamma >= 0.0 && !of_kind.empty() && !filter.all_pass(); }
    void  plan_parts();
    size_t work_bytes(const LayerShape & s, size_t n_rows) const;
    void  make_inputs();
    void  make_part(Part & part);
    void  make_votes(Part & part, T keys);
    bool  from_ring() const { return asks_votes() && job.queries.empty(); }
    int32_t row_at(int32_t place) const { return from_ring() ? rows.queries.row_at(place) : place; }  // query in the window, 0: oldest
    T     sent_queries();
    T     queries_of(const Part & part, T x);
    T     mask_of(const Part & part);
    T     places(const Part & part, int32_t rows, bool filtered);
    T     wide(const Part & part, bool keys, int32_t rows);
    T     gathered(const Part & part, bool keys, int32_t rows, bool filtered);
    T     lying(const Part & part, bool keys, int32_t rows) const;
    MeasuredRows measured(const Part & part, bool of_the_kind);
    bool  reads_half() const;
    void  make_own(Part & part);
    void  read_own(const Part & part, Measures & out, Energy & energy) const;
    T     result(T x);
    void  read_layer(size_t layer, Measures & out) const;
    void  read_part(const Part & part, Measures & out, Energy & energy) const;
    bool  even() const { return slots.even; }
    const LayerShape & shape(const Part & part) const { return (*slots.shapes)[part.layer]; }

    const GraphRows &           rows;
    const Slots &               slots;
    const MeasureJob &          job;
    const DeviceTotals &        on;
    bool                        own;
    T                           ring;  // the queries that the prompt's graphs left on the device
    std::vector<int32_t>        of_kind;  // tokens that anchor and deviation are measured over
    GraphHighPass               filter;
    GraphTransfer               transfer;
    std::vector<Part>           parts;
    std::vector<Places>         lists;
    std::unique_ptr<GraphBuilder> builder;
    ggml_context *                c = nullptr;
    Halves                      halves{};  // the queries of all layers
    T mask = nullptr, weights = nullptr, counts = nullptr, own_lists[2] = {};
};

}  // namespace kvedge
