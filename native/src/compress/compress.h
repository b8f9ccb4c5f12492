#pragma once

#include "plan/plan.h"
#include "sequence/sequence.h"

#include <functional>
#include <memory>
#include <vector>

namespace kvedge {

// A limit: each head keeps at most `most` rows of the tokens [first, last).
struct TokenLimit {
    int32_t first, last, most;
};

struct Compression {
    bool     reduced      = false;  // whether rows were dropped
    uint64_t before_bytes = 0;      // bytes of rows before and after
    uint64_t after_bytes  = 0;
    uint64_t peak_bytes   = 0;      // peak of bytes + index_bytes + score_bytes
    int64_t  us           = 0;      // duration in microseconds
    int32_t  n_unfitted   = 0;  // heads that have fewer queries than rows to fit
    int32_t  n_scant      = 0;  // heads that have enough queries, but fewer than two per row to fit

    // Input: the layers on devices; NULL: all rows lie in the store. A request that a device cannot do returns
    // KVEDGE_E_UNSUPPORTED and changes nothing. If a device fails half-way, KVEDGE_E_STATE is returned and `lost` is true.
    DeviceRows * device_rows = nullptr;
    bool         lost        = false;
    int64_t      choose_us   = 0;  // microseconds for scores, budgets and selection

    const std::vector<TokenLimit> * limits = nullptr;  // input: limits in addition to the plan; NULL: none

    // keep_original (input): the kept rows go to a new sequence, `compressed_copy`, and the compressed sequence stays unchanged.
    bool                      keep_original = false;
    std::unique_ptr<Sequence> compressed_copy;

    // want_scores (input): fills scores [layer][Hkv * T].
    bool   want_scores = false;
    Scores scores;
};

// Returns the plan that compresses the sequence's pending tokens and n_more tokens after them (plan_after).
kvedge_plan compression_plan(const Sequence & seq, const kvedge_plan & plan, int32_t n_more);

// Compresses the pending tokens: scores them, allocates budgets, selects and reduces rows, and stores them layer by layer.
// Each layer's old memory is freed before the next layer. On failure, and with outcome.keep_original, the sequence does not change.
// Errors: KVEDGE_E_STATE (scores are missing, or the sequence is a stream), KVEDGE_E_MEMORY, KVEDGE_E_STAGE, KVEDGE_E_UNSUPPORTED.
kvedge_status compress_pending(
    Sequence & seq, const kvedge_plan & plan, int32_t n_threads, Compression & outcome, kvedge_error * err);

// Calls `compress`, measures its time and bytes into `outcome`, and turns StageFailure and std::bad_alloc into a status.
kvedge_status measured(
    const Sequence & seq, Compression & outcome, kvedge_error * err, const std::function<kvedge_status()> & compress);

// Returns whether a wanted quantity is incomplete, because a batch of the prompt was stopped.
bool observation_was_stopped(const Sequence & seq, const Observation & wanted);
// Returns whether every wanted quantity was gathered for all pending tokens.
bool all_observed(const Sequence & seq, const Observation & wanted);

// Returns the number of gathered window queries (of the last tokens) that a scorer can use; 0: none.
int32_t window_length(const Sequence & seq);

// Returns the name of the member or rule that reads rows, which must then lie on the host. NULL: the plan needs only DeviceRows.
const char * reads_rows(const kvedge_plan & plan);

// Fills err with the reason why quantities are missing. Always returns KVEDGE_E_STATE.
kvedge_status fail_unobserved(const Sequence & seq, const kvedge_plan & plan, kvedge_error * err);
// Computes the scores [Hkv * T] of one layer's pending tokens. Errors: KVEDGE_E_STATE, KVEDGE_E_MEMORY, KVEDGE_E_STAGE.
kvedge_status score_pending(
    Sequence & seq, const kvedge_plan & plan, int32_t layer, Bulk<float> & scores, kvedge_error * err);

}  // namespace kvedge
