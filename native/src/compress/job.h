// One compression at work: what choose.cpp decides of the pending tokens, and write.cpp makes of their rows.

#pragma once

#include "compress/compress.h"
#include "plan/plan.h"
#include "sequence/sequence.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvedge {

// The kept query of a pending token: its span, and its place in that.
struct QueryPlace {
    size_t  span;
    int32_t at;
};

// The tokens of the pending rows, and which of them are an image's. Heads of a stream that was compressed before hold different
// ones.
struct PendingTokens {
    int32_t                           n = 0;        // T, the same for every head
    std::vector<int32_t>              tokens;       // [T] token index of each row; empty where heads hold different ones
    std::vector<uint8_t>              image;        // [T], likewise
    std::vector<std::vector<int32_t>> head_tokens;  // [layer][Hkv * T]; empty where all hold the same
    std::vector<std::vector<uint8_t>> head_image;   // likewise

    const int32_t * tokens_of(size_t l, size_t h) const {
        return head_tokens.empty() ? tokens.data() : head_tokens[l].data() + h * (size_t) n;
    }
    const uint8_t * image_of(size_t l, size_t h) const {
        return head_image.empty() ? image.data() : head_image[l].data() + h * (size_t) n;
    }
};

// The ragged blocks that replace the pending ones: rows that are stored whole, and KIVI's newest with their residual.
struct Replacement {
    std::unique_ptr<Block>   main, tail;
    std::vector<Bulk<float>> rows;  // [worker] keys and values of one head, and the reducer's scratch
    std::vector<std::vector<std::vector<Segment>>> sources;  // [layer][head] where the pending rows lie, of layers that are open
};

// Where the reducer asks for queries.
struct FitQueries {
    std::vector<QueryPlace>             places;        // those of the pending tokens that were kept
    std::vector<std::vector<QuerySpan>> spans;         // [layer] of layers that are open
    int32_t                             unfitted = 0;  // heads with more rows to fit than queries
    int32_t                             scant    = 0;  // heads with fewer than twice as many queries as rows
};

struct Job {
    Sequence &          seq;
    const kvedge_plan & plan;
    int32_t             n_threads;
    bool                scored;  // the decode policy goes on from the column sums
    PendingTokens       pending;

    Scores                                         scores, reserve, weights;  // empty where there are none
    std::vector<Measures>                          measures;  // [layer] of a device, and what is kept of those of the host
    std::vector<Spectrum>                          spectra;   // [layer]
    int32_t                                        most;      // pairs that a head can be granted
    std::vector<std::vector<int32_t>>              counts;    // [layer][head] KV pairs that the allocator grants
    std::vector<std::vector<std::vector<int32_t>>> kept;      // [layer][head] pending rows that stay

    AwayRows *  away = nullptr;  // the rows of layers on devices; NULL: the store has them all
    const std::vector<TokenLimit> * limits = nullptr;  // NULL: none
    std::unique_ptr<Sequence> beside;  // gets the rows that stay; NULL: they take the place of the pending ones
    Replacement out;
    FitQueries  fit;

    // Whether rows that stay are of another type than they were, and rounded to it.
    bool rounds() const { return seq.rows.storage().quantised() || has_whole(seq.rows); }

    // Of n pending tokens.
    Job(Sequence & seq, const kvedge_plan & plan, int32_t n_threads, bool scored, int32_t n)
        : seq(seq), plan(plan), n_threads(n_threads), scored(scored), most(n) {
        pending.n = n;
    }
};

constexpr int32_t ALL_LAYERS = -1;

// A job for all pending tokens.
Job make_job(Sequence & seq, const kvedge_plan & plan, int32_t n_threads, bool scored);

bool is_away(const Job & job, size_t layer);
// Has devices measure what the scorer looks at. False: job.away says why, and nothing has changed.
bool measure_away(Job & job);
// Scores one layer; different layers may be scored at once. Throws StageFailure.
void score_layer(Job & job, size_t layer);
void score_all(Job & job);
// Budgets of every head of one layer, or of all of them, from the scores of that layer alone or of all.
void allocate(Job & job, int32_t layer);
// Chooses the rows of a layer that stay.
void select_layer(Job & job, size_t layer);
// What the critical rule weighs the scores of a layer by, where the plan has it. Throws StageFailure.
void weigh_layer(Job & job, size_t layer, int32_t n_threads);
// Scores, budgets and choice for all layers. No row is touched yet.
void select_all(Job & job);
// The same budget for every head of a layer.
void grant_layer(Job & job, size_t layer, int32_t count);
// Every row stays that the limits allow.
void keep_layer(Job & job, size_t layer);
// What the plan's scorer makes of the pending rows of one layer, [Hkv * T].
Bulk<float> scores_of(const Sequence & seq, const kvedge_plan & plan, size_t layer);

// The new blocks, as yet without any layer.
void open_blocks(Job & job);
// Takes memory for the rows of one layer that stay, and working memory for n_workers. False: no memory.
bool open_layer(Job & job, size_t layer, bool reduces, int32_t n_workers);
// Has devices replace the rows of their layers, which are open. dropping: a decode policy will take rows out one by one.
AwayRows::Outcome take_away(Job & job, bool reduces, bool dropping);
// Fills one layer of the new blocks, with the memory that open_layer took: only a reducer of the program's own can fail.
void fill_layer(Job & job, size_t layer, bool reduces, int32_t n_threads);
// Both for all layers. open_layers: memory, false if there is none. fill_layers puts the new blocks in the place of the pending ones as well.
bool open_layers(Job & job, bool reduces);
void fill_layers(Job & job, bool reduces, Compression & outcome);

}  // namespace kvedge
