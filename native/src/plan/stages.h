// The interface of stage members. Each member has one file, named after the member, which defines one symbol: scorer_NAME,
// allocator_NAME, reducer_NAME, decode_NAME or pruner_NAME. The build lists the files (registry.cpp).

#pragma once

#include "plan/device_rows.h"
#include "system/pages.h"
#include "plan/pending.h"
#include "kvedge.h"
#include "observe/observed.h"

#include <cstdint>
#include <vector>

namespace kvedge {

using Param = kvedge_setting;

// Declarations of member settings: a number, an integer, one word of a list (by default the first), or true/false.
namespace setting {

constexpr Param number(const char * name, double fallback, double lowest, double highest, const char * help) {
    return { name, help, fallback, lowest, highest, 0, nullptr };
}

constexpr Param whole(const char * name, int32_t fallback, int32_t lowest, int32_t highest, const char * help, int32_t step = 1) {
    return { name, help, (double) fallback, (double) lowest, (double) highest, step, nullptr };
}

constexpr Param words(const char * name, const char * choices, const char * help) {
    return { name, help, 0, 0, 0, 0, choices };
}

constexpr Param flag(const char * name, bool fallback, const char * help) {
    return { name, help, fallback ? 0.0 : 1.0, 0, 0, 0, "true,false" };
}

}  // namespace setting

constexpr int32_t MAX_PARAMS = 8;
constexpr int32_t N_STAGES   = 5;  // number of kvedge_stage values

using Scores = std::vector<Bulk<float>>;  // [layer][Hkv * T]

struct Profile;
struct MergeRule;

// Kinds of calibrated numbers. visual_heads, retrieval_heads: one number per query head. redundancy: one number in [0, 1] per KV
// head. prefix: the kept share of every layer at each budget. head_budgets: the share of all KV pairs per KV head.
enum class ProfileKind { none, visual_heads, retrieval_heads, redundancy, prefix, head_budgets };

// The part that all stage members share. Callbacks get the values of the settings in the order of `params`.
struct Member {
    const char *  name;
    const Param * params;                                   // ends with a setting whose name is NULL; NULL: no settings
    // Sets in `to` the quantities that the member needs from the prompt's attention. NULL: none.
    void (*observes)(const double * params, Observation & to) = nullptr;
    ProfileKind (*profile)(const double * params) = nullptr;  // the kind of profile that the member needs; NULL: always none
    bool (*does_without)(const double * params) = nullptr;    // whether the member also works without its profile; NULL: never
};

// Custom stages that a program added (plan/custom.h).
struct CustomScorer;
struct CustomAllocator;
struct CustomReducer;

// A scorer's measurement of one layer, which an allocator can use again.
struct Spectrum {
    double gamma = -1.0;  // share of the frequencies that count as low; negative: not measured
    double high  = 0.0;   // high-frequency share of the keys' energy, plus that of the values
    std::vector<double> variation;  // [Hkv] Measures::variation; empty: not measured
};

// The pending tokens of one layer, as a scorer sees them.
struct ScoreInput {
    const PendingView * view;
    LayerShape       shape;
    int32_t          layer, n_layers;  // index of the layer among the stored layers, and their number
    int32_t          n_tokens;         // T: number of pending tokens
    const Observed * observed;       // quantities that were gathered from the prompt's attention
    const float *    window_q;       // [n_window][H][d_k] scaled queries of the last tokens; NULL if none were gathered
    int32_t          n_window;       // number of gathered queries, at most the scorer's window
    const float *    sinks;          // [H] logits of the layer's attention sinks, or NULL
    const double *   params;
    const uint8_t *  image;          // [T] 1 for an image token, in the first KV head
    const uint8_t *  heads;          // [Hkv][T] 1 for an image token, if the heads hold different tokens (streams); else NULL
    const struct Scorer * self;
    const Profile *  profile;        // fits the model; NULL if the scorer uses none
    Spectrum *       spectrum;       // the scorer may write its measurement here; NULL: not wanted
    const int32_t *  tokens;         // [T] token index of each row; [Hkv][T] if `heads` is not NULL
    int32_t          next_position;  // position of the next token; set if query moments were gathered
    const Measures * measures;       // the measures of this layer that wanted_measures() asked for
    const float *    lengths;        // [H][T] lengths of the values after the projection by W_O of query head H; NULL: not asked for
};

// Returns how many last tokens a window protects: the window, at most 1/parts of `even` (an even share of the budget), so that
// pairs remain to choose. A head that keeps fewer pairs than this protects 1/parts of its `kept` pairs.
inline int32_t window_recent(int32_t window, int32_t kept, int32_t even, int32_t parts = 2) {
    const int32_t most = window < even / parts ? window : even / parts;
    return kept >= most ? most : kept / parts;
}

struct Scorer : Member {
    // Writes a score for every pending row to out [Hkv][T]. A larger score is more important.
    void (*score)(const ScoreInput & in, float * out);
    // Returns how many last tokens recent = auto protects in a head that keeps `kept` pairs; even: even share of the budget. NULL: 0
    int32_t (*auto_recent)(int32_t kept, int32_t even, const double * params) = nullptr;
    // Returns the measures that score() needs of the rows, on host or device. images: whether any token is an image token. NULL:
    // none; then score() uses the observed attention only, or (custom scorers and query moments) reads the rows of `view` on the host.
    WantedMeasures (*wanted_measures)(const double * params, bool images) = nullptr;
    // Returns whether the heads of a layer share one score, for which they must hold the same tokens. NULL: never.
    bool (*joins_heads)(const double * params) = nullptr;
    // Returns whether scores are pure attention (softmax shares or sums of them). Only then may the critical rule weigh them.
    // NULL: never.
    bool (*scores_are_attention)(const double * params) = nullptr;
    // Writes the attention part of the score to out [Hkv][T]. NULL: not available.
    void (*attention)(const ScoreInput & in, float * out) = nullptr;
    double (*gamma)(const double * params) = nullptr;  // gamma of the Spectrum that score() writes; NULL: score() writes none
    // A second score. The reserved() best unprotected tokens by reserve() are kept; `score` chooses the other tokens.
    // NULL: no second score.
    int32_t (*reserved)(int32_t kept, const double * params) = nullptr;
    void (*reserve)(const ScoreInput & in, float * out)      = nullptr;
    bool sinks_first = false;  // with a small budget, sinks stay and recent tokens are dropped; by default the reverse
    const CustomScorer * custom = nullptr;  // not NULL: a custom scorer, which may throw StageFailure
};

// Scorer::scores_are_attention for a scorer whose scores are always pure attention.
inline bool always_attention(const double *) { return true; }

// The data that an allocator reads besides the prompt's length and the profile.
enum class Reach {
    layer,   // scores of one layer at a time
    scores,  // scores and spectra of all layers
    rows,    // rows or queries of all layers
};

struct AllocateInput {
    int32_t                       n_tokens;      // T: number of pending tokens
    int32_t                       budget;        // mean KV pairs per layer and head, 1 <= budget < T
    int32_t                       recent;        // protected last tokens, included in `budget`
    const Scores *                scores;        // [layer][Hkv * T]
    const std::vector<LayerShape> * shapes;      // [layer] shapes of the stored layers
    const PendingView *           view;
    int32_t                       n_threads;
    const double *                params;
    const uint8_t *               image;         // [T] 1 for an image token
    const struct Allocator *      self;
    const Profile *               profile;       // fits the shapes; NULL if the allocator uses none
    const std::vector<Spectrum> * spectra;       // [layer] measurements that the scorer wrote; NULL: none
    int32_t                       fixed_recent;  // `recent` if the plan sets a number or a ratio; 0 for recent = auto
    const Scores *                attention;     // [layer][Hkv * T] attention part of the scores; NULL: not available
    int32_t                       largest_budget = 0;  // of a head: T, or fewer pairs if rows were already dropped
    int32_t                       layer = -1;    // the only layer that has scores and gets budgets; -1: all layers
    const int32_t *               tokens = nullptr;  // [T] token index of each row; NULL if the heads hold different tokens
    const Observed *              observed = nullptr;  // quantities that were gathered from the prompt's attention
};

struct Allocator : Member {
    // Writes the KV pairs to keep to out[layer][head], each 1 to T. Their sum is budget * (number of heads in all layers), never
    // more, except where a setting asks for the rounding of a paper's released code.
    void (*allocate)(const AllocateInput & in, std::vector<std::vector<int32_t>> & out);
    Reach (*reach)(const kvedge_plan & plan) = nullptr;  // the data that allocate() reads under this plan; NULL: Reach::rows
    bool (*by_attention)(const double * params) = nullptr;  // whether allocate() reads AllocateInput::attention; NULL: never
    const CustomAllocator * custom = nullptr;
    // Returns whether allocate() reads Spectrum::variation if no profile is given. NULL: never.
    bool (*by_variation)(const double * params, int32_t n_tokens, int32_t budget) = nullptr;
};

// The pending rows of one KV head in float32, and the indices of the rows to keep.
struct ReduceInput {
    int32_t         n_tokens, d_k, d_v;  // n_tokens: T
    const float *   k;     // [T][d_k]
    const float *   v;     // [T][d_v]
    const int32_t * kept;  // [n_kept] indices of kept rows, ascending
    int32_t         n_kept;
    int32_t         sinks, recent;  // numbers of protected first and last tokens of the prompt
    const double *  params;
    float *         scratch;  // working memory; Reducer::scratch returns its number of floats
    int32_t         layer, n_layers, head;
    Type            type;     // storage type of the rows before quantisation; f16 if keys or values are f16
    const struct Reducer * self;
    const float *   bias;     // [T] biases of the rows' logits (Segment::bias); NULL: all 0
    const float *   q;        // [n_queries][d_k] queries of the head's group, scaled for the logits; NULL: none
    int32_t         n_queries;
    float           softcap;  // softcap of the logits; 0: none
    int32_t         n_threads;  // threads that the reducer may use for this head
};

// The sizes that determine a reducer's working memory.
struct ReduceSize {
    int32_t n_tokens, n_kept, d_k, d_v, n_queries, n_threads;
};

// The rows to store, in the order of ReduceInput::kept.
struct ReducedRows {
    float * k;     // [n_kept][d_k]
    float * v;     // [n_kept][d_v]
    float * bias;  // [n_kept] starts as the biases of the kept rows; must be finite, |bias| <= MOST_BIAS. NULL: no biases
};

struct MergeRule;  // primitives/merge.h

struct Reducer : Member {
    // Computes the rows to store. Must not allocate, so that it cannot fail half-way. NULL: kept rows are stored unchanged.
    void (*reduce)(const ReduceInput & in, const ReducedRows & out);
    size_t (*scratch)(const ReduceSize & size);  // floats of working memory
    const CustomReducer * custom = nullptr;  // not NULL: a custom reducer, which may fail
    // Returns whether reduce() sets biases. NULL: never; kept rows keep their biases.
    bool (*biases)(const double * params) = nullptr;
    // Returns how many queries of the prompt reduce() needs for a head with n_free kept, unprotected rows. NULL: never any.
    int32_t (*queries)(const double * params, int32_t n_free) = nullptr;
    // Returns the rule that merges evicted rows, so that a device can merge. NULL: reduce() does not use merge_rows.
    MergeRule (*merges)(const double * params) = nullptr;
};

// The state of one KV head after a generated token.
struct DecodeInput {
    int32_t        prompt;     // T: tokens of the sequence when its last prompt was compressed
    int32_t        kept;       // rows of the head after that compression, plus the unused pairs of a budget in pairs
    int32_t        budget;     // rows of the head if the budget were shared out evenly
    int32_t        generated;  // tokens generated since that compression
    int32_t        length;     // rows of the head now
    int32_t        sinks;      // number of protected first rows
    int32_t        recent;     // number of protected last rows; 0: the plan sets none
    const double * scores;     // [length] attention that each row has received; NULL unless needs_scores
    const double * params;
};

struct DecodePolicy : Member {
    // Whether evict() needs scores. A row's score starts as its column sum in the prompt. Every new token adds its attention (the
    // mean over the query heads of the KV head) to the scores of all rows, its own row included.
    bool needs_scores;
    // Returns the row to drop, or -1 for no row. NULL: never drops a row.
    int32_t (*evict)(const DecodeInput & in);
};

// The encoder's output for an image or an image tile: a grid of down x across rows, in row-major order. Unknown grid: down is 1.
struct ImageRows {
    const float * rows;  // [n][d]
    int32_t       n, d, down, across;
};

struct Pruner : Member {
    // Writes the indices of the rows that the model reads: at most `keep`, ascending. 1 <= keep <= image.n. Throws std::bad_alloc.
    void (*prune)(const ImageRows & image, int32_t keep, const double * params, int32_t n_threads, std::vector<int32_t> & kept);
};

const Member *       find_member(kvedge_stage stage, const char * name);
const Scorer *       find_scorer(const char * name);
const Allocator *    find_allocator(const char * name);
const Reducer *      find_reducer(const char * name);
const DecodePolicy * find_decode(const char * name);
const Pruner *       find_pruner(const char * name);

}  // namespace kvedge
