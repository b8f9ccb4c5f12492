
#ifndef KVEDGE_ENCODER_H
#define KVEDGE_ENCODER_H

#include "kvedge.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_tensor;

typedef struct kvedge_encoder kvedge_encoder;  // what is known of the encoder of one mtmd context

// Called when a layer of the encoder is done, from 0 on. false: stop; mtmd_encode_chunk then returns as if it had succeeded,
typedef bool (*kvedge_encoder_look)(int32_t layer, void * user_data);

// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_encoder_create(kvedge_encoder ** out, kvedge_error * err);
KVEDGE_API void          kvedge_encoder_free(kvedge_encoder * encoder);  // NULL is allowed

// look: called during the encodings from now on, on the thread that asked for them; NULL: nobody.
KVEDGE_API void kvedge_encoder_set_look(kvedge_encoder * encoder, kvedge_encoder_look look, void * user_data);

// For mtmd_context_params.cb_eval, with the encoder as user data.
KVEDGE_API bool kvedge_encoder_eval(struct ggml_tensor * tensor, bool ask, void * encoder);

// Gives the pages of the intermediate results back to the operating system; mtmd's embeddings stay. Call it right after
KVEDGE_API uint64_t kvedge_encoder_release(kvedge_encoder * encoder);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_ENCODER_H
