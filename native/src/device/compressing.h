// A compression of rows on their devices: Compressing (compressing.cpp) copies the kept rows; Merging (merging.cpp, nearest.cpp, joins.cpp)
// adds evicted rows to kept rows.

#pragma once

#include "device/graph_rows.h"
#include "device/graph_transfer.h"
#include "primitives/merge.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvedge {

// Finds the kept row that each evicted row joins, and builds the graphs that add the evicted rows to the kept rows.
struct GraphRows::Merging {
    template <class X> struct Part {  // an array inside `room`
        X *    first = nullptr;
        size_t n     = 0;

        X *       data() { return first; }
        const X * data() const { return first; }
        X *       begin() const { return first; }
        X *       end() const { return first + n; }
        size_t    size() const { return n; }
        X &       operator[](size_t i) const { return first[i]; }
    };
    // The joins of one KV head, as MergeTargets in primitives/merge.h.
    struct Joined {
        Part<int32_t> target;       // [T]
        Part<float>   share, self;  // [T], [kept rows]
    };
    // n sums of FAN rows each: row r of sum i is row index[r * n + i] of the source times factor[r * n + i].
    struct Level {
        int32_t              n = 0;
        std::vector<int32_t> index;
        std::vector<float>   factor;
        std::vector<int64_t> ready;  // slots of the finished sums, which are the first sums; the next level reads the other sums
    };
    using Piece = std::vector<Level>;  // sums that are computed together; the first level reads the layer's old rows

    explicit Merging(Compressing & of) : of(of) {}

    Outcome search();            // finds targets, and computes factors and new biases
    void    plan();    // plans the sums, after Compressing::next has its layout
    size_t  nodes(size_t layer) const;  // most graph nodes of add_up
    void    add_up(size_t layer, GraphTransfer & transfer, GraphBuilder & builder) const;  // builds the sums; must outlive the transfer

  private:
    struct ProductSearch;
    struct ProductResults;
    struct NearestInputs;
    struct Sums;
    // The number of sums, and of rows in all sums (members), before each KV head of a group; the last entry is the total.
    struct Lists {
        std::vector<size_t> sums = { 0 }, members = { 0 };

        size_t n() const { return sums.back(); }
        size_t size() const { return 2 * (n() + 1 + members.back()); }  // i32 numbers of the list for OWN_JOINS
    };

    Outcome search_some(std::vector<ProductSearch> & searches);
    void    compare(const ProductSearch & search, ggml_tensor * less, const ProductResults & found, GraphTransfer & lists,
                    GraphBuilder & builder) const;
    void    write_kept(const ProductSearch & search, size_t head, int32_t * to) const;
    bool    has_own_search(size_t layer) const;  // whether OWN_NEAREST can search the layer (nearest.cpp)
    Outcome search_own(const std::vector<size_t> & layers);
    void    read_own(const NearestInputs & inputs, size_t head, const GraphTransfer & results);
    void    make_room();
    void    weigh(size_t layer, size_t head);  // computes factors and biases from targets and similarities
    void    write_evicted(const ProductSearch & search, size_t head, int32_t * to) const;
    void    decide(const ProductSearch & search, size_t head, const int32_t * target, const float * values);
    Lists   count(size_t layer, const Group & group) const;
    void    write_lists(size_t layer, const Group & group, const Lists & lists, size_t head, int32_t * all) const;
    bool    has_own(size_t layer) const;  // whether OWN_JOINS can add up the layer's rows
    void    add_up_own(size_t layer, GraphTransfer & transfer, GraphBuilder & builder) const;
    void    divide(size_t layer);  // divides a layer's sums into pieces
    void    add_up_pieces(size_t layer, GraphTransfer & transfer, GraphBuilder & builder) const;
    static Piece         piece_of(const Sums & sums, const std::vector<size_t> & all, size_t from, size_t to);
    template <class F> void each_head(const std::vector<ProductSearch> & searches, const F & visit) const;

    Compressing &                                of;
    Pages                                        room;    // memory of all of `joined`
    std::vector<std::vector<Joined>>             joined;  // [layer][head]
    std::vector<std::vector<Lists>>              lists;   // [layer][group of the new layout]
    std::vector<std::vector<std::vector<Piece>>> pieces;  // [layer][group of the new layout]; empty for a layer with OWN_JOINS
};

// One compression: the old and the new layout of the rows, and the graphs that copy rows from the old to the new layout.
struct GraphRows::Compressing {
    // Layers of one device whose new rows share one buffer and are computed together.
    struct Bundle {
        std::vector<size_t>            layers;
        std::shared_ptr<Tensors>       held;
        std::unique_ptr<GraphTransfer> transfer;  // the graphs' inputs: places of rows, and factors
        std::unique_ptr<GraphBuilder>  gather, merge;
    };

    Compressing(GraphRows & rows, const CompressJob & job);

    Outcome prepare_all();  // takes memory for the first rows. Changes no row, whatever it returns
    Outcome replace_all();  // replaces the rows of all layers. Returns done, or failed: rows are lost

    // These functions run a graph on the device of `layer`.
    Outcome prepare(size_t layer, GraphBuilder & builder);  // checks the graph's operations and makes room for its results
    Outcome compute(size_t layer, GraphBuilder & builder);
    Outcome problem(Outcome outcome, size_t layer, const char * what, const char * which = "");
    void    upload(GraphTransfer & transfer);
    void    download(const ggml_tensor * from, void * to);
    const std::vector<float> * pending_biases(size_t layer, size_t head) const;  // [T]; NULL: no pending row has a bias
    size_t  work_bytes(size_t layer) const;  // bytes that one large result of a graph may take

    // Returns a layer's keys or values [d, rows], group by group; if `in_place`, after move_pending(), the copies of the pending rows.
    ggml_tensor * flat(ggml_context * context, size_t layer, bool keys) const;
    size_t        flat_nodes(size_t layer) const { return 4 * from.layers[layer].groups.size(); }
    size_t        n_old(size_t layer, size_t head) const;

    GraphRows &     rows;
    Slots &         from;  // the layout before the compression
    Slots           next;  // the layout after the compression
    const CompressJob & job;
    bool            biased = false;  // whether any row will have a bias
    std::vector<std::vector<std::vector<int32_t>>> places;   // [layer][head] index of each row in flat(); empty: layer on no device
    std::vector<std::vector<std::vector<float>>>   stay;     // [layer][head] biases of the pending rows that are kept
    Merging                                        merging;

  private:
    std::vector<float> biases_of(size_t layer, int32_t head) const;

    void    lay_out_sources();
    bool    may_stay(bool even) const;
    void    lay_out_in_place();
    Outcome lay_out_next();
    void    make_bundles();
    void    move_pending(size_t layer, Bundle & bundle);
    void    write_list(size_t layer, const Group & group, int32_t * list) const;
    void    build_graphs(Bundle & bundle);
    Outcome check();
    Outcome open(Bundle & bundle);
    Outcome open_some(size_t bundle);
    Outcome finish(Bundle & bundle);

    std::vector<Bundle>               bundles;
    bool                              in_place = false;  // buffers stay: only pending rows move, within their buffers
    std::vector<std::vector<int32_t>> moved_places;      // [layer] places of the pending rows to copy out, if `in_place`
    std::vector<std::array<ggml_tensor *, 2>> copies;  // [layer] copies of the `moved_places` rows: keys, values
};

// Calls visit(i, t) for each evicted pending row: row t is the i-th evicted row. kept: the kept rows, ascending.
template <class F> void each_evicted(const std::vector<int32_t> & kept, int32_t n_tokens, const F & visit) {
    size_t  i = 0;
    int32_t t = 0;
    for (const int32_t next : kept) {
        for (; t < next; t++) {
            visit(i++, t);
        }
        t++;
    }
    for (; t < n_tokens; t++) {
        visit(i++, t);
    }
}

// Adds the microseconds that a scope takes to a counter.
class Timer {
  public:
    explicit Timer(int64_t & us) : us_(us), start_(std::chrono::steady_clock::now()) {}
    ~Timer() {
        us_ += std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    int64_t &                             us_;
    std::chrono::steady_clock::time_point start_;
};

}  // namespace kvedge
