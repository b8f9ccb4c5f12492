// Holds what a prompt's attention showed while the prompt was read (observation.h). Row 0 is the first pending row.

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

constexpr float KEPT_FIRST = 2.0f;  // larger than any attention: marks rows that are kept before all others

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

// The largest attention that each pending token of one layer received from a query.
struct Peaks {
    Bulk<float> highest;  // [Hkv][each][capacity]
    int32_t     capacity = 0;
    int32_t     each     = 1;  // numbers per KV head: 1, or one for each of its query heads
};

// The last queries of one layer, in a ring: the query of token i lies in slot i % capacity.
struct QueryWindow {
    Bulk<float>        q;        // [capacity][H][d_k], multiplied by the scale of the logits
    size_t             row = 0;  // H * d_k
    std::vector<float> sinks;    // [H], or empty

    size_t  slot_of(int32_t token) const { return (size_t) token % (q.size() / row) * row; }
    float * slot(int32_t token) { return q.data() + slot_of(token); }  // [H][d_k] of a token
    // Returns the queries of the last n tokens before `next`, in order, [n][H][d_k].
    Bulk<float> last(int32_t next, int32_t n) const;
};

// Returns the bytes of one layer's queries of n tokens (QuerySpan).
inline size_t query_bytes(const LayerShape & shape, int32_t n) {
    return (size_t) n * (size_t) shape.n_heads * (row_k(shape, Type::f16) + SEEN_BYTES);
}

// All queries of the pending prompt, of every layer. They stay until the prompt is compressed.
class KeptQueries {
  public:
    // Makes room for the queries of the tokens [next, next + n), in every layer. Returns false if there is no memory.
    bool                   make_room(const std::vector<LayerShape> & shapes, int32_t next, int32_t n);
    std::vector<QuerySpan> of(size_t layer) const;
    QuerySpan              newest(size_t layer) const { return span(layer, spans_.size() - 1); }
    void                   give_back(size_t layer);  // frees the queries of a compressed layer
    // Keeps only queries of the tokens in `pending`, which is ascending, and below n_tokens.
    void     forget(const std::vector<int32_t> & pending, int32_t n_tokens);
    uint64_t bytes() const;

    // Writes the queries, and reads those of a sequence of n_tokens back into an empty object. read: returns false if the
    // bytes are damaged. Throws std::bad_alloc.
    void write(const std::vector<LayerShape> & shapes, Sink & out) const;
    bool read(const std::vector<LayerShape> & shapes, int32_t n_tokens, Reader & in);

  private:
    // Consecutive tokens whose queries lie in one piece of memory.
    struct Span {
        int32_t            first, n;  // index of the first token, number of tokens
        int32_t            room;      // number of tokens that the memory has room for
        std::vector<Pages> pages;     // [layer]
    };

    QuerySpan span(size_t layer, size_t i) const {
        return { spans_[i].first, spans_[i].n, spans_[i].room, (uint8_t *) spans_[i].pages[layer].data() };
    }

    std::vector<Span> spans_;
};

// What was gathered in one layer.
struct LayerSeen {
    Columns             columns;
    std::vector<double> entropy;  // [Hkv] sum over query heads and queries
    QueryWindow         window;
    QueryMoments        moments;
    Peaks               peaks;

    // Makes room for n_rows pending rows. Throws std::bad_alloc; then what was gathered is unchanged.
    void     make_room(const Observation & wanted, const LayerShape & shape, int32_t n_rows);
    uint64_t bytes() const;
};

// Returns the bytes that an observation needs in one layer, for a prompt of n_tokens.
uint64_t observed_bytes(const Observation & wanted, const LayerShape & layer, int32_t n_tokens);

// first: the first observed token; every later token is observed too; -1: no token is. stopped: a batch was stopped half-way; sums hold
// a part of the batch, and windows may lack queries from this token on; -1: no batch was stopped.
struct Extent {
    int32_t first = -1, stopped = -1;
};

class Observed {
  public:
    static constexpr size_t ALL = SIZE_MAX;

    explicit Observed(const std::vector<LayerShape> & shapes) : shapes_(&shapes) {}

    // Makes room in one layer for what is wanted of n_rows pending rows, except for `queries`. next: the next token. What was
    // gathered stays. Returns false if there is no memory.
    bool make_room(const Observation & wanted, size_t layer, int32_t next, int32_t n_rows);
    bool make_query_room(int32_t next, int32_t n);  // KeptQueries::make_room

    // Counts the queries that see each token when the last n of n_rows pending tokens attend, and the entropies. modality
    // [n_rows]: 1 for an image token; empty if queries are not kept.
    void count(int32_t n_rows, int32_t n, bool causal, std::vector<uint8_t> modality);

    const Observation & have() const { return have_; }  // what has room
    const LayerSeen &   layer(size_t l) const { return layers_[l]; }
    LayerSeen &         layer(size_t l) { return layers_[l]; }
    void                drop_sums();
    void                drop_peaks();
    void                keep_first(int32_t n);  // sets the peaks of the first n rows to KEPT_FIRST

    // [capacity of columns] number of queries that saw each pending token; empty if no column needs it.
    const std::vector<int32_t> & seen() const { return seen_; }
    int32_t                      n_entropies() const { return n_entropies_; }  // number of queries whose entropy was added
    const std::vector<uint8_t> & modality() const { return modality_; }

    int32_t window_from() const { return window_from_; }
    void    skip_windows(int32_t next) { window_from_ = next; }  // windows have no query before that token

    // Notes that a batch was stopped half-way.
    void stop() { extent.stopped = extent.stopped < 0 ? window_from_ : std::min(extent.stopped, window_from_); }

    // How rows of each layer are turned by their positions. NULL: no layer's rows are.
    const Rotation & rotation(size_t layer) const;
    void             set_rotations(std::shared_ptr<const Rotations> rotations) { rotations_ = std::move(rotations); }

    // Removes the rows [first, first + n) except those in `keep`, which counts from `first`; of every head, or of one head.
    void remove_rows(size_t first, size_t n, const std::vector<int32_t> & keep);
    void remove_head_rows(size_t layer, size_t head, size_t first, size_t n, const std::vector<int32_t> & keep);
    // Puts n pending rows before the others; nothing is known about them. Throws std::bad_alloc; then nothing has changed.
    void shift_rows(size_t n);

    void     drop();  // drops everything except `missing`
    void     drop_layer(size_t layer);
    uint64_t bytes() const;

    // Writes everything except the rotations, and reads what belongs to a sequence of n_tokens into an empty object. read:
    // returns false if the bytes are damaged. Throws std::bad_alloc.
    void write(Sink & out) const;
    bool read(int32_t n_tokens, Reader & in);

    Missing     missing;  // pending prompt tokens for which a quantity was not gathered
    Extent      extent;
    KeptQueries queries;

  private:
    const std::vector<LayerShape> * shapes_;
    std::vector<LayerSeen>          layers_;  // [layer], or empty: nothing is gathered
    Observation                     have_;    // what has room
    std::vector<int32_t>            seen_;
    int32_t                         n_entropies_ = 0;
    std::vector<uint8_t>            modality_;         // [pending token] 1 for an image token; empty if queries are not kept
    int32_t                         window_from_ = 0;  // windows have all queries from this token on

    std::shared_ptr<const Rotations> rotations_;
};

}  // namespace kvedge
