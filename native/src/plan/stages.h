// What a stage member is to the rest of the library. A member lives in a file of its own, named as it is registered, which
// defines one symbol: scorer_NAME, allocator_NAME, reducer_NAME or decode_NAME. The build lists the files (registry.cpp).

#pragma once

#include "plan/away.h"
#include "system/pages.h"
#include "plan/pending.h"
#include "kvedge.h"
#include "observe/observed.h"

#include <cstdint>
#include <vector>

namespace kvedge {

using Param = kvedge_setting;

// Settings as members declare them: any number, a whole one, the first of some words unless another is set, true or false.
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
constexpr int32_t N_STAGES   = 5;  // as kvedge_stage counts them

using Scores = std::vector<Bulk<float>>;  // [layer][Hkv * T]

struct Profile;
struct MergeRule;

// Calibrated numbers that a member needs: none; one a query head of every layer, by what the head looks at; one in [0, 1] a KV
// head; kept shares of every layer by budget; or a KV head's share of all pairs. profile.cpp names them.
enum class ProfileKind { none, visual_heads, retrieval_heads, redundancy, prefix, head_budgets };

// What every member has. Values of its settings come in the order of params, which ends with a nameless one.
struct Member {
    const char *  name;
    const Param * params;                                   // NULL: none
    // Sets what the member wants gathered while the prompt is read. NULL: nothing.
    void (*observes)(const double * params, Observation & to) = nullptr;
    ProfileKind (*profile)(const double * params) = nullptr;  // NULL: takes none, whatever its settings
    bool (*does_without)(const double * params) = nullptr;    // where a model has no profile; NULL: it is refused then
};

// What kvedge_plan_add_scorer and its like were given (custom.h).
struct CustomScorer;
struct CustomAllocator;
struct CustomReducer;

// What a scorer measured of a layer on its way, so that an allocator need not do it again.
struct Spectrum {
    double gamma = -1.0;  // share of the frequencies that count as low; negative: nothing was measured
    double high  = 0.0;   // high frequencies' share of the keys' energy, plus that of the values'
    std::vector<double> variation;  // as of Measures; empty: it was not measured
};

// The pending tokens of one layer, as a scorer sees them.
struct ScoreInput {
    const PendingView * view;
    LayerShape       shape;
    int32_t          layer, n_layers;  // of the stored ones
    int32_t          n_tokens;         // T
    const Observed * observed;       // what was gathered: at least what observes() asked for, if any of it was seen
    const float *    window_q;       // [n_window][H][d_k] queries of the last tokens, scaled; NULL unless asked for
    int32_t          n_window;       // as many as were seen, at most the window
    const float *    sinks;          // [H] logits of the layer's attention sinks, or NULL
    const double *   params;
    const uint8_t *  image;          // [T] 1 for an image token, of the first KV head
    const uint8_t *  heads;          // [Hkv][T] likewise, where the heads of a stream hold different tokens; else NULL
    const struct Scorer * self;
    const Profile *  profile;        // as AllocateInput::profile
    Spectrum *       spectrum;       // to be filled in by whoever measures it; NULL: of no use
    const int32_t *  tokens;         // [T] token index of each row, or [Hkv][T] where `heads` is given
    int32_t          next_position;  // of the token that follows
    const Measures * measures;       // what looks() asked for of this layer
    const float *    lengths;        // [H][T] of the values, each projected by its query head's W_O; NULL unless asked for
};

// auto_recent of a window: at most one in `parts` of an even share of the budget, so that something is left to choose, and
// of a head that gets less than that, one in `parts` of what it gets.
inline int32_t window_recent(int32_t window, int32_t kept, int32_t even, int32_t parts = 2) {
    const int32_t most = window < even / parts ? window : even / parts;
    return kept >= most ? most : kept / parts;
}

struct Scorer : Member {
    // out [Hkv][T], larger matters more
    void (*score)(const ScoreInput & in, float * out);
    // Last tokens that recent = auto protects in a head of `kept` pairs, where an even share of the budget is `even`; NULL: none
    int32_t (*auto_recent)(int32_t kept, int32_t even, const double * params) = nullptr;
    // What it wants measured of the rows, which may lie on a device. images: whether a token is an image's. NULL: nothing; it
    // goes by what was observed of the prompt's attention, or, with moments or as a stage of the program's own, reads rows of `view`.
    Looks (*looks)(const double * params, bool images) = nullptr;
    // Whether the heads of a layer score together, which they can only while they hold the same tokens. NULL: never.
    bool (*joins_heads)(const double * params) = nullptr;
    // Whether scores are attention and nothing else, shares of a softmax or sums of them, which the critical rule may weigh.
    // NULL: never.
    bool (*attends)(const double * params) = nullptr;
    // The attention alone, where score() mixes it with more. NULL: score() is all there is.
    void (*attention)(const ScoreInput & in, float * out) = nullptr;
    double (*gamma)(const double * params) = nullptr;  // of the Spectrum that it leaves; NULL: it leaves none
    // A second score: of the tokens that are not protected, the reserved() best by it are kept, and the others are chosen
    // by score. NULL: none.
    int32_t (*reserved)(int32_t kept, const double * params) = nullptr;
    void (*reserve)(const ScoreInput & in, float * out)      = nullptr;
    bool sinks_first = false;  // sinks outlast recent tokens when the budget is too small for both
    const CustomScorer * custom = nullptr;  // a stage of the program's own, which may throw StageFailure
};

// attends of a scorer that does so whatever its settings.
inline bool always_attends(const double *) { return true; }

// How far an allocator looks beyond the prompt's length and the profile.
enum class Reach {
    layer,   // at the layer's own scores
    scores,  // at the scores and spectra of all layers
    rows,    // at their rows or queries
};

struct AllocateInput {
    int32_t                       n_tokens;      // T
    int32_t                       budget;        // KV pairs per layer and head on average, 1 <= budget < T
    int32_t                       recent;        // of those, last tokens that are kept anyway
    const Scores *                scores;        // [layer][Hkv * T]
    const std::vector<LayerShape> * shapes;      // of the stored layers
    const PendingView *           view;
    int32_t                       n_threads;
    const double *                params;
    const uint8_t *               image;         // [T] 1 for an image token
    const struct Allocator *      self;
    const Profile *               profile;       // fits the shapes; NULL where the member asked for none
    const std::vector<Spectrum> * spectra;       // [layer], as the scorer left them; NULL: it left none
    int32_t                       fixed_recent;  // of recent, those that the plan asks for by number
    const Scores *                attention;     // as scores, by attention alone; NULL: scores are all there is
    int32_t                       most = 0;      // pairs that a head can be granted: T, or as many as are left
    int32_t                       layer = -1;    // the only one that has scores, and whose budgets are wanted; -1: all
    const int32_t *               tokens = nullptr;  // [T] token index of each row, where all heads hold the same ones
    const Observed *              observed = nullptr;  // what was gathered
};

struct Allocator : Member {
    // out[layer][head] KV pairs to keep, each 1 to T; their sum is budget * (number of layers and heads), never above,
    // except where a setting asks for the rounding of a released code.
    void (*allocate)(const AllocateInput & in, std::vector<std::vector<int32_t>> & out);
    Reach (*reach)(const kvedge_plan & plan) = nullptr;  // under a plan of which it is the allocator; NULL: rows
    bool (*by_attention)(const double * params) = nullptr;  // whether it looks at scores by attention alone; NULL: never
    const CustomAllocator * custom = nullptr;
    // Whether it looks at Spectrum::variation without a profile; NULL: never.
    bool (*by_variation)(const double * params, int32_t n_tokens, int32_t budget) = nullptr;
};

// One head's rows in float32, and which of them stay.
struct ReduceInput {
    int32_t         n_tokens, d_k, d_v;
    const float *   k;     // [T][d_k]
    const float *   v;     // [T][d_v]
    const int32_t * kept;  // [n_kept] ascending
    int32_t         n_kept;
    int32_t         sinks, recent;  // first and last tokens of the prompt that are protected
    const double *  params;
    float *         scratch;  // as many floats as the reducer's scratch() asked for
    int32_t         layer, n_layers, head;
    Type            type;     // that the rows are stored as
    const struct Reducer * self;
    const float *   bias;     // [T] of the rows' logits (Segment::bias); NULL: all 0
    const float *   q;        // [n_queries][d_k] of the head's group, scaled as for the logits; NULL: none was kept, or asked for
    int32_t         n_queries;
    float           softcap;  // of the logits, 0: none
    int32_t         n_threads;  // that this head may use
};

// What a reducer's working memory depends on.
struct ReduceSize {
    int32_t n_tokens, n_kept, d_k, d_v, n_queries, n_threads;
};

// The rows to store, in the order of ReduceInput::kept.
struct ReducedRows {
    float * k;     // [n_kept][d_k]
    float * v;     // [n_kept][d_v]
    float * bias;  // [n_kept] finite, at most MOST_BIAS either way; those of the kept rows before. NULL: rows have none
};

struct MergeRule;  // primitives/merge.h

struct Reducer : Member {
    // Allocates nothing: it must not fail half-way. NULL: the kept rows as they are.
    void (*reduce)(const ReduceInput & in, const ReducedRows & out);
    size_t (*scratch)(const ReduceSize & size);
    const CustomReducer * custom = nullptr;  // this one may fail
    // Whether rows get biases from it. NULL: never; then kept rows keep those that they have.
    bool (*biases)(const double * params) = nullptr;
    // Queries of the prompt that it wants to see, of a head of which n_free rows stay that are not protected. NULL: none ever.
    int32_t (*queries)(const double * params, int32_t n_free) = nullptr;
    // The rule by which it merges evicted rows, so that a device may do it. NULL: not by merge_rows.
    MergeRule (*merges)(const double * params) = nullptr;
};

// One KV head after a generated token.
struct DecodeInput {
    int32_t        prompt;     // T: tokens of the sequence when its last prompt was compressed
    int32_t        kept;       // rows that the head held right after that, and what a budget in pairs left unused
    int32_t        budget;     // rows that an even share of the budget would have held
    int32_t        generated;  // tokens since then
    int32_t        length;     // rows that the head holds now
    int32_t        sinks;      // first rows that stay
    int32_t        recent;     // last rows that the plan protects when a head keeps that many; 0: it does not say
    const double * scores;     // [length] attention that each row received so far; NULL unless asked for
    const double * params;
};

struct DecodePolicy : Member {
    // Scores start as the column sums of the prompt, and every new token adds what it pays, itself included; averaged over
    // the group.
    bool needs_scores;
    // The row to drop, or -1. NULL: none ever.
    int32_t (*evict)(const DecodeInput & in);
};

// An image, or a tile of one, as its encoder made it. Rows lie row by row in a grid; where their places are not known down is 1.
struct ImageRows {
    const float * rows;  // [n][d]
    int32_t       n, d, down, across;
};

struct Pruner : Member {
    // Rows that the model reads: at most `keep` of them, ascending. 1 <= keep <= image.n. Throws std::bad_alloc.
    void (*prune)(const ImageRows & image, int32_t keep, const double * params, int32_t n_threads, std::vector<int32_t> & kept);
};

const Member *       find_member(kvedge_stage stage, const char * name);
const Scorer *       find_scorer(const char * name);
const Allocator *    find_allocator(const char * name);
const Reducer *      find_reducer(const char * name);
const DecodePolicy * find_decode(const char * name);
const Pruner *       find_pruner(const char * name);

}  // namespace kvedge
