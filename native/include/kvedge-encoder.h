// kvedge-encoder.h - gives back the memory that an image encoder worked in. Included by kvedge.h, whose conventions hold.
//
// libmtmd keeps the intermediate results of the largest image it has encoded until it is freed. For a model that reads
// images at their own size they can be several times the image's KV cache.
//
//     kvedge_encoder * encoder = NULL;
//     kvedge_encoder_create(&encoder, &err);
//     struct mtmd_context_params params = mtmd_context_params_default();
//     params.cb_eval           = kvedge_encoder_eval;
//     params.cb_eval_user_data = encoder;
//     ... mtmd_init_from_file(path, model, params), mtmd_encode_chunk(mtmd, chunk) ...
//     kvedge_encoder_release(encoder);   // after each image; the next one takes the memory again
//     ... mtmd_free(mtmd) ...
//     kvedge_encoder_free(encoder);

#ifndef KVEDGE_ENCODER_H
#define KVEDGE_ENCODER_H

#include "kvedge.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_tensor;

typedef struct kvedge_encoder kvedge_encoder;  // where one mtmd context has its intermediate results

// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_encoder_create(kvedge_encoder ** out, kvedge_error * err);
KVEDGE_API void          kvedge_encoder_free(kvedge_encoder * encoder);  // NULL is allowed

// For mtmd_context_params.cb_eval, with the encoder as user data. Looks at no result, and leaves the graph in one piece.
KVEDGE_API bool kvedge_encoder_eval(struct ggml_tensor * tensor, bool ask, void * encoder);

// Gives the pages of the intermediate results back to the operating system; mtmd's embeddings stay. Call it right after
// mtmd_encode_chunk has succeeded, and from no other place: a failed encoding may have moved them.
// Returns their bytes; 0 where they lie on a GPU, or nothing was encoded since the last call.
KVEDGE_API uint64_t kvedge_encoder_release(kvedge_encoder * encoder);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_ENCODER_H
