// What is gathered of the pending tokens' attention while they are read: column sums, entropies, queries, the last queries,
// mean and covariance of all of them, the largest attention that each token received. Rows are counted from the first
// pending one.

#pragma once

#include "system/pages.h"
#include "rows/rows.h"
#include "observe/moments.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvedge {

// Column sums of attention over the pending tokens, of one layer.
struct ColumnSums {
    Bulk<double> sums;     // [Hkv][capacity]
    Bulk<double> squares;  // [Hkv][capacity] of the squares of the attention, or empty
    int32_t      capacity = 0;
};

constexpr float KEPT_FIRST = 2.0f;  // above any attention: of what is kept before all else

// The largest attention that each pending token received from a query, of one layer.
struct Peaks {
    Bulk<float> highest;  // [Hkv][each][capacity]
    int32_t     capacity = 0;
    int32_t     each     = 1;  // 1, or the query heads of a KV head, apart
};

// The last queries of the prompt, of one layer, in a ring: token i of the sequence lies at slot i % capacity.
struct QueryWindow {
    Bulk<float>        q;      // [capacity][H][d_k], scaled as for the logits
    std::vector<float> sinks;  // [H], or empty
};

// Tokens of which something was not gathered; queries: of which nothing was.
struct Missing {
    int32_t sums = 0, squares = 0, entropies = 0, queries = 0, moments = 0, peaks = 0;

    void count(int32_t n) { count(false, false, false, false, false, false, n); }
    void count(bool summed, bool squared, bool weighed, bool seen, bool averaged, bool peaked, int32_t n) {
        sums += summed ? 0 : n;
        squares += squared ? 0 : n;
        entropies += weighed ? 0 : n;
        queries += seen ? 0 : n;
        moments += averaged ? 0 : n;
        peaks += peaked ? 0 : n;
    }
};

class Observed {
  public:
    explicit Observed(const std::vector<LayerShape> & shapes) : shapes_(&shapes) {}

    // Room for what is wanted. False: no memory.
    bool ensure_sums(size_t layer, int32_t n_rows, bool squares);  // column sums, and sums of squares, of n_rows pending rows
    bool ensure_entropies();  // the sum of entropies of every head
    bool ensure_queries(int32_t next, int32_t n);  // the queries of the tokens [next, next + n), of every layer
    bool ensure_window(size_t layer, int32_t next, int32_t n);  // the last n queries of a layer; `next` is the next token
    bool ensure_moments(size_t layer);  // mean and covariance of a layer's queries
    // The largest attention of n_rows pending rows; apart: of each query head. What there is already stays as it is.
    bool ensure_peaks(size_t layer, int32_t n_rows, bool apart);

    // The last n of n_rows pending tokens attend: counts who sees whom and whose entropy there is. modality [n_rows], 1 for
    // an image token, where queries are kept.
    void count(int32_t n_rows, int32_t n, bool causal, std::vector<uint8_t> modality);

    // Column sums: empty unless wanted.
    bool               has_sums() const { return !sums_.empty(); }
    const ColumnSums & sums(size_t layer) const { return sums_[layer]; }
    ColumnSums &       sums(size_t layer) { return sums_[layer]; }
    void               drop_sums() { sums_ = {}; }
    // [capacity of sums] queries that saw each pending token; empty without squares.
    const std::vector<int32_t> & seen() const { return seen_; }

    // [layer][Hkv] sum over query heads and n_entropies queries; empty unless wanted.
    const std::vector<std::vector<double>> & entropies() const { return entropies_; }
    double *                                 entropies(size_t layer) { return entropies_[layer].data(); }
    int32_t                                  n_entropies() const { return n_entropies_; }

    // All queries of the pending prompt until it is compressed, where wanted.
    bool                         has_queries() const { return !queries_.empty(); }
    std::vector<QuerySpan>       queries(size_t layer) const;
    QuerySpan                    newest_queries(size_t layer) const;
    void                         give_back_queries(size_t layer);  // of a layer that is compressed, while others are not yet
    const std::vector<uint8_t> & modality() const { return modality_; }

    // The last queries, where wanted.
    bool                has_windows() const { return !windows_.empty(); }
    const QueryWindow & window(size_t layer) const { return windows_[layer]; }
    int32_t             window_size() const { return window_size_; }
    int32_t             window_from() const { return window_from_; }
    void                skip_windows(int32_t next) { window_from_ = next; }  // queries before that token are in none
    // Where the query of a token belongs, [H][d_k]; and the layer's attention sinks [H].
    float * window_slot(size_t layer, int32_t token);
    void    note_sinks(size_t layer, const float * logits);
    // Those of the last n tokens before `next`, in order, [n][H][d_k].
    Bulk<float> last_queries(size_t layer, int32_t next, int32_t n) const;

    // Mean and covariance of the queries, where wanted.
    bool                 has_moments() const { return !moments_.empty(); }
    const QueryMoments & moments(size_t layer) const { return moments_[layer]; }
    QueryMoments &       moments(size_t layer) { return moments_[layer]; }
    const Rotation &     rotation(size_t layer) const;
    // How rows are turned by their positions, of every layer; NULL: not at all.
    void set_rotations(std::shared_ptr<const Rotations> rotations) { rotations_ = std::move(rotations); }

    // The largest attention that the pending tokens received, where wanted.
    bool          has_peaks() const { return !peaks_.empty(); }
    const Peaks & peaks(size_t layer) const { return peaks_[layer]; }
    Peaks &       peaks(size_t layer) { return peaks_[layer]; }
    void          drop_peaks() { peaks_ = {}; }
    void          keep_first(int32_t n);  // the first n rows are worth more than any attention makes them

    Missing &       missing() { return missing_; }
    const Missing & missing() const { return missing_; }

    // Of the rows [first, first + n) those in `keep` stay; of every head, or of one.
    void remove_rows(size_t first, size_t n, const std::vector<int32_t> & keep);
    void remove_head_rows(size_t layer, size_t head, size_t first, size_t n, const std::vector<int32_t> & keep);
    // Column sums of the rows `kept` move to the front, the others go.
    void keep_sums(size_t layer, size_t head, const std::vector<int32_t> & kept);
    // n more pending rows come before the others, of which nothing is known.
    void shift_rows(size_t n);
    // Keeps queries of tokens that are there: `pending` ascending, and none from n_tokens on.
    void forget_queries(const std::vector<int32_t> & pending, int32_t n_tokens);

    bool     any() const { return has_sums() || has_windows() || !entropies_.empty() || has_queries() || has_moments() || has_peaks(); }
    void     drop();  // all of it, but what is missing
    void     drop_layer(size_t layer);
    uint64_t bytes() const;

  private:
    // Consecutive tokens whose queries are kept together.
    struct Span {
        int32_t first, n;  // token index of the first, number of tokens
        int32_t room;      // that there were when its memory was laid out
    };

    void start_windows(int32_t next, int32_t n);
    void drop_span(size_t span);

    const std::vector<LayerShape> *  shapes_;
    std::vector<ColumnSums>          sums_;
    std::vector<int32_t>             seen_;
    std::vector<std::vector<double>> entropies_;
    int32_t                          n_entropies_ = 0;
    std::vector<Span>                spans_;
    std::vector<std::vector<Pages>>  queries_;   // [layer][span]
    std::vector<uint8_t>             modality_;  // per pending token, while queries are kept: 1 for an image
    std::vector<QueryWindow>         windows_;
    int32_t                          window_size_ = 0;
    int32_t                          window_from_ = 0;  // first token from which on all queries were seen
    std::vector<QueryMoments>        moments_;          // [layer] or empty
    std::vector<Peaks>               peaks_;            // [layer] or empty
    Missing                          missing_;          // of pending prompt tokens

    std::shared_ptr<const Rotations> rotations_;
};

}  // namespace kvedge
