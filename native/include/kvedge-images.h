// kvedge-images.h - fewer image tokens: which rows of an encoded image the model reads. Included by kvedge.h, whose conventions
// hold. It stands between mtmd's encoder and llama_decode:
//
//     kvedge_plan_set(plan, "pruner", "residual", &err);
//     kvedge_plan_set(plan, "image_tokens", "0.5", &err);
//     kvedge_image image = { sizeof(image), mtmd_get_output_embd(mtmd), n_tokens, n_embd, 24, 24 };
//     int32_t n = kvedge_plan_image_tokens(plan, n_tokens);
//     if (kvedge_prune(plan, &image, 0, kept, rows, &n, &err) == KVEDGE_OK) { ... }   // decode rows [n][n_embd]
//
// Each row keeps its place: with M-RoPE the positions that mtmd_helper_image_get_decoder_pos gives to row kept[i], else position
// n_past + kept[i], and what follows the image comes at n_past + n_tokens. llama_decode takes such gaps once kvedge is attached.

#ifndef KVEDGE_IMAGES_H
#define KVEDGE_IMAGES_H

#include "kvedge.h"

#ifdef __cplusplus
extern "C" {
#endif

// One image, or one tile of it, as its encoder made it.
typedef struct kvedge_image {
    size_t        struct_size;  // sizeof(kvedge_image)
    const float * rows;         // [n_rows][width], finite
    int32_t       n_rows, width;
    int32_t       down, across; // rows lie row by row in such a grid; 0 and 0: what each shows is not known
} kvedge_image;

// Rows that the plan lets a model read of an image of n_rows: floor(n_rows * ratio + 1e-9), or the number that it names; at least
// 1, at most n_rows, and all of them with pruner none. 0 if n_rows <= 0.
KVEDGE_API int32_t kvedge_plan_image_tokens(const kvedge_plan * plan, int32_t n_rows);

// Chooses rows by the plan's pruner. kept [*n]: their numbers, ascending; rows [*n][width]: what the model reads, or NULL. *n:
// room for rows, and then how many there are; never more than kvedge_plan_image_tokens. n_threads: 0 for all cores.
// Errors: KVEDGE_E_ARGUMENT (NULL, sizes that are none or do not fit together, too little room), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_prune(
    const kvedge_plan * plan, const kvedge_image * image, int32_t n_threads, int32_t * kept, float * rows, int32_t * n,
    kvedge_error * err);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_IMAGES_H
