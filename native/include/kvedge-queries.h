// kvedge-queries.h - what the library says of its stages, and of plans before anything runs. Included by kvedge.h, whose
// conventions hold.

#ifndef KVEDGE_QUERIES_H
#define KVEDGE_QUERIES_H

#include "kvedge-stages.h"

#ifdef __cplusplus
extern "C" {
#endif

// Setting i of a member of the library's, by its name, in the order in which it declares them: what kvedge_plan_set takes as "scorer.NAME".
// A setting whose choices are "true,false" is a switch. NULL past the end, or where there is no such member. Static storage.
//
//     for (int32_t i = 0; (s = kvedge_stage_setting(KVEDGE_STAGE_SCORER, "window", i)); i++) printf("%s: %s\n", s->name, s->help);
KVEDGE_API const kvedge_setting * kvedge_stage_setting(kvedge_stage stage, const char * member, int32_t i);

// What storage type a number is, as `kvedge chat --kv-type` and messages call it, and the bytes that 32 stored numbers take with
// their share of scales and minima. Numbers are 0, 1, 2 and so on; NULL and 0 past the last. Also of types that have no
// constant in kvedge_type.
KVEDGE_API const char * kvedge_type_name(int32_t type);
KVEDGE_API int32_t      kvedge_type_bytes(int32_t type);

// As kvedge_plan_budget, of n_tokens that follow others which were compressed before: a budget that is a share keeps
// later_floor of them.
KVEDGE_API int32_t kvedge_plan_later_budget(const kvedge_plan * plan, int32_t n_tokens);

// Whether a stream can be compressed under a plan (kvedge_compress_stream).
// Errors: KVEDGE_E_UNSUPPORTED, with what stands in the way; KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_plan_check_stream(const kvedge_plan * plan, kvedge_error * err);

// Bytes that one layer of n_heads query heads and n_heads_kv KV heads, with keys of d_k numbers, takes beside its keys and
// values while a prompt of n_tokens is read and compressed under the plan: column sums and their squares, entropies, queries,
// the window's, their mean and covariance, the largest attention of each token, as far as the stages look at them, and the scores. 0 where the plan keeps everything.
KVEDGE_API uint64_t kvedge_plan_score_bytes(
    const kvedge_plan * plan, int32_t n_tokens, int32_t n_heads, int32_t n_heads_kv, int32_t d_k);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_QUERIES_H
