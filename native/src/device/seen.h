// What the graphs of a prompt leave on the devices for a scorer: the queries of the last tokens (Ring), and sums of attention
// (Sums). Both stay on the devices from graph to graph and are fetched to the host once, when needed.

#pragma once

#include "device/attention.h"
#include "device/slots.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// Sums over the queries of one layer, G query heads for each KV head. A sum that is not wanted is empty.
struct AttentionSums {
    std::vector<float> columns;  // [Hkv][rows] sum over queries and query heads of the attention weight w
    std::vector<float> squares;  // [Hkv][rows] sum over queries of (sum of w over the G query heads)^2
    std::vector<float> entropy;  // [Hkv] sum over queries, query heads and rows of w ln w: minus the entropies
};

// The kept queries of the last n tokens.
struct LastQueries {
    int32_t                         n = 0;   // tokens
    std::vector<std::vector<float>> layers;  // [layer] -> [n][H][d_k]; empty for a layer that lies on no device
    uint64_t                        fetched = 0;  // bytes
};

struct PromptSums {
    int32_t                    rows = 0;  // rows of every KV head, from the first pending row on
    std::vector<AttentionSums> layers;    // [layer]; empty for a layer that lies on no device
    uint64_t                   fetched = 0;  // bytes
};

// The queries of the last tokens of a prompt, in a ring buffer: token i lies in place i % window.
class Ring {
  public:
    explicit Ring(Slots & slots) : slots_(slots) {}

    bool keeps(const Incoming & incoming) const { return incoming.window == 0 || incoming.window == window_; }
    bool make(const Incoming & incoming);  // makes room. False: a device is out of memory. Throws std::bad_alloc
    std::vector<int64_t> enter(int32_t n);  // enters n tokens; returns the places of the kept queries
    // Builds the graph that writes the kept queries to the places in index (Inputs::Written). NULL: no query is kept.
    ggml_tensor * write(const GraphLayer & in, const DeviceLayer & layer, ggml_tensor * index) const;

    bool        left() const { return last_ > 0; }  // whether there are kept queries
    LastQueries read();                             // fetches the queries and forgets them. No graph may run. Throws std::bad_alloc
    void        forget();

    bool          holds(int32_t n) const;           // whether exactly the queries of the last n > 0 tokens are kept
    int32_t       window() const { return window_; }
    int32_t       row_at(int32_t place) const;      // index of the token in a place among the kept tokens, 0: oldest
    ggml_tensor * queries(size_t device) const { return device < on_.size() ? on_[device].queries : nullptr; }  // NULL: no queries
    uint64_t      bytes() const;

  private:
    struct DeviceTensors {
        Tensors       held;
        ggml_tensor * queries = nullptr;  // [query * window] f32: for each layer [d_k, window, H]
    };
    Slots &                    slots_;
    std::vector<DeviceTensors> on_;  // [device]
    int32_t         window_ = 0, kept_ = 0;  // tokens that the ring has room for; tokens that the next graph keeps (window_ or 0)
    int32_t         tokens_ = 0, last_ = 0;  // tokens entered since the last read(); tokens whose queries are in the ring
};

// Sums of a prompt's attention, computed on the device of each layer (sums.cpp).
class Sums {
  public:
    explicit Sums(Slots & slots) : slots_(slots) {}

    bool keeps(const Incoming & incoming) const;  // whether make() for these tokens keeps the sums of earlier graphs
    bool make(const Incoming & incoming);         // makes room. False: a device is out of memory. Throws std::bad_alloc
    void enter() { any_ = any_ || now_.any(); }   // notes that a graph adds to the sums
    // Builds the graph that adds up a layer's attention over k [d_k, shown, Hkv] with mask [shown, n]. NULL: no sum is wanted.
    ggml_tensor * add_up(const GraphLayer & in, size_t layer, ggml_tensor * k, ggml_tensor * mask) const;

    bool       left() const { return any_; }  // whether graphs have added to the sums
    PromptSums read();  // fetches the sums and forgets them. No graph may run. Throws std::bad_alloc
    void       forget();
    uint64_t   bytes() const;

  private:
    struct DeviceTensors {
        Tensors       held;
        ggml_tensor * columns = nullptr;  // [pending rows, KV heads] f32, as AttentionSums; NULL: not wanted
        ggml_tensor * squares = nullptr;  // [pending rows, KV heads] f32
        ggml_tensor * entropy = nullptr;  // [1, KV heads] f32
        bool          own     = false;    // OWN_SUMS is used: entropy always exists, the tensors below do not
        ggml_tensor * weights = nullptr;  // attention weights of one piece of a layer, f32
        ggml_tensor * turned  = nullptr;  // the weights transposed: queries first
        ggml_tensor * sum     = nullptr;  // column sums of one piece, f32
    };
    struct Cut {
        int64_t heads, queries;  // KV heads and tokens of one piece of a layer's attention
    };
    Cut     cut_of(const LayerShape & shape) const;
    int64_t piece_of(const LayerShape & shape) const;  // most attention weights of a piece

    Slots &         slots_;
    std::vector<DeviceTensors> on_;  // [device]
    Summed          what_, now_;  // the sums that have room; the sums that the next graph adds to
    bool            any_  = false;
    int32_t         from_ = 0, rows_ = 0, queries_ = 0, parts_ = 1;  // rows [from_, from_ + rows_) of a KV head; most tokens and pieces
};

// Result tensors of OWN_SUMS (own.h): columns and squares [.., Hkv] of keys from `from` on, or NULL, and entropy [1, Hkv], not NULL.
struct Added {
    ggml_tensor *columns, *squares, *entropy;
    int32_t      from;
    bool         adds_entropy;
};

// Builds OWN_SUMS (own.h) over k [d, shown, Hkv] with mask [shown, n]; in.q are the queries.
ggml_tensor * attention_sums(const GraphLayer & in, ggml_tensor * k, ggml_tensor * mask, const Added & to);

// Returns whether a device has OWN_SUMS for a layer's shape and storage. A CUDA backend that was built without kvedge has not.
bool has_sums(ggml_backend_dev_t device, const LayerShape & shape, const Storage & storage);

// Returns the most graph nodes that add up one piece of a layer's attention.
int32_t summing_nodes(const LayerShape & shape);

}  // namespace kvedge
