// One measurement of the rows on a device: its graph, what it is given, and what comes back.

#pragma once

#include "device/graph_rows.h"
#include "device/highpass.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace kvedge {

// Numbers in two halves, each of them f32 that half precision holds. A product with both is one with the numbers.
struct Halves {
    ggml_tensor * high;
    ggml_tensor * low;
};

// Of keys [d, T, heads]: the sum of those that count, of length 1 or as they are, d * heads numbers; and the products of all keys
// of length 1 with it, [T, 1, heads]. counts [T]: 1 or 0; NULL: all count.
struct Directions {
    ggml_tensor * sum;
    ggml_tensor * products;
};

struct GraphRows::Measuring {
    using T = ggml_tensor *;

    // Heads of a group that are measured together, and what is measured of them.
    struct Part {
        size_t               layer;
        const Group *        group;
        size_t               first;  // of group->heads
        std::vector<int32_t> heads;
        int32_t              rows;  // N: of the longest
        T                    votes = nullptr;
        Directions           directions{};
        T squares[2] = {}, deviation[2] = {}, energy[2] = {};  // of keys, of values
        T lengths = nullptr, high = nullptr;                   // by our own operations
    };
    // Of a layer's keys and values: sums of squares, of all and of what the filter takes.
    struct Energy {
        double all[2] = {}, high[2] = {};
    };
    // Lists of places that layers share.
    struct Places {
        int64_t slots;
        int32_t head, n_heads, rows;
        bool    filtered;
        T       list;
    };

    // For the layers of one device. own: by the operations of own.h, too. Throws std::bad_alloc.
    Measuring(const GraphRows & rows, const MeasureJob & job, const LayersOn & on, ggml_tensor * ring, bool own);

    bool  asks_votes() const { return job.looks.votes != Looks::Votes::none && job.n_window > 0; }
    bool  asks_high() const { return job.looks.gamma >= 0.0 && !of_kind.empty() && !filter.all_pass(); }
    void  plan_parts();
    size_t work_bytes(const LayerShape & s, size_t n_rows) const;
    void  make_inputs();
    void  make_part(Part & part);
    void  make_votes(Part & part, T keys);
    bool  from_ring() const { return asks_votes() && job.queries.empty(); }
    int32_t row_at(int32_t place) const { return from_ring() ? rows.queries.row_at(place) : place; }  // of the window, oldest first
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
    const LayersOn &            on;
    bool                        own;
    T                           ring;  // of the device's queries, as the prompt's graphs left them
    std::vector<int32_t>        of_kind;  // tokens that anchor and deviation are of
    GraphHighPass               filter;
    Parcel                      parcel;
    std::vector<Part>           parts;
    std::vector<Places>         lists;
    std::unique_ptr<Sketch>     sketch;
    ggml_context *              c = nullptr;
    Halves                      halves{};  // of the queries of all layers
    T mask = nullptr, weights = nullptr, counts = nullptr, own_lists[2] = {};
};

}  // namespace kvedge
