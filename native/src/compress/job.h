// The working state of one compression: choose.cpp selects pending rows, write.cpp writes the kept rows.

#pragma once

#include "compress/compress.h"
#include "plan/plan.h"
#include "sequence/sequence.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvedge {

// The place of a pending token's query among the kept queries.
struct QueryPlace {
    size_t  span;  // index of the QuerySpan
    int32_t at;    // index within the span
};

// The tokens of the pending rows. The heads of a stream that was compressed before hold different tokens; else all heads hold
// the same tokens.
struct PendingTokens {
    int32_t                           n = 0;        // T: pending rows, the same number for every head
    std::vector<int32_t>              tokens;       // [T] token index of each row; empty if the heads differ
    std::vector<uint8_t>              image;        // [T] 1 for an image token; empty if the heads differ
    std::vector<std::vector<int32_t>> head_tokens;  // [layer][Hkv * T] token index of each row; empty if the heads are the same
    std::vector<std::vector<uint8_t>> head_image;   // [layer][Hkv * T] 1 for an image token; empty if the heads are the same

    const int32_t * tokens_of(size_t l, size_t h) const {
        return head_tokens.empty() ? tokens.data() : head_tokens[l].data() + h * (size_t) n;
    }
    const uint8_t * image_of(size_t l, size_t h) const {
        return head_image.empty() ? image.data() : head_image[l].data() + h * (size_t) n;
    }
};

// The ragged blocks that replace the pending blocks. main: rows of the storage type; tail: KIVI's newest rows, partly plain.
struct Replacement {
    std::unique_ptr<Block>   main, tail;
    std::vector<Bulk<float>> rows;  // [worker] keys and values of one head, then the reducer's scratch
    std::vector<std::vector<std::vector<Segment>>> sources;  // [layer][head] segments of the pending rows; filled by open_layer
};

// The queries for a reducer that fits rows to queries.
struct FitQueries {
    std::vector<QueryPlace>             places;        // the kept queries of the pending tokens
    std::vector<std::vector<QuerySpan>> spans;         // [layer] filled by open_layer
    int32_t                             unfitted = 0;  // heads that have fewer queries than rows to fit
    int32_t                             scant    = 0;  // heads that have enough queries, but fewer than two per row to fit
};

struct Job {
    Sequence &          seq;
    const kvedge_plan & plan;
    int32_t             n_threads;
    bool                scored;  // kept rows get scores for the decode policy, which start as the column sums
    PendingTokens       pending;

    Scores                                         scores, reserve, weights;  // [layer][Hkv * T] each, or empty
    std::vector<Measures>                          measures;        // [layer] measures; score_layer keeps only the votes, for the allocator
    std::vector<Spectrum>                          spectra;         // [layer]
    int32_t                                        largest_budget;  // largest budget of a head
    std::vector<std::vector<int32_t>>              counts;          // [layer][head] budgets from the allocator
    std::vector<std::vector<std::vector<int32_t>>> kept;            // [layer][head] indices of the kept pending rows, ascending

    DeviceRows * device_rows = nullptr;  // the layers on devices; NULL: all rows lie in the store
    const std::vector<TokenLimit> * limits = nullptr;  // NULL: none
    std::unique_ptr<Sequence> compressed_copy;  // receives the kept rows; NULL: the kept rows replace the pending rows
    Replacement out;
    FitQueries  fit;

    // Returns whether kept rows are rounded to another type.
    bool rounds() const { return seq.rows.storage().quantised() || has_whole(seq.rows); }

    // n: number of pending tokens.
    Job(Sequence & seq, const kvedge_plan & plan, int32_t n_threads, bool scored, int32_t n)
        : seq(seq), plan(plan), n_threads(n_threads), scored(scored), largest_budget(n) {
        pending.n = n;
    }
};

constexpr int32_t ALL_LAYERS = -1;

// Returns a job for all pending tokens.
Job make_job(Sequence & seq, const kvedge_plan & plan, int32_t n_threads, bool scored);

bool on_device(const Job & job, size_t layer);
// Lets the devices measure the rows for the scorer. False: nothing changed; job.device_rows->problem() is the reason.
bool measure_on_devices(Job & job);
// Scores one layer. Several threads may score different layers at once. Throws StageFailure.
void score_layer(Job & job, size_t layer);
void score_all(Job & job);
// Computes the budgets of every head of one layer from its scores, or of all layers (ALL_LAYERS) from all scores.
void allocate(Job & job, int32_t layer);
// Chooses the kept rows of a layer.
void select_layer(Job & job, size_t layer);
// Computes the weights of the critical rule for a layer, if the plan uses the rule. Throws StageFailure.
void weigh_layer(Job & job, size_t layer, int32_t n_threads);
// Scores, allocates and selects for all layers. Changes no row.
void select_all(Job & job);
// Sets the same budget for every head of a layer.
void grant_layer(Job & job, size_t layer, int32_t count);
// Keeps every row of a layer that the limits allow.
void keep_layer(Job & job, size_t layer);
// Returns the plan's scores [Hkv * T] for the pending rows of one layer.
Bulk<float> scores_of(const Sequence & seq, const kvedge_plan & plan, size_t layer);

// Makes the new blocks, without any rows.
void open_blocks(Job & job);
// Takes memory for the kept rows of one layer, and working memory for n_workers. False: no memory.
bool open_layer(Job & job, size_t layer, bool reduces, int32_t n_workers);
// Lets the devices replace the rows of their layers, after open_layers. dropping: a decode policy will drop single rows later.
DeviceRows::Outcome compress_on_devices(Job & job, bool reduces, bool dropping);
// Fills one layer of the new blocks. open_layer took the memory, so only a custom reducer can fail.
void fill_layer(Job & job, size_t layer, bool reduces, int32_t n_threads);
// Open and fill all layers. open_layers: false if there is no memory. fill_layers also replaces the pending blocks by the new blocks.
bool open_layers(Job & job, bool reduces);
void fill_layers(Job & job, bool reduces, Compression & outcome);

}  // namespace kvedge
