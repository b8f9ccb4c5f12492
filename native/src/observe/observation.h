// What a plan wants gathered of a prompt's attention while the prompt is read.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace kvedge {

// Columns: numbers that are summed for each KV head and pending token while queries attend. A new column takes two places:
// its name here, before `count`, and the attention that sums it (add_sums in attention/prefill.cpp).
namespace column {
enum : size_t {
    sums,     // the attention, as its mean over the query heads of a KV head
    squares,  // the squares of that mean
    count
};
constexpr size_t FILED = 2;  // the first columns, which session files hold; more of them need another version of the files
constexpr size_t ON_DEVICES = 2;  // the first columns, which the graphs of devices sum; a prompt with others is read by the host
}  // namespace column

// Quantities whose missing tokens are counted: the columns, and these.
namespace quantity {
enum : size_t { entropy = column::count, window, moments, peaks, count };
}

struct Observation {
    std::array<bool, column::count> columns{};

    bool    entropy = false;  // entropy of the rows of the attention
    bool    queries = false;  // all queries, kept until the compression
    int32_t window  = 0;      // number of last queries that are kept; 0: none
    int32_t moments = -1;     // mean and covariance of the queries from this token on; -1: not gathered
    bool    peaks   = false;  // the largest attention that each token received from the prompt's own queries
    bool    apart   = false;  // peaks of each query head, which are multiplied by the norms of projected values
    bool    again   = false;  // peaks by the queries of a second pass over the prompt (kvedge_replay_begin)
    bool    within  = false;  // these peaks as shares of the rows of a chunk, not of all rows

    bool sums() const { return columns[column::sums]; }
    // A column after `sums` is divided by the number of queries that saw a token, so that number is gathered too.
    bool counts() const { return std::find(columns.begin() + 1, columns.end(), true) != columns.end(); }
    bool on_devices() const { return std::find(columns.begin() + column::ON_DEVICES, columns.end(), true) == columns.end(); }
    bool attention() const { return sums() || counts() || entropy || peaks; }
    bool any() const { return attention() || queries || window > 0 || moments >= 0; }
    // Returns whether this has what is wanted. Ignores `queries`, `entropy` and the length of the window.
    bool has(const Observation & wanted) const {
        for (size_t i = 0; i < column::count; i++) {
            if (wanted.columns[i] && !columns[i]) {
                return false;
            }
        }
        return window >= std::min(wanted.window, 1) && (wanted.moments < 0 || moments >= 0) && (!wanted.any_peaks() || peaks);
    }
    bool any_peaks() const { return peaks || again; }

    // Returns the length of the longest prompt whose tokens are all kept without a score.
    int32_t whole_up_to() const { return std::max({ 0, window, moments }); }

    // By column and quantity: whether the prompt's own pass gathers it.
    std::array<bool, quantity::count> gathers() const {
        std::array<bool, quantity::count> out{};
        std::copy(columns.begin(), columns.end(), out.begin());
        out[quantity::entropy] = entropy;
        out[quantity::window]  = window > 0;
        out[quantity::moments] = moments >= 0;
        out[quantity::peaks]   = peaks;
        return out;
    }
};

// What a second pass over the prompt gathers: peaks alone.
inline Observation peaks_of(const Observation & wanted) {
    Observation out;
    out.peaks = true;
    out.apart = wanted.apart;
    return out;
}

// By column and quantity: pending tokens for which it was not gathered. window: tokens that no plan was to choose among.
struct Missing {
    std::array<int32_t, quantity::count> of{};

    // Counts n more tokens, for which `gathered` was gathered. watched: a plan is to choose among the tokens.
    void count(int32_t n, const Observation & gathered = {}, bool watched = false) {
        const auto has = gathered.gathers();
        for (size_t i = 0; i < quantity::count; i++) {
            of[i] += has[i] || (i == quantity::window && watched) ? 0 : n;
        }
    }

    // Returns whether a wanted quantity was not gathered for every pending token.
    bool lacks(const Observation & wanted) const {
        auto wants             = wanted.gathers();
        wants[quantity::peaks] = wanted.any_peaks();
        for (size_t i = 0; i < quantity::count; i++) {
            if (wants[i] && of[i] > 0) {
                return true;
            }
        }
        return false;
    }
};

}  // namespace kvedge
