// What is gathered of the pending tokens' attention while they are read (observation.h). Rows are counted from the first
// pending one.

#pragma once

#include "system/pages.h"
#include "rows/rows.h"
#include "observe/moments.h"
#include "observe/observation.h"

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvedge {

class Sink;
class Reader;

constexpr float KEPT_FIRST = 2.0f;  // above any attention: of what is kept before all else

// The columns of one layer (observation.h), over its pending tokens.
struct Columns {
    std::array<Bulk<double>, column::count> of;  // [column] of [Hkv][capacity]; empty: not gathered
    int32_t                                 capacity = 0;

    Bulk<double> &       sums() { return of[column::sums]; }
    const Bulk<double> & sums() const { return of[column::sums]; }
    // Returns the columns that are gathered or wanted, with room for `to` tokens. The first token moves to place `from`; the
    // numbers of new tokens are 0. Throws std::bad_alloc.
    Columns widened(const std::array<bool, column::count> & wanted, size_t heads_kv, int32_t to, int32_t from = 0) const;
};

// The largest attention that each pending token received from a query, of one layer.
struct Peaks {
    Bulk<float> highest;  // [Hkv][each][capacity]
    int32_t     capacity = 0;
    int32_t     each     = 1;  // 1, or the query heads of a KV head, apart
};

// The last queries of the prompt, of one layer, in a ring: token i of the sequence lies at slot i % capacity.
struct QueryWindow {
    Bulk<float>        q;        // [capacity][H][d_k], scaled as for the logits
    size_t             row = 0;  // H * d_k
    std::vector<float> sinks;    // [H], or empty

    size_t  slot_of(int32_t token) const { return (size_t) token % (q.size() / row) * row; }
    float * slot(int32_t token) { return q.data() + slot_of(token); }  // where the query of a token belongs, [H][d_k]
    // Those of the last n tokens before `next`, in order, [n][H][d_k].
    Bulk<float> last(int32_t next, int32_t n) const;
};

// Bytes of the queries of n tokens, of one layer (QuerySpan).
inline size_t query_bytes(const LayerShape & shape, int32_t n) {
    return (size_t) n * (size_t) shape.n_heads * (row_k(shape, Type::f16) + SEEN_BYTES);
}

// All queries of the pending prompt, of every layer, until it is compressed.
class KeptQueries {
  public:
    // Room for the queries of the tokens [next, next + n), of every layer. False: no memory.
    bool                   make_room(const std::vector<LayerShape> & shapes, int32_t next, int32_t n);
    std::vector<QuerySpan> of(size_t layer) const;
    QuerySpan              newest(size_t layer) const { return span(layer, spans_.size() - 1); }
    void                   give_back(size_t layer);  // of a layer that is compressed, while others are not yet
    // Keeps queries of tokens that are there: `pending` ascending, and none from n_tokens on.
    void     forget(const std::vector<int32_t> & pending, int32_t n_tokens);
    uint64_t bytes() const;

    // To bytes and back. read: of a sequence of n_tokens, where there are none yet. False: damaged. Throws std::bad_alloc.
    void write(const std::vector<LayerShape> & shapes, Sink & out) const;
    bool read(const std::vector<LayerShape> & shapes, int32_t n_tokens, Reader & in);

  private:
    // Consecutive tokens whose queries are kept together.
    struct Span {
        int32_t            first, n;  // token index of the first, number of tokens
        int32_t            room;      // that there were when its memory was laid out
        std::vector<Pages> pages;     // [layer]
    };

    QuerySpan span(size_t layer, size_t i) const {
        return { spans_[i].first, spans_[i].n, spans_[i].room, (uint8_t *) spans_[i].pages[layer].data() };
    }

    std::vector<Span> spans_;
};

// All that is gathered of one layer.
struct LayerSeen {
    Columns             columns;
    std::vector<double> entropy;  // [Hkv] sum over query heads and queries
    QueryWindow         window;
    QueryMoments        moments;
    Peaks               peaks;

    // Room for n_rows pending rows. Throws std::bad_alloc; then what there was is still there.
    void     make_room(const Observation & wanted, const LayerShape & shape, int32_t n_rows);
    uint64_t bytes() const;
};

// Bytes that it takes of one layer, for a prompt of n_tokens.
uint64_t observed_bytes(const Observation & wanted, const LayerShape & layer, int32_t n_tokens);

// first: the first token of which anything is gathered, after which all other such tokens come; -1: none. stopped: since a batch was
// stopped half-way, sums hold a part of it, and windows lack queries from this token on that were there; -1: none was.
struct Extent {
    int32_t first = -1, stopped = -1;
};

class Observed {
  public:
    static constexpr size_t ALL = SIZE_MAX;

    explicit Observed(const std::vector<LayerShape> & shapes) : shapes_(&shapes) {}

    // Room of one layer for what is wanted of n_rows pending rows, but for all queries; `next` is the next token. What there
    // is already stays as it is. False: no memory.
    bool make_room(const Observation & wanted, size_t layer, int32_t next, int32_t n_rows);
    bool make_query_room(int32_t next, int32_t n);  // KeptQueries::make_room

    // The last n of n_rows pending tokens attend: counts who sees whom and whose entropy there is. modality [n_rows], 1 for
    // an image token, where queries are kept.
    void count(int32_t n_rows, int32_t n, bool causal, std::vector<uint8_t> modality);

    const Observation & have() const { return have_; }  // what there is room for
    const LayerSeen &   layer(size_t l) const { return layers_[l]; }
    LayerSeen &         layer(size_t l) { return layers_[l]; }
    void                drop_sums();
    void                drop_peaks();
    void                keep_first(int32_t n);  // peaks: the first n rows are worth more than any attention makes them

    // [capacity of sums] queries that saw each pending token; empty without squares.
    const std::vector<int32_t> & seen() const { return seen_; }
    int32_t                      n_entropies() const { return n_entropies_; }  // queries whose entropies were summed
    const std::vector<uint8_t> & modality() const { return modality_; }

    int32_t window_from() const { return window_from_; }
    void    skip_windows(int32_t next) { window_from_ = next; }  // queries before that token are in none

    // A batch was stopped half-way.
    void stop() { extent.stopped = extent.stopped < 0 ? window_from_ : std::min(extent.stopped, window_from_); }

    // How rows are turned by their positions, of every layer; NULL: not at all.
    const Rotation & rotation(size_t layer) const;
    void             set_rotations(std::shared_ptr<const Rotations> rotations) { rotations_ = std::move(rotations); }

    // Of the rows [first, first + n) those in `keep` stay, counted from `first`; of every head, or of one.
    void remove_rows(size_t first, size_t n, const std::vector<int32_t> & keep);
    void remove_head_rows(size_t layer, size_t head, size_t first, size_t n, const std::vector<int32_t> & keep);
    // n more pending rows come before the others, of which nothing is known. Throws std::bad_alloc, and nothing has changed.
    void shift_rows(size_t n);

    void     drop();  // all of it, but what is missing
    void     drop_layer(size_t layer);
    uint64_t bytes() const;

    // To bytes and back: all of it, but how rows are turned. read: of a sequence of n_tokens, of which nothing was observed yet.
    // False: damaged. Throws std::bad_alloc.
    void write(Sink & out) const;
    bool read(int32_t n_tokens, Reader & in);

    Missing     missing;  // of pending prompt tokens
    Extent      extent;
    KeptQueries queries;

  private:
    const std::vector<LayerShape> * shapes_;
    std::vector<LayerSeen>          layers_;  // empty where nothing is gathered
    Observation                     have_;    // what there is room for
    std::vector<int32_t>            seen_;
    int32_t                         n_entropies_ = 0;
    std::vector<uint8_t>            modality_;         // per pending token, while queries are kept: 1 for an image
    int32_t                         window_from_ = 0;  // first token from which on all queries were seen

    std::shared_ptr<const Rotations> rotations_;
};

}  // namespace kvedge
