// Rows that lie on a device: what a compression asks of them. Scores and choices are the host's; rows stay where they are.

#pragma once

#include "system/pages.h"
#include "rows/rows.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace kvedge {

// What a scorer wants measured of the pending rows of a layer. Host and device measure alike but for rounding.
struct Looks {
    // Votes of the window's queries, softmax over all rows up to a query's own:
    //   mean, largest  mean over the queries; then over the query heads of a KV head the mean, or the largest
    //   faded          query r of W counts e^(-fade * (W - 1 - r)) and not for itself; sum over queries, mean over query
    //                  heads, divided by the weight of the queries behind a token, at least 1
    enum class Votes : uint8_t { none, mean, largest, faded };
    // Of which the mean direction is taken: keys of length 1, or keys as they are.
    enum class Anchor : uint8_t { none, unit, mean };

    Votes  votes       = Votes::none;
    double fade        = 0.0;
    bool   key_norms   = false;
    bool   value_norms = false;
    Anchor anchor      = Anchor::none;
    double gamma       = -1.0;   // share of low frequencies of the DCT filter (FlashCache eq. 5-10); negative: no deviation
    bool   by_kind     = false;  // anchor and deviation are of the tokens whose kind is 1, in their order; else of all
    bool   variation   = false;  // of values, with the deviation, by kind

    bool any() const { return votes != Votes::none || key_norms || value_norms || anchor != Anchor::none || gamma >= 0.0; }
};

// Of one layer's T pending tokens; what was not asked for is empty.
struct Measures {
    Bulk<float>         votes;        // [Hkv][T]
    Bulk<float>         key_squares;    // [Hkv][T] of the Euclidean lengths
    Bulk<float>         value_squares;  // [Hkv][T]
    Bulk<double>        cosines;        // [Hkv][T] of each key of length 1 (0 for a zero key) with the mean direction as it is
    std::vector<double> anchor_squares; // [Hkv] square of the mean direction's length
    Bulk<float>         deviation;      // [Hkv][T] mean square of what the high pass leaves of a key, plus that of its value; 0
                                        // for tokens of the other kind
    double              high = 0.0;     // share of the keys' energy that the high pass leaves, plus that of the values'; 0 where by_kind
    std::vector<double> variation;      // [Hkv] mean over the kind's tokens of the root of the values' part of deviation

    bool empty() const {
        return votes.empty() && key_squares.empty() && value_squares.empty() && cosines.empty() && deviation.empty();
    }
};

inline double mean_root(const std::vector<float> & squares) {
    double sum = 0.0;
    for (float square : squares) {
        sum += std::sqrt((double) square);
    }
    return squares.empty() ? 0.0 : sum / (double) squares.size();
}

// One measurement of all layers.
struct MeasureJob {
    Looks   looks;
    int32_t n_tokens;                   // T: the last rows of every head
    int32_t n_window = 0;               // W
    const uint8_t * kind = nullptr;     // [T] 0 or 1, where looks.by_kind
    // [layer][W][H][d_k] scaled as for the logits; empty where there are no votes, or where devices have them (keeps_window)
    std::vector<Bulk<float>>   queries;
    std::vector<const float *> sinks;   // [layer] -> [H] logits of attention sinks, or NULL
};

// How evicted rows join kept ones; primitives/merge.h says by which formula.
struct MergeRule;

// Which rows of every layer stay.
struct TakeJob {
    const std::vector<std::vector<std::vector<int32_t>>> & kept;  // [layer][head] pending rows that stay, ascending, from 0
    int32_t           n_tokens;           // T
    const MergeRule * rule    = nullptr;  // NULL: evicted rows are dropped
    Storage           storage = {};       // of the rows that stay
    bool              dropping = false;   // a decode policy will take rows out one by one
    // [layer][head] biases of the T pending rows, and of those that stay; empty where there are none. out is filled in
    // where the rule gives masses.
    const std::vector<std::vector<std::vector<float>>> * biases = nullptr;
    std::vector<std::vector<std::vector<float>>> *       out    = nullptr;
};

// What went over the bus for one compression, and where its time went.
struct DeviceWork {
    uint64_t to_host = 0, to_device = 0;  // bytes
    int64_t  operations = 0;              // of all graphs
    int64_t  measure_us = 0, choose_us = 0, gather_us = 0, merge_us = 0, upload_us = 0;
};

// The rows of a sequence's layers on devices.
class AwayRows {
  public:
    enum class Outcome { done, lacking, full, failed };

    virtual ~AwayRows() = default;
    virtual bool holds(size_t layer) const = 0;
    // Whether the queries of the last n > 0 tokens lie on the devices, as the prompt's graphs left them.
    virtual bool keeps_window(int32_t n) const = 0;

    // out [layer], of those that are held. But for `done` nothing has changed. Throws std::bad_alloc.
    virtual Outcome measure(const MeasureJob & job, std::vector<Measures> & out) = 0;
    // Replaces the rows of all layers that are held, one layer after the other: those before the pending ones, and of these the
    // kept ones. lacking, full: nothing has changed; failed: a device failed half-way, and rows are lost.
    virtual Outcome take(const TakeJob & job) = 0;

    const std::string & problem() const { return problem_; }  // device and operation, for a message
    DeviceWork          work;

  protected:
    std::string problem_;
};

}  // namespace kvedge
