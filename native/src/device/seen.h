// What graphs leave of a prompt on its devices: the queries of the last tokens, and sums of its attention. It stays there from
// graph to graph, and is fetched at once, when somebody wants to see it.

#pragma once

#include "device/attention.h"
#include "device/slots.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// Sums over queries of one layer; empty where they are not wanted.
struct AttentionSums {
    std::vector<float> columns;  // [Hkv][rows] of the attention of all query heads
    std::vector<float> squares;  // [Hkv][rows] of the squares of the query heads' sum
    std::vector<float> entropy;  // [Hkv] of the entropies of all query heads, over all rows
};

// [layer], empty for layers that lie on no device.
struct LastQueries {
    int32_t                         n = 0;   // last tokens
    std::vector<std::vector<float>> layers;  // [n][H][d_k]
    uint64_t                        fetched = 0;  // bytes
};

struct PromptSums {
    int32_t                    rows = 0;  // pending ones, from the first on
    std::vector<AttentionSums> layers;
    uint64_t                   fetched = 0;  // bytes
};

// The queries of the last tokens, in a ring: token i lies in place i % window.
class Ring {
  public:
    explicit Ring(Slots & slots) : slots_(slots) {}

    bool keeps(const Incoming & incoming) const { return incoming.window == 0 || incoming.window == window_; }
    bool make(const Incoming & incoming);  // room. False: a device has no memory. Throws std::bad_alloc
    std::vector<int64_t> enter(int32_t n);  // n more tokens: the places of those that are kept
    // The graph that writes them to places that lie in index (Inputs::Written). NULL: none are kept.
    ggml_tensor * write(const GraphLayer & in, const DeviceLayer & layer, ggml_tensor * index) const;

    bool        left() const { return last_ > 0; }  // something since it was read last
    LastQueries read();                             // when no graph runs; it is gone then. Throws std::bad_alloc
    void        forget();

    bool          holds(int32_t n) const;           // those of the last n > 0 tokens, and no others
    int32_t       window() const { return window_; }
    int32_t       row_at(int32_t place) const;      // which of the tokens whose queries are there, the oldest first
    ggml_tensor * queries(size_t device) const { return device < on_.size() ? on_[device].queries : nullptr; }  // NULL: none
    uint64_t      bytes() const;

  private:
    struct On {
        Tensors       held;
        ggml_tensor * queries = nullptr;  // [query * window] f32, of each layer [d_k, window, H]
    };
    Slots &         slots_;
    std::vector<On> on_;                                 // [device]
    int32_t         window_ = 0, kept_ = 0;  // that there is room for, and of the next graph
    int32_t         tokens_ = 0, last_ = 0;  // that came since it was read, and those of them that are there
};

// What a prompt's attention adds up to, where the layer lies (sums.cpp).
class Sums {
  public:
    explicit Sums(Slots & slots) : slots_(slots) {}

    bool keeps(const Incoming & incoming) const;  // what graphs have added up so far stays when room is made for them
    bool make(const Incoming & incoming);         // room. False: a device has no memory. Throws std::bad_alloc
    void enter() { any_ = any_ || now_.any(); }   // a graph adds that up
    // The graph that adds up a layer's attention to k [d_k, shown, Hkv], mask [shown, n]. NULL: none.
    ggml_tensor * add_up(const GraphLayer & in, size_t layer, ggml_tensor * k, ggml_tensor * mask) const;

    bool       left() const { return any_; }
    PromptSums read();  // when no graph runs; they are gone then. Throws std::bad_alloc
    void       forget();
    uint64_t   bytes() const;

  private:
    struct On {
        Tensors       held;
        ggml_tensor * columns = nullptr;  // [pending rows, heads] f32
        ggml_tensor * squares = nullptr;  // likewise
        ggml_tensor * entropy = nullptr;  // [1, heads] f32
        bool          own     = false;    // by kvedge's operation: there is an entropy, which may stay 0, and none of the following
        ggml_tensor * weights = nullptr;  // of a piece of a layer's attention, f32
        ggml_tensor * turned  = nullptr;  // the same, with queries first
        ggml_tensor * sum     = nullptr;  // of its columns, as many as columns at most, f32
    };
    struct Cut {
        int64_t heads, queries;  // KV heads of a piece of a layer's attention, and tokens
    };
    Cut     cut_of(const LayerShape & shape) const;
    int64_t piece_of(const LayerShape & shape) const;  // weights

    Slots &         slots_;
    std::vector<On> on_;  // [device]
    Summed          what_, now_;  // that there is room for, and of the next graph
    bool            any_  = false;
    int32_t         from_ = 0, rows_ = 0, queries_ = 0, parts_ = 1;  // of every head the rows from `from` on; of how many queries
};

// Where kvedge's operation adds (cuda/sums.cu): columns and squares [.., Hkv] of keys from `from` on, or NULL, and entropy [1, Hkv].
struct Added {
    ggml_tensor *columns, *squares, *entropy;
    int32_t      from;
    bool         adds_entropy;
};

// The operation itself, of k [d, shown, Hkv] and mask [shown, n].
ggml_tensor * attention_sums(const GraphLayer & in, ggml_tensor * k, ggml_tensor * mask, const Added & to);

// Whether a device has it, over keys of a type. A CUDA module of another build has none.
bool has_sums(ggml_backend_dev_t device, const LayerShape & shape, const Storage & storage);

// Nodes of a graph that add up a piece of a layer's attention, at most.
int32_t summing_nodes(const LayerShape & shape);

}  // namespace kvedge
