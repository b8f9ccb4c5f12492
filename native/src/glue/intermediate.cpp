#include "glue/intermediate.h"

#include "system/pages.h"
#include "ggml-backend.h"

using namespace kvedge;

void Intermediate::note(const ggml_tensor * result) {
    ggml_backend_buffer * buffer = result->buffer;
    // Pinned memory of a GPU's driver has another buffer type; weights and caches have another usage.
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
