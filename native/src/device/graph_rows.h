// The rows of one sequence in buffers of their layers' devices, through ggml: a GPU, another machine, or the CPU; and the
// attention over them in ggml's operations. The store keeps all it knows of them meanwhile, but their memory.
//
// While all heads of all layers have as many rows they are even: one tensor of keys and one of values for a layer, every head
// with its rows in the first of its slots, in token order, and one mask for all layers. Else, and where rows have biases, masks
// hold the biases. Then the heads of a layer have their rows in one list of slots, where the device has attention over heads of
// different lengths each in a region of it (graph/ragged.cpp), or else each query with a mask of its own over all of it, where
// the device reads a row once for many queries; elsewhere heads of similar length share a group, each with slots and a mask. Where
// a decode policy drops rows, the next one takes the slot. Several tokens attend to copies of the rows (graph/several.cpp).

#pragma once

#include "plan/away.h"
#include "device/tensors.h"
#include "rows/rows.h"
#include "store/store.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvedge {

// One layer, while a graph is built: tokens of this sequence only, position encoding applied.
struct GraphLayer {
    ggml_context * ctx;
    ggml_tensor *  q;  // [d_k, H, n]
    ggml_tensor *  k;  // [d_k, Hkv, n]
    ggml_tensor *  v;  // [d_v, Hkv, n]
    ggml_tensor *  sinks;  // [H] or NULL
    float          scale, softcap;
};

// softmax(mask + scale * q k^T) of q [d, n, H, ...] and k [d, slots, Hkv, ...]: [slots, n, H, ...] f32. softcap 0: none.
ggml_tensor * attention_weights(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * mask, float scale, float softcap);

// The attention itself: flash attention where the device has it. q [d_k, n, heads, groups], k and v [d, rows, KV heads, groups],
// mask [rows, n, 1, groups] f16. The result is [d_v, heads, n, groups].
ggml_tensor * attention_over(const GraphLayer & in, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask,
                             ggml_backend_dev_t device);

// ggml's type of plain or quantised rows; GGML_TYPE_COUNT: it has none.
ggml_type ggml_type_of(Type type);

// Whether a device has flash attention of heads of these sizes.
bool has_flash_size(ggml_backend_dev_t device, int64_t d_k, int64_t d_v);

// Whether an attention kernel there reads a row once for many queries, or passes over masked ones. Else heads that lie in one
// list would read each other's rows.
bool reads_once(ggml_backend_dev_t device);

// Whether a device has attention over heads of different lengths, of rows of these types. A CUDA module of another build has none.
bool has_ragged(ggml_backend_dev_t device, const LayerShape & shape, const Storage & storage);

// Whether it has the operations with which several tokens attend over heads of different lengths.
bool reads_several(ggml_backend_dev_t device);

// Whether several threads may copy from and to it at a time.
bool copies_at_once(ggml_backend_dev_t device);

// Nodes of a graph that add up a piece of a layer's attention, at most.
int32_t summing_nodes(const LayerShape & shape);

// What is added up of a prompt's attention.
struct Summed {
    bool columns = false, squares = false, entropy = false;

    bool any() const { return columns || squares || entropy; }
    bool operator==(const Summed & x) const { return columns == x.columns && squares == x.squares && entropy == x.entropy; }
};

// Tokens that are about to be read.
struct Incoming {
    int32_t n;       // in the next graph
    int32_t follow;  // in this one and those after it: slots are made for all of them
    int32_t window;  // last queries that are kept
    Summed  summed;
    int32_t pending;  // rows of every head that are pending already
    int32_t parts;    // pieces in which a layer's attention may be added up
};

// Sums over queries of one layer; empty where they are not wanted.
struct AttentionSums {
    std::vector<float> columns;  // [Hkv][rows] of the attention of all query heads
    std::vector<float> squares;  // [Hkv][rows] of the squares of the query heads' sum
    std::vector<float> entropy;  // [Hkv] of the entropies of all query heads, over all rows
};

// What graphs have left of a prompt on the devices. [layer], empty for layers that lie on none.
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

class GraphRows : public AwayRows {
  public:
    // How rows lie on devices: those of the store are converted where their types differ. dropping: single ones may go.
    struct Form {
        Storage storage;
        bool    dropping;

        bool operator==(const Form & x) const { return storage.k == x.storage.k && storage.v == x.storage.v && dropping == x.dropping; }
    };

    // devices [layers]: NULL for a layer whose rows stay with the store. stamps counts the tensors of a cache that were made.
    GraphRows(const std::vector<LayerShape> & shapes, const std::vector<ggml_backend_dev_t> & devices, const Form & form,
              uint64_t & stamps);

    // Whether a device attends to rows of these types: quantised ones take flash attention, keys and values of the same type.
    static bool  holds(const Storage & storage, int64_t d_k, int64_t d_v, ggml_backend_dev_t device);
    const Form & form() const { return form_; }

    // The rows of `from` go to the devices, and its memory is given back. False: a device has no memory (full_device), and
    // nothing has changed. Throws std::bad_alloc.
    bool load(Store & from, int32_t n_threads);
    // And back; what is on the devices is freed. False: no memory, and nothing has changed.
    bool fetch(Store & to, int32_t n_threads);

    // Whether more tokens can be entered while the graph of the last ones runs: there is room for all that reserve() makes.
    bool may_follow(const Incoming & incoming) const;
    // Whether what graphs have left so far stays when room is made for them. Else it is to be read before.
    bool keeps_queries(const Incoming & incoming) const { return incoming.window == 0 || incoming.window == ring_.window; }
    bool keeps_sums(const Incoming & incoming) const;
    // Room and inputs for more tokens, for the queries that are kept, and to add up their attention. False: a device has no
    // memory, and nothing has changed that matters. Throws std::bad_alloc.
    bool reserve(const Incoming & incoming, int32_t n_threads);
    // Enters them, where there is room; the graph that follows writes their rows. No other graph than that of the tokens
    // entered last may run, and that one only where may_follow().
    void enter(int32_t n, bool causal);

    // Quantised rows become plain ones, as those of a prompt are. False: a device lacks an operation of that, or memory; rows can
    // be fetched and nothing else. Throws std::bad_alloc.
    bool make_plain(int32_t n_threads);

    // Takes out a row of a head, in token order; nothing where the layer lies on no device.
    void drop(size_t layer, int32_t head, int32_t row);

    // Attention of the tokens entered last: [d_v * H, n].
    ggml_tensor * attend(const GraphLayer & in, size_t layer);

    // Two graphs are the same where this is.
    using Signature = std::array<uint64_t, 4>;
    Signature signature() const { return { stamp_, (uint64_t) n_, (uint64_t) visible(), turn_ }; }

    // What graphs have left since it was read last, when none runs (graph/seen.cpp); it is gone from the devices then. They
    // throw std::bad_alloc, and nothing has changed.
    bool        left_queries() const { return ring_.last > 0; }
    LastQueries read_queries();
    bool        left_sums() const { return sums_.any; }
    PromptSums  read_sums();

    bool    holds(size_t layer) const override { return layers_[layer].device != nullptr; }
    bool    keeps_window(int32_t n) const override;
    void    drop_queries() { forget_ring(); }  // what left_queries() tells of
    Outcome measure(const MeasureJob & job, std::vector<Measures> & out) override;  // graph/measure.cpp
    Outcome take(const TakeJob & job) override;                                     // graph/take.cpp

    // Whether all heads of the layers on devices hold as many rows, none of them with a bias: those that are there, or those of a store.
    bool        even() const { return even_; }
    static bool holds_even(const Store & store, const std::vector<ggml_backend_dev_t> & devices);
    uint64_t            bytes() const;                                // of keys and values, and what goes with them
    const std::string & full_device() const { return full_device_; }  // the one that had no memory

  private:
    // Heads of a group, one after the other, whose rows are laid side by side while several tokens attend to them.
    struct Part {
        size_t  first, heads;
        int32_t columns;  // of each head: the new rows, its older ones, and padding
        size_t  at;       // of its first column among those of its device
    };
    // The tensors of a group, which may share a buffer with those of other layers.
    struct Room {
        std::shared_ptr<Tensors> held;
        ggml_tensor *            k    = nullptr;  // [d_k, slots, lists]
        ggml_tensor *            v    = nullptr;  // [d_v, slots, lists]
        // [slots, queries, heads] f16, where heads are uneven: a row's bias, or -inf; with regions [slots], or NULL: all 0
        ggml_tensor *            mask = nullptr;
        ggml_tensor *            pick = nullptr;  // [heads] i32, where they are not all, in their own order
        int32_t                  slots = 0;       // of each list
    };
    static constexpr size_t ROOM_TENSORS = 4;
    struct Group : Room {
        int32_t              together = 1;  // so many heads have their rows in one list of slots: one, or all of the layer
        std::vector<int32_t> heads, first;  // first[i]: slot of the first row with which heads[i] came
        // each head of a shared list has a region of it: a slice of slots, its rows in the first ones
        bool                 regions = false;
        std::vector<int32_t> used;  // used[i]: first slots of list i, or with regions slots before the end of head i's rows, that
                                    // have or had a row
        // where rows are dropped or lists are shared: the slots of each head's rows, in token order, and those that are free again
        bool                              ordered = false;
        std::vector<std::vector<int32_t>> order, spare;
        std::vector<std::vector<float>>   biases;       // of the rows with which each head came; empty: all 0
        int32_t                           queries = 1;  // of each head that have a mask of their own

        int32_t most_used() const { return *std::max_element(used.begin(), used.end()); }
        size_t  list(size_t head) const { return head / (size_t) together; }
        size_t  lists() const { return heads.size() / (size_t) together; }
        int32_t & used_of(size_t head) { return used[regions ? head : list(head)]; }
        std::vector<int32_t> starts(int32_t room) const;  // of regions with room for more rows of each head, and their end
        void                 move_to(const std::vector<int32_t> & starts);
        int32_t              spread();  // one head's rows right after the other's become regions; returns their end
        int32_t take_slot(size_t head);
        size_t               entry = 0, span = 0;  // of its first head in the index input of its device, and among the spans
        std::vector<Part>    parts;           // while several tokens are read
        bool                 stale = false;   // the mask does not show all rows yet
    };
    struct Layer {
        ggml_backend_dev_t device = nullptr;
        std::vector<Group> groups;
        Tensors            order;
        ggml_tensor *      joined = nullptr;  // [Hkv] i32: where each head lies, when groups follow each other; NULL: in their order
        size_t             inputs = 0;
        size_t             query_at = 0, head_at = 0;  // its place in what is seen on its device: numbers of a query, KV heads
    };
    // Of each column of all parts on a device, while several tokens are read: the place of its row, and its bias, or -inf.
    struct SideBySide {
        Tensors       held;
        ggml_tensor * places = nullptr;  // [columns] i32
        ggml_tensor * biases = nullptr;  // [columns] f16
        ggml_tensor * fresh  = nullptr;  // [most columns of a part, n] f16: which of the new rows a token sees
    };
    // For all layers of a device: what the host writes before each graph, and what graphs leave of a prompt.
    struct Inputs {
        struct Written {
            ggml_tensor * index = nullptr;  // [entries * n + window] i64: slots of the rows, then places in the window
            ggml_tensor * mask  = nullptr;  // [visible * n] f16, where heads are even
        };
        ggml_backend_dev_t     device  = nullptr;
        size_t                 entries = 0;
        int32_t                most    = 0;  // masks of a group that a token's own place is opened in
        size_t                 spanned = 0;  // heads that have spans
        int64_t                span    = 2;  // numbers of a span: first slot, rows, and of each query head one that is 0
        Tensors                held;
        std::array<Written, 2> written;          // by turns, so that one is written while the graph that reads the other runs
        ggml_tensor *          zeros = nullptr;  // [1, 1, most] f32
        ggml_tensor *          spans = nullptr;  // [span, spanned] i32, then [spanned] i64, the slots of one token's rows
        Worker                 worker;
        SideBySide             several;

        size_t        query = 0, heads = 0;  // of all layers: numbers of a token's query, KV heads
        Tensors       window;
        ggml_tensor * queries = nullptr;  // [query * window] f32, of each layer [d_k, window, H]: token i in place i % window
        Tensors       sums;
        ggml_tensor * columns = nullptr;  // [pending rows, heads] f32
        ggml_tensor * squares = nullptr;  // likewise
        ggml_tensor * entropy = nullptr;  // [1, heads] f32
        ggml_tensor * weights = nullptr;  // of a piece of a layer's attention, f32
        ggml_tensor * turned  = nullptr;  // the same, with queries first
        ggml_tensor * sum     = nullptr;  // of its columns, as many as columns at most, f32
    };
    // Queries that are kept: of how many tokens, of which those that came since they were read, and how many of these are there.
    struct Ring {
        int32_t window = 0, tokens = 0, last = 0;
    };
    // What is added up: of every head the rows from `from` on, as there is room for, and of how many queries at a time.
    struct Sums {
        Summed  what;
        bool    any  = false;  // is there already
        int32_t from = 0, rows = 0, queries = 0, parts = 1;
    };
    // A group that has no memory yet, and how many slots it is to have.
    struct Unmade {
        size_t  layer;
        Group * group;
        int32_t slots;
    };
    // n rows of a head from row `at` of a tensor on, and where they lie in the host's memory.
    struct Stretch {
        size_t  at;
        Rows    rows;
        int32_t n;
    };
    // The rows that the heads of a layer are about to hold.
    struct HeadRows {
        std::vector<int32_t>            n;       // [Hkv]
        std::vector<std::vector<float>> biases;  // [Hkv][n]; empty: no row of any layer has one
    };
    struct Measuring;  // by what rows are measured (graph/measure.cpp)
    struct Taking;     // a compression (graph/taking.h)
    struct Merging;

    // The places of a head's rows in its layer's tensors, in token order: list * slots + slot; and of which group.
    const Group & group_of(size_t layer, int32_t head, size_t & at) const;
    std::vector<int32_t> places_of(size_t layer, int32_t head) const;

    template <class F> void each_layer(int32_t n_threads, const F & copy) const;  // copy(layer, staging) for those on devices

    int32_t visible() const;  // slots that an even graph looks at
    int32_t visible_after(int32_t n) const;
    int32_t slots_shown() const;  // the most that there is memory for
    bool    refuse(ggml_backend_dev_t device);
    Room    room_for(size_t layer, const Group & group, int32_t slots, const std::shared_ptr<Tensors> & held) const;
    static void fill(const Group & group);
    bool    make_group(size_t layer, Group & group, int32_t slots, const std::vector<int32_t> & starts = {});
    bool    make_groups(const std::vector<Unmade> & groups);
    bool    lay_out(size_t layer, HeadRows && rows);
    int32_t slots_wanted(const Group & group, const Incoming & incoming) const;
    bool    rows_fit(const Incoming & incoming) const;
    bool    grow(const Incoming & incoming);
    bool    grow_regions(size_t layer, Group & group, const Incoming & incoming);
    bool    inputs_fit(const Incoming & incoming) const;
    bool    make_inputs(const Incoming & incoming);
    bool    make_ring(const Incoming & incoming);
    int32_t row_in_ring(int32_t place) const;  // which of the tokens whose queries are there, the oldest first
    void    forget_ring();
    bool    make_sums(const Incoming & incoming);
    void    forget_sums();
    struct Cut {
        int64_t heads, queries;  // KV heads of a piece of a layer's attention, and tokens
    };
    static Cut     cut_of(const LayerShape & shape, const Sums & sums);
    static int64_t piece_of(const LayerShape & shape, const Sums & sums);  // weights
    int32_t rows_before(const Incoming & incoming) const;  // the pending ones, of every head
    // what several tokens need where heads are uneven (graph/several.cpp)
    void    plan_parts(Group & group, int32_t n, size_t & columns) const;
    bool    make_several(int32_t n);
    void    forget_several();
    void    write_part(const Group & group, const Part & part, int32_t * places, ggml_fp16_t * biases) const;
    void    write_several(bool causal);
    static void write_mask(const Group & group);
    static void write_biases(const Group & group);
    void    write_spans(size_t inputs, const std::vector<int64_t> & index);
    void    write_even_mask(Inputs & inputs, int32_t before, bool causal) const;
    void    plan_inputs();
    bool    make_order(size_t layer, const std::vector<int32_t> & heads);
    Group   placed(size_t layer, HeadRows & rows, const std::vector<int32_t> & heads, int32_t together) const;
    template <class F> void each_stretch(const Store & store, size_t layer, const Group & group, bool keys, const F & visit) const;
    void put(const Store & from, size_t layer, const Group & group, bool keys, Staging & staging) const;  // to the device
    void get(const Store & to, size_t layer, const Group & group, bool keys, Staging & staging) const;    // and back

    ggml_tensor * attend_even(const GraphLayer & in, size_t layer) const;
    ggml_tensor * attend_group(const GraphLayer & in, const Layer & layer, const Group & group) const;
    ggml_tensor * attend_regions(const GraphLayer & in, const Layer & layer, const Group & group) const;
    ggml_tensor * attend_several(const GraphLayer & in, const Layer & layer) const;
    ggml_tensor * keep_queries(const GraphLayer & in, const Layer & layer) const;  // NULL: none
    ggml_tensor * add_up(const GraphLayer & in, size_t layer, ggml_tensor * k, ggml_tensor * mask) const;  // likewise
    std::string   unmeasured(const MeasureJob & job) const;
    Outcome       measure_on(Inputs & inputs, const std::vector<size_t> & layers, const MeasureJob & job, std::vector<Measures> & out);

    const std::vector<LayerShape> * shapes_;
    Form                            form_;
    uint64_t *                      stamps_;
    uint64_t                        stamp_ = 0;
    std::vector<Layer>              layers_;
    std::vector<Inputs>             inputs_;
    bool                            even_   = true;
    int32_t                         n_threads_ = 1;
    int32_t                         n_         = 0;  // tokens entered last
    uint64_t                        turn_      = 0;  // which of the inputs their graph reads
    int32_t                         room_q_ = 0, room_visible_ = 0, room_recent_ = 0;  // that the inputs have
    int32_t                         window_ = 0;  // of the next graph
    Summed                          summed_;      // likewise
    Ring                            ring_;
    Sums                            sums_;
    std::vector<float>              scales_;  // [layer] of the logits, once a graph was built
    std::string                     full_device_;
};

}  // namespace kvedge
