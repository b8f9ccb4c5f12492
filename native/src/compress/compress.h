#pragma once

#include "plan/plan.h"
#include "sequence/sequence.h"

#include <functional>
#include <memory>
#include <vector>

namespace kvedge {

// Of the tokens [first, last) of a sequence a head keeps `most` rows at most.
struct TokenLimit {
    int32_t first, last, most;
};

struct Compression {
    bool     reduced      = false;  // false: nothing to drop
    uint64_t before_bytes = 0;      // Store::bytes() before and after
    uint64_t after_bytes  = 0;
    uint64_t peak_bytes   = 0;      // largest bytes + index_bytes + score_bytes meanwhile
    int64_t  us           = 0;
    int32_t  n_unfitted   = 0;  // heads with more rows to fit than queries, and with fewer than twice as many
    int32_t  n_scant      = 0;

    // Rows of layers on devices, which compress them; NULL: all rows are the store's. What a device cannot do is
    // KVEDGE_E_UNSUPPORTED, and nothing has changed; where one failed half-way, KVEDGE_E_STATE, and rows are `lost`.
    AwayRows * away      = nullptr;
    bool       lost      = false;
    int64_t    choose_us = 0;  // of scores, budgets and the choice

    const std::vector<TokenLimit> * limits = nullptr;  // beyond the plan's; NULL: none

    // Whether the rows that stay go to a sequence of their own, `beside`, and the one that is compressed stays as it is.
    bool                      keep = false;
    std::unique_ptr<Sequence> beside;

    // [layer][Hkv * T], filled if wanted.
    bool   want_scores = false;
    Scores scores;
};

// The plan by which the sequence's pending tokens, and n_more that are to come, are compressed (plan_after).
kvedge_plan compression_plan(const Sequence & seq, const kvedge_plan & plan, int32_t n_more);

// Compresses the sequence's pending tokens by the plan: score, allocate, select, reduce, layer by layer, each layer's
// old memory going back before the next layer's turn. On failure, and with outcome.keep, the sequence is as it was.
// Errors: KVEDGE_E_STATE (scores are missing, or it is a stream), KVEDGE_E_MEMORY.
kvedge_status compress_pending(
    Sequence & seq, const kvedge_plan & plan, int32_t n_threads, Compression & outcome, kvedge_error * err);

// What every compression is run in: its time, the bytes before and after, and errors instead of exceptions.
kvedge_status measured(
    const Sequence & seq, Compression & outcome, kvedge_error * err, const std::function<kvedge_status()> & compress);

// Whether a batch that was stopped left something half done of what is wanted.
bool half_seen(const Sequence & seq, const Observation & wanted);
// Whether all that is wanted was gathered of the pending tokens.
bool saw_all(const Sequence & seq, const Observation & wanted);

// Queries of the last tokens that the scorer looks at; 0: none.
int32_t window_length(const Sequence & seq);

// The member or rule of a plan that reads rows, so that they must be on the host; NULL: measures and merges are all it asks for.
const char * reads_rows(const kvedge_plan & plan);

kvedge_status fail_unobserved(const Sequence & seq, const kvedge_plan & plan, kvedge_error * err);  // KVEDGE_E_STATE

// Scores [Hkv * T] of one layer's pending tokens, as compress_pending would make them. Errors: KVEDGE_E_STATE, KVEDGE_E_MEMORY.
kvedge_status score_pending(
    const Sequence & seq, const kvedge_plan & plan, int32_t layer, Bulk<float> & scores, kvedge_error * err);

}  // namespace kvedge
