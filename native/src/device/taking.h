// A compression of rows where they lie: what take.cpp and merging.cpp share.

#pragma once

#include "device/graph_rows.h"
#include "device/parcel.h"
#include "primitives/merge.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvedge {

// Where evicted rows go, and the sums that they make on the device.
struct GraphRows::Merging {
    template <class X> struct Part {  // of `room`
        X *    first = nullptr;
        size_t n     = 0;

        X *       data() { return first; }
        const X * data() const { return first; }
        X *       begin() const { return first; }
        X *       end() const { return first + n; }
        size_t    size() const { return n; }
        X &       operator[](size_t i) const { return first[i]; }
    };
    // Of one head.
    struct Joined {
        Part<int32_t> target;       // as in Joins
        Part<float>   share, self;
    };
    // Sums of a few rows each, the same number for all: row r of sum i is row index[r * n + i] of the source, times its factor.
    struct Level {
        int32_t              n = 0;
        std::vector<int32_t> index;
        std::vector<float>   factor;
        std::vector<int64_t> ready;  // rows of the new tensor that the first sums are; the others are the next level's source
    };
    using Piece = std::vector<Level>;  // of the sums that exist at a time; the first level reads the layer's old rows

    explicit Merging(Taking & of) : of(of) {}

    Outcome search();            // what joins what, and the biases of the rows that stay
    void    plan();    // the sums, where `next` is laid out
    size_t  nodes(size_t layer) const;
    void    add_up(size_t layer, Parcel & parcel, Sketch & sketch) const;  // this must outlive the parcel

  private:
    struct Hunt;
    struct Found;
    struct Search;
    struct Sums;
    // Of a group's heads, how many sums and how many members lie before each, and all.
    struct Lists {
        std::vector<size_t> sums = { 0 }, members = { 0 };

        size_t n() const { return sums.back(); }
        size_t size() const { return 2 * (n() + 1 + members.back()); }  // numbers
    };

    Outcome search_some(std::vector<Hunt> & hunts);
    void    compare(const Hunt & hunt, ggml_tensor * less, const Found & found, Parcel & lists, Sketch & sketch) const;
    void    write_kept(const Hunt & hunt, size_t head, int32_t * to) const;
    bool    has_own_search(size_t layer) const;  // the device has OWN_NEAREST (nearest.cpp)
    Outcome search_own(const std::vector<size_t> & layers);
    void    read_own(const Search & search, size_t head, const Parcel & results);
    void    make_room();
    void    weigh(size_t layer, size_t head);  // where targets and similarities are known
    void    write_evicted(const Hunt & hunt, size_t head, int32_t * to) const;
    void    decide(const Hunt & hunt, size_t head, const int32_t * target, const float * values);
    Lists   count(size_t layer, const Group & group) const;
    void    write_lists(size_t layer, const Group & group, const Lists & lists, size_t head, int32_t * all) const;
    bool    has_own(size_t layer) const;  // the device has OWN_JOINS
    void    add_up_own(size_t layer, Parcel & parcel, Sketch & sketch) const;
    void    divide(size_t layer);  // makes pieces
    void    add_up_pieces(size_t layer, Parcel & parcel, Sketch & sketch) const;
    static Piece         piece_of(const Sums & sums, const std::vector<size_t> & all, size_t from, size_t to);
    template <class F> void each_head(const std::vector<Hunt> & hunts, const F & visit) const;

    Taking &                                     of;
    Pages                                        room;    // of all heads: in large pages, where the system has them
    std::vector<std::vector<Joined>>             joined;  // [layer][head]
    std::vector<std::vector<Lists>>              lists;   // [layer][group of the new layout]
    std::vector<std::vector<std::vector<Piece>>> pieces;  // likewise; none of a layer that has OWN_JOINS
};

struct GraphRows::Taking {
    // Layers of one device whose new rows get memory at once.
    struct Bundle {
        std::vector<size_t>              layers;
        std::shared_ptr<Tensors>         held;
        std::unique_ptr<Parcel>          parcel;  // where rows come from, and how they are merged
        std::unique_ptr<Sketch>          gather, merge;
    };

    Taking(GraphRows & rows, const TakeJob & job);

    Outcome prepare_all();  // but for `done` no row has changed
    Outcome replace_all();  // done or failed

    // For the layers of one device, of which `layer` is one.
    Outcome prepare(size_t layer, Sketch & sketch);  // room for its results
    Outcome compute(size_t layer, Sketch & sketch);
    Outcome problem(Outcome outcome, size_t layer, const std::string & what);
    void    upload(Parcel & parcel);
    void    download(const ggml_tensor * from, void * to);
    const std::vector<float> * pending_biases(size_t layer, size_t head) const;  // NULL: there are none
    size_t  work_bytes(size_t layer) const;  // that a large result may take

    // A layer's keys or values, one list after the other: [d, rows]; once rows are to move within their buffers, copies of the
    // pending ones.
    ggml_tensor * flat(ggml_context * context, size_t layer, bool keys) const;
    size_t        flat_nodes(size_t layer) const { return 4 * from.layers[layer].groups.size(); }
    size_t        n_old(size_t layer, size_t head) const;

    GraphRows &     rows;
    Slots &         from;  // where they lie, and where those that stay are going to
    Slots           next;
    const TakeJob & job;
    bool            biased = false;  // whether any row will have a bias
    std::vector<std::vector<std::vector<int32_t>>> places;   // [layer][head] of its rows in flat(); of layers on devices
    std::vector<std::vector<std::vector<float>>>   stay;     // [layer][head] biases of the pending rows that stay
    Merging                                        merging;

  private:
    std::vector<float> biases_of(size_t layer, int32_t head) const;

    void    lay_out_sources();
    bool    may_stay(bool even) const;
    void    lay_out_here();
    Outcome lay_out_next();
    void    make_bundles();
    void    move_pending(size_t layer, Bundle & bundle);
    void    write_list(size_t layer, const Group & group, int32_t * list) const;
    void    sketch(Bundle & bundle);
    Outcome check();
    Outcome open(Bundle & bundle);
    Outcome open_some(size_t bundle);
    Outcome finish(Bundle & bundle);

    std::vector<Bundle>               bundles;
    bool                              here = false;  // the rows before the pending ones stay where they are
    std::vector<std::vector<int32_t>> lifted;        // [layer] places of the pending rows in flat(), where they are to move
    std::vector<std::array<ggml_tensor *, 2>> copies;  // [layer] of these: keys, values
};

// visit(i, t) for the i-th pending row that is not kept, which is row t.
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

// Adds the time of a scope.
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
