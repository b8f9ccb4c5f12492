// kvedge-stages.h - your own stages. Included by kvedge.h, whose conventions hold.

#include "kvedge.h"  // before the guard: what that includes needs what is declared here

#ifndef KVEDGE_STAGES_H
#define KVEDGE_STAGES_H

#ifdef __cplusplus
extern "C" {
#endif

// Your own stages: a function and a name. A plan, and every copy that a cache takes of it, carries them.
//
//     static kvedge_status largest(const kvedge_score_input * in, float * out, kvedge_error * err) {
//         (void) err;
//         for (size_t i = 0; i < (size_t) in->n_heads_kv * in->n_tokens; i++)             // [Hkv][T]
//             for (int32_t c = 0; c < in->d_k; c++) out[i] += fabsf(in->k[i * in->d_k + c]);
//         return KVEDGE_OK;
//     }
//     ...
//     kvedge_custom_scorer mine = { .struct_size = sizeof(mine), .name = "largest", .score = largest };
//     kvedge_plan_add_scorer(plan, &mine, &err);
//     kvedge_plan_set(plan, "scorer", "largest", &err);          // composes with every allocator, reducer, policy
//
// A callback returns KVEDGE_OK or, to end the request, any other status with a reason in err->message; whoever asked
// for the compression is then told KVEDGE_E_STAGE and the reason, and the sequence stays as it was. What a callback
// writes is checked: NaN, or counts that miss the budget, are such failures too. Callbacks run on the thread that called
// kvedge_compress, kvedge_compress_arrays or llama_decode, one at a time; with thread_safe, several threads call them at
// once, each for another layer or head. The arrays they are given live until they return. They must not throw, nor use
// the cache or the context.

// A setting of a stage, set as "scorer.NAME" (allocator.NAME, reducer.NAME): a number, or one of several words.
typedef struct kvedge_setting {
    const char * name;             // as a stage's name
    const char * help;             // one line, or NULL
    double       fallback;         // the value if none is set; of words: an index
    double       lowest, highest;  // of a number
    int32_t      step;             // 0: any number; else whole ones, lowest + a multiple of step
    const char * choices;          // "mean,max": one of these words, handed over as its index; NULL: a number
} kvedge_setting;

// A stage's name: 1 to 40 of a-z, 0-9 and "-", starting with a letter, and none that kvedge_stage_name lists.
// All structs are copied, with their texts; functions and user_data must outlive the plan and every cache that has it.

typedef struct kvedge_score_input {
    int32_t         layer, n_layers;  // 0 <= layer < n_layers, counting the layers that kvedge stores
    int32_t         n_heads, n_heads_kv, n_tokens, d_k, d_v;  // H, Hkv, T, head sizes of keys and values
    const float *   k;            // [Hkv][T][d_k] as stored, widened; position encoding applied
    const float *   v;            // [Hkv][T][d_v]
    const uint8_t * image_mask;   // [T] 1 for an image token
    int32_t         n_queries;    // as many as were asked for and seen: no more than T
    const float *   q;            // [n_queries][H][d_k] of the last tokens; logit = q.k / sqrt(d_k) whatever the model's
                                  // scale. NULL unless asked for
    const float *   column_sums;  // [Hkv][T] attention received, summed over the prompt's queries, mean of the query
                                  // heads of a KV head (H2O; LOOK-M eq. 4). NULL unless asked for
    const double *  settings;     // [n_settings]
    void *          user_data;
} kvedge_score_input;

typedef struct kvedge_custom_scorer {
    size_t                 struct_size;  // sizeof(kvedge_custom_scorer)
    const char *           name;
    const char *           summary;      // one line for lists, or NULL
    const kvedge_setting * settings;     // [n_settings], at most 8
    int32_t                n_settings;
    int32_t                n_queries;    // last queries of the prompt that it wants to see; 0: none
    int32_t                recent;       // last tokens that recent = auto protects, at most half of the budget
    bool                   column_sums;  // whether it wants them
    bool                   thread_safe;
    // out [Hkv][T], all 0 before: the larger, the sooner kept; equal ones by the lower token. Infinities are allowed.
    kvedge_status (*score)(const kvedge_score_input * in, float * out, kvedge_error * err);
    void * user_data;
} kvedge_custom_scorer;

// Heads are numbered through all layers: R = the sum of the layers' Hkv, which is L * Hkv where all layers are alike.
typedef struct kvedge_allocate_input {
    int32_t         n_layers, n_rows, n_tokens;  // L, R, T
    const int32_t * n_heads_kv;  // [L]
    const float *   scores;      // [R][T], as the scorer gave them
    const uint8_t * image_mask;  // [T]
    int32_t         budget;      // KV pairs per head on average, 1 <= budget < T
    int32_t         recent;      // of those, last tokens that every head keeps whatever their score
    const double *  settings;
    void *          user_data;
} kvedge_allocate_input;

typedef struct kvedge_custom_allocator {
    size_t                 struct_size;
    const char *           name;
    const char *           summary;
    const kvedge_setting * settings;
    int32_t                n_settings;
    // counts [R], all 0 before: KV pairs that each head keeps, from 1 to T, with the sum R * budget.
    kvedge_status (*allocate)(const kvedge_allocate_input * in, int32_t * counts, kvedge_error * err);
    void * user_data;
} kvedge_custom_allocator;

typedef struct kvedge_reduce_input {
    int32_t         layer, n_layers, head;  // one KV head
    int32_t         n_tokens, d_k, d_v;     // T, head sizes
    const float *   k;                      // [T][d_k] as stored, widened
    const float *   v;                      // [T][d_v]
    const int32_t * kept;                   // [n_kept] tokens that stay, ascending
    int32_t         n_kept;
    int32_t         sinks, recent;          // first and last tokens of the prompt that are protected
    const double *  settings;
    void *          user_data;
} kvedge_reduce_input;

typedef struct kvedge_custom_reducer {
    size_t                 struct_size;
    const char *           name;
    const char *           summary;
    const kvedge_setting * settings;
    int32_t                n_settings;
    bool                   thread_safe;
    // k [n_kept][d_k] and v [n_kept][d_v]: the rows to store, holding the kept rows before; finite, and small enough for
    // the storage type. With a reducer of the program's own, old rows are given back only when all layers stand.
    kvedge_status (*reduce)(const kvedge_reduce_input * in, float * k, float * v, kvedge_error * err);
    void * user_data;
} kvedge_custom_reducer;

// Errors: KVEDGE_E_ARGUMENT (a name that is taken or not allowed, a setting that contradicts itself, no function).
KVEDGE_API kvedge_status kvedge_plan_add_scorer(kvedge_plan * plan, const kvedge_custom_scorer * scorer, kvedge_error * err);
KVEDGE_API kvedge_status kvedge_plan_add_allocator(
    kvedge_plan * plan, const kvedge_custom_allocator * allocator, kvedge_error * err);
KVEDGE_API kvedge_status kvedge_plan_add_reducer(kvedge_plan * plan, const kvedge_custom_reducer * reducer, kvedge_error * err);

// A shared library of stages for `kvedge chat --plugin FILE` exports one function; it need not link libkvedge:
//
//     KVEDGE_PLUGIN_EXPORT const kvedge_plugin * kvedge_plugin_v1(void) { return &table; }
typedef struct kvedge_plugin {
    size_t                          struct_size;  // sizeof(kvedge_plugin)
    const kvedge_custom_scorer *    scorers;      // [n_scorers]
    int32_t                         n_scorers;
    const kvedge_custom_allocator * allocators;   // [n_allocators]
    int32_t                         n_allocators;
    const kvedge_custom_reducer *   reducers;     // [n_reducers]
    int32_t                         n_reducers;
} kvedge_plugin;

#if defined(_WIN32)
#    define KVEDGE_PLUGIN_EXPORT __declspec(dllexport)
#else
#    define KVEDGE_PLUGIN_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_STAGES_H
