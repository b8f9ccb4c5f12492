// kvedge-encoder.h - watches an image encoder of libmtmd, and gives back the memory that it worked in. Included by kvedge.h,
// whose conventions hold.
//
// libmtmd keeps the intermediate results of the largest image it has encoded until it is freed. For a model that reads
// images at their own size they can be several times the image's KV cache. And on a CPU such an image takes many seconds,
// in which libmtmd says nothing and cannot be stopped.
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

typedef struct kvedge_encoder kvedge_encoder;  // what is known of the encoder of one mtmd context

// Called when a layer of the encoder is done, from 0 on. false: stop; mtmd_encode_chunk then returns as if it had succeeded,
// with embeddings that mean nothing.
typedef bool (*kvedge_encoder_look)(int32_t layer, void * user_data);

// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_encoder_create(kvedge_encoder ** out, kvedge_error * err);
KVEDGE_API void          kvedge_encoder_free(kvedge_encoder * encoder);  // NULL is allowed

// look: called during the encodings from now on, on the thread that asked for them; NULL: nobody.
KVEDGE_API void kvedge_encoder_set_look(kvedge_encoder * encoder, kvedge_encoder_look look, void * user_data);

// For mtmd_context_params.cb_eval, with the encoder as user data.
KVEDGE_API bool kvedge_encoder_eval(struct ggml_tensor * tensor, bool ask, void * encoder);

// Gives the pages of the intermediate results back to the operating system; mtmd's embeddings stay. Call it right after
// mtmd_encode_chunk has returned 0, and from no other place: a failed encoding may have moved them.
// Returns their bytes; 0 where they lie on a GPU, or nothing was encoded since the last call.
KVEDGE_API uint64_t kvedge_encoder_release(kvedge_encoder * encoder);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_ENCODER_H
