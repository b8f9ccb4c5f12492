// What a plan wants gathered of a prompt's attention while it is read.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace kvedge {

// Quantities whose missing tokens are counted; the first four are in session files, in this order.
namespace quantity {
enum : size_t { sums, squares, entropy, window, moments, peaks, count };
}

struct Observation {
    bool    sums    = false;  // column sums of the attention
    bool    squares = false;  // and of its squares
    bool    entropy = false;  // entropy of its rows
    bool    queries = false;  // all queries, kept until the compression
    int32_t window  = 0;      // the last queries; 0: none
    int32_t moments = -1;     // mean and covariance of the queries of this token and all later ones; -1: not
    bool    peaks   = false;  // the largest attention that each token received from the prompt's own queries
    bool    apart   = false;  // from each query head, to be multiplied by what values add through its output projection
    bool    again   = false;  // peaks by the queries of a second pass over the prompt (kvedge_replay_begin)
    bool    within  = false;  // as shares of what the chunk of that pass is about, not of all rows

    bool attention() const { return sums || entropy || peaks; }
    bool any() const { return attention() || queries || window > 0 || moments >= 0; }
    // Whether all that is wanted is gathered, but for all queries and their entropy.
    bool has(const Observation & wanted) const {
        return (!wanted.sums || sums) && (!wanted.squares || squares) && window >= std::min(wanted.window, 1) &&
               (wanted.moments < 0 || moments >= 0) && (!wanted.any_peaks() || peaks);
    }
    bool any_peaks() const { return peaks || again; }

    // The longest prompt of which none would be left to choose from.
    int32_t whole_up_to() const { return std::max({ 0, window, moments }); }

    // What the prompt's own pass gathers, by quantity.
    std::array<bool, quantity::count> gathers() const { return { sums, squares, entropy, window > 0, moments >= 0, peaks }; }
};

// The largest attention alone, of a second pass over the prompt.
inline Observation peaks_of(const Observation & wanted) {
    Observation out;
    out.peaks = true;
    out.apart = wanted.apart;
    return out;
}

// Pending tokens of which a quantity was not gathered; window: tokens that no plan was to choose among.
struct Missing {
    std::array<int32_t, quantity::count> of{};

    // n more tokens, of which `gathered` was; watched: a plan is to choose among them.
    void count(int32_t n, const Observation & gathered = {}, bool watched = false) {
        const auto has = gathered.gathers();
        for (size_t i = 0; i < quantity::count; i++) {
            of[i] += has[i] || (i == quantity::window && watched) ? 0 : n;
        }
    }

    // Whether some of what is wanted was not gathered.
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
