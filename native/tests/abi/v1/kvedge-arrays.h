
#ifndef KVEDGE_ARRAYS_H
#define KVEDGE_ARRAYS_H

#include "kvedge.h"

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

// Stores k and v as `type`, attends causally with scale 1/sqrt(d), compresses by the plan. A quantised type is written last:
KVEDGE_API kvedge_status kvedge_compress_arrays(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type, int32_t n_threads, kvedge_result ** out,
    kvedge_error * err);

// The same with a type for keys and one for values.
KVEDGE_API kvedge_status kvedge_compress_arrays_as(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type_k, kvedge_type type_v, int32_t n_threads,
    kvedge_result ** out, kvedge_error * err);

// The same for a stream: `step` >= 1 tokens at a time attend to what is left of those before, and are compressed together
KVEDGE_API kvedge_status kvedge_stream_arrays(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type_k, kvedge_type type_v, int32_t step, int32_t n_threads,
    kvedge_result ** out, kvedge_error * err);

KVEDGE_API void kvedge_result_free(kvedge_result * result);  // NULL is allowed

// Per layer and KV head; pointers live as long as the result; NULL or -1 for a layer or head that does not exist.
KVEDGE_API int32_t         kvedge_result_length(const kvedge_result * result, int32_t layer, int32_t head);
KVEDGE_API const int32_t * kvedge_result_kept(const kvedge_result * result, int32_t layer, int32_t head);    // [length] ascending
KVEDGE_API const float *   kvedge_result_k(const kvedge_result * result, int32_t layer, int32_t head);       // [length][d]
KVEDGE_API const float *   kvedge_result_v(const kvedge_result * result, int32_t layer, int32_t head);       // [length][d]
KVEDGE_API const float *   kvedge_result_scores(const kvedge_result * result, int32_t layer, int32_t head);  // [T]; NULL: a stream
KVEDGE_API const float *   kvedge_result_attention(const kvedge_result * result, int32_t layer);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_ARRAYS_H
