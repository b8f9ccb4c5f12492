#include "glue/intermediate.h"

#include "core/error.h"
#include "ggml-backend.h"
#include "kvedge.h"
#include "store/pages.h"

#include <new>

using namespace kvedge;

void Intermediate::note(const ggml_tensor * result) {
    ggml_backend_buffer * buffer = result->buffer;
    // Pinned memory of a GPU's driver is of another type, weights and caches have another use.
    if (buffer && ggml_backend_buffer_get_type(buffer) == ggml_backend_cpu_buffer_type() &&
        ggml_backend_buffer_get_usage(buffer) == GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        buffer_ = buffer;
    }
}

size_t Intermediate::release() {
    if (!buffer_) {
        return 0;
    }
    const size_t size = ggml_backend_buffer_get_size(buffer_);
    discard(ggml_backend_buffer_get_base(buffer_), size);
    buffer_ = nullptr;
    return size;
}

struct kvedge_encoder {
    Intermediate results;
};

extern "C" kvedge_status kvedge_encoder_create(kvedge_encoder ** out, kvedge_error * err) {
    if (!out) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_encoder_create: out is NULL");
    }
    *out = new (std::nothrow) kvedge_encoder();
    return *out ? ok(err) : fail(err, KVEDGE_E_MEMORY, "no memory for an encoder");
}

extern "C" void kvedge_encoder_free(kvedge_encoder * encoder) {
    delete encoder;
}

extern "C" bool kvedge_encoder_eval(ggml_tensor * tensor, bool ask, void * encoder) {
    if (ask && encoder && tensor) {
        ((kvedge_encoder *) encoder)->results.note(tensor);
    }
    return !ask;  // wanted: none; the answer to what was computed: go on
}

extern "C" uint64_t kvedge_encoder_release(kvedge_encoder * encoder) {
    return encoder ? encoder->results.release() : 0;
}
