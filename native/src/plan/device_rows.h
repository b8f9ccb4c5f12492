// The interface of a compression to rows on a device. The host scores and chooses rows; the device measures, moves and merges them.

#pragma once

#include "system/pages.h"
#include "system/reason.h"
#include "rows/rows.h"

#include <cmath>
#include <cstdint>
#include <vector>

namespace kvedge {

// The measures that a scorer needs of a layer's pending rows. Results of host and device differ by rounding only.
struct WantedMeasures {
    // A token's vote is its attention from the last W queries; each softmax covers all rows up to the query's own row.
    //   mean, largest  mean over the queries, then the mean or the largest over the query heads of a KV head
    //   faded          query r has weight e^(-fade * (W - 1 - r)) and does not vote for its own token; sum over queries, mean over
    //                  query heads, divided by the total weight of the queries after the token (at least 1)
    enum class Votes : uint8_t { none, mean, largest, faded };
    // The keys of the mean direction. unit: keys scaled to length 1; mean: keys with their stored lengths.
    enum class Anchor : uint8_t { none, unit, mean };

    Votes  votes       = Votes::none;
    double fade        = 0.0;
    bool   key_norms   = false;
    bool   value_norms = false;
    Anchor anchor      = Anchor::none;
    double gamma       = -1.0;   // share of low frequencies of the DCT filter (FlashCache eq. 5-10); negative: no deviation
    bool   by_kind     = false;  // anchor and deviation use tokens of kind 1 only; else all tokens
    bool   variation   = false;  // Measures::variation; needs by_kind and gamma >= 0

    bool any() const { return votes != Votes::none || key_norms || value_norms || anchor != Anchor::none || gamma >= 0.0; }
};

// Measures of one layer's T pending tokens. A measure that WantedMeasures did not ask for is empty.
struct Measures {
    Bulk<float>         votes;        // [Hkv][T]
    Bulk<float>         key_squares;    // [Hkv][T] squared Euclidean lengths
    Bulk<float>         value_squares;  // [Hkv][T] squared Euclidean lengths
    Bulk<double>        cosines;        // [Hkv][T] dot product of the key at length 1 and the mean direction; 0 for a zero key
    std::vector<double> anchor_squares; // [Hkv] squared length of the mean direction
    Bulk<float>         deviation;      // [Hkv][T] mean square of the high-pass part of the key, plus that of the value; 0 for a
                                        // token of kind 0 if by_kind
    double              high = 0.0;     // high-frequency share of the keys' energy, plus that of the values; 0 if by_kind
    std::vector<double> variation;      // [Hkv] mean over tokens of kind 1 of the root of the value part of `deviation`

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

// A request to measure the pending rows of all layers.
struct MeasureJob {
    WantedMeasures wanted;
    int32_t n_tokens;                   // T: the last T rows of every head are pending
    int32_t n_window = 0;               // W: number of window queries
    const uint8_t * kind = nullptr;     // [T] 0 or 1; read if wanted.by_kind
    // [layer][W][H][d_k] window queries, scaled for the logits; empty without votes, and if the devices keep them (keeps_window)
    std::vector<Bulk<float>>   queries;
    std::vector<const float *> sinks;   // [layer] -> [H] logits of attention sinks, or NULL
};

// The rule that merges evicted rows into kept rows (primitives/merge.h).
struct MergeRule;

// A request to keep some pending rows of every layer and to drop or merge the others.
struct CompressJob {
    const std::vector<std::vector<std::vector<int32_t>>> & kept;  // [layer][head] kept pending rows, ascending; 0 is the first pending row
    int32_t           n_tokens;           // T: number of pending rows of every head
    const MergeRule * rule    = nullptr;  // NULL: evicted rows are dropped
    Storage           storage = {};       // types of the kept rows
    bool              dropping = false;   // a decode policy will drop single rows later
    // [layer][head] biases of the T pending rows (biases) and of the kept rows (out); an empty list means that all are 0.
    // compress() fills `out` if the merge rule gives masses.
    const std::vector<std::vector<std::vector<float>>> * biases = nullptr;
    std::vector<std::vector<std::vector<float>>> *       out    = nullptr;
};

// Transfers and times of one compression on devices.
struct DeviceWork {
    uint64_t to_host = 0, to_device = 0;  // bytes
    int64_t  operations = 0;              // number of operations in all graphs
    int64_t  measure_us = 0, choose_us = 0, gather_us = 0, merge_us = 0, upload_us = 0;
};

// The rows of a sequence that lie on devices.
class DeviceRows {
  public:
    // lacking: a device does not support the request; full: a device has no memory; failed: a device's operation failed.
    enum class Outcome { done, lacking, full, failed };

    virtual ~DeviceRows() = default;
    virtual bool holds(size_t layer) const = 0;
    // Returns whether the devices keep the queries of the last n > 0 tokens from the prompt's graphs.
    virtual bool keeps_window(int32_t n) const = 0;

    // Fills out [layer] for every layer on a device. Changes nothing unless it returns `done`. Throws std::bad_alloc.
    virtual Outcome measure(const MeasureJob & job, std::vector<Measures> & out) = 0;
    // Replaces the rows of every layer on a device by its old (not pending) rows and its kept pending rows.
    // lacking, full: no row changed. failed: a device failed half-way, and rows are lost.
    virtual Outcome compress(const CompressJob & job) = 0;

    const Reason & problem() const { return problem_; }  // names the device and the operation for an error message
    DeviceWork          work;

  protected:
    Reason problem_;
};

}  // namespace kvedge
