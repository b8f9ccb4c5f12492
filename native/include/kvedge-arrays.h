// kvedge-arrays.h - compression of plain arrays, without a model. Included by kvedge.h, whose conventions hold.

#include "kvedge.h"  // before the guard: what that includes needs what is declared here

#ifndef KVEDGE_ARRAYS_H
#define KVEDGE_ARRAYS_H

#ifdef __cplusplus
extern "C" {
#endif

// The same computation on plain arrays, without a model: for research and tests.

typedef struct kvedge_arrays {
    int32_t         n_layers, n_heads, n_heads_kv, n_tokens, head_size;  // L, H, Hkv, T, d; H % Hkv == 0; d % 8 == 0
    const float *   q;           // [L][H][T][d]    queries, position encoding applied
    const float *   k;           // [L][Hkv][T][d]  keys,    position encoding applied
    const float *   v;           // [L][Hkv][T][d]  values
    const uint8_t * image_mask;  // [T] 1 for an image token; NULL: all text
} kvedge_arrays;

// Which channels of a row turn together by its position (rotary position encoding).
typedef enum kvedge_pairs {
    KVEDGE_PAIRS_NORM = 0,  // 2 i and 2 i + 1: Llama's
    KVEDGE_PAIRS_NEOX = 1,  // i and i + n of n pairs: GPT-NeoX's, Qwen's
} kvedge_pairs;

// Says that the queries and keys of arrays were turned by their positions, 0 to T - 1: pair i by angles[i] radians for each
// position, i < n, channels beyond 2 n not at all. Scorer "expected" turns them back. Of a context the model's own rotation
// holds instead. angles [n] are copied; NULL: they were not turned, as without this call.
//
//     for (i = 0; i < d / 2; i++) angles[i] = pow(10000.0, -2.0 * i / d);
//     kvedge_plan_set_rotation(plan, KVEDGE_PAIRS_NEOX, angles, d / 2, &err);
//
// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY. More channels than a head has are refused with KVEDGE_E_ARGUMENT by
// kvedge_compress_arrays, where the plan asks for the rotation.
KVEDGE_API kvedge_status kvedge_plan_set_rotation(
    kvedge_plan * plan, kvedge_pairs pairs, const double * angles, int32_t n, kvedge_error * err);

// Gives arrays the output projection of their layers, W_O, by which plans with critical l1 or l2, or with scorer.projected of
// scorer "replay", weigh values: what head h of layer l adds to a row of the residual stream is a row of d_v numbers times
// values[l][h]. Of a context the model's own weights hold instead. values [n_layers][n_heads][d_v][width], finite, are copied;
// NULL: there are none, as without this call.
// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY. A projection that is missing is refused with KVEDGE_E_ARGUMENT, one of another
// shape than the arrays with KVEDGE_E_UNSUPPORTED, by kvedge_compress_arrays, where the plan asks for it.
KVEDGE_API kvedge_status kvedge_plan_set_projection(
    kvedge_plan * plan, const float * values, int32_t n_layers, int32_t n_heads, int32_t d_v, int32_t width, kvedge_error * err);

// Stores k and v as `type`, attends causally with scale 1/sqrt(d), compresses by the plan. A quantised type is written last:
// attention, scores and merges see f16.
// n_threads: 0 for one per core, or fewer for small arrays.
// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY, KVEDGE_E_UNSUPPORTED (d that the type cannot hold).
KVEDGE_API kvedge_status kvedge_compress_arrays(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type, int32_t n_threads, kvedge_result ** out,
    kvedge_error * err);

// The same with a type for keys and one for values.
KVEDGE_API kvedge_status kvedge_compress_arrays_as(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type_k, kvedge_type type_v, int32_t n_threads,
    kvedge_result ** out, kvedge_error * err);

// The same by options: their types, threads and rotation, which the others leave out; the rest is not looked at. NULL: the defaults.
// What comes out are the rows as they are read: quantised while they were rotated, and rotated back. Errors: also
// KVEDGE_E_UNSUPPORTED (a d that cannot be rotated).
KVEDGE_API kvedge_status kvedge_compress_arrays_by(
    const kvedge_plan * plan, const kvedge_arrays * in, const kvedge_options * options, kvedge_result ** out, kvedge_error * err);

// The same for a stream: `step` >= 1 tokens at a time attend to what is left of those before, and are compressed together
// with it (kvedge_compress_stream). The result has no scores. Errors: also those of kvedge_compress_stream.
KVEDGE_API kvedge_status kvedge_stream_arrays(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type_k, kvedge_type type_v, int32_t step, int32_t n_threads,
    kvedge_result ** out, kvedge_error * err);

KVEDGE_API void kvedge_result_free(kvedge_result * result);  // NULL is allowed

// Per layer and KV head; pointers live as long as the result; NULL or -1 for a layer or head that does not exist.
KVEDGE_API int32_t         kvedge_result_length(const kvedge_result * result, int32_t layer, int32_t head);
KVEDGE_API const int32_t * kvedge_result_kept(const kvedge_result * result, int32_t layer, int32_t head);    // [length] ascending
KVEDGE_API const float *   kvedge_result_k(const kvedge_result * result, int32_t layer, int32_t head);       // [length][d]
KVEDGE_API const float *   kvedge_result_v(const kvedge_result * result, int32_t layer, int32_t head);       // [length][d]
// [length] biases of the rows' logits, as kvedge_head_biases has them; NULL: all are 0.
KVEDGE_API const float *   kvedge_result_biases(const kvedge_result * result, int32_t layer, int32_t head);
KVEDGE_API const float *   kvedge_result_scores(const kvedge_result * result, int32_t layer, int32_t head);  // [T]; NULL: a stream
// Attention output of the full prompt, before compression: [H][T][d] of one layer.
KVEDGE_API const float *   kvedge_result_attention(const kvedge_result * result, int32_t layer);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_ARRAYS_H
