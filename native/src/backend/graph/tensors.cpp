#include "backend/graph/tensors.h"

#include <new>

namespace kvedge {

namespace {

ggml_context * make_context(size_t n) {
    ggml_context * context = ggml_init({ n * ggml_tensor_overhead(), nullptr, true });
    if (!context) {
        throw std::bad_alloc();
    }
    return context;
}

}  // namespace

Tensors::Tensors(size_t n) : context_(make_context(n)) {}

ggml_tensor * Tensors::add(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) {
    return ggml_new_tensor_3d(context_.get(), type, ne0, ne1, ne2);
}

bool Tensors::allocate(ggml_backend_dev_t device) {
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), ggml_backend_dev_buffer_type(device)));
    if (!buffer_) {
        return false;
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);  // masked slots count nothing, but a NaN times nothing is a NaN
    return true;
}

void copy_slots(ggml_tensor * from, ggml_tensor * to, int64_t n) {
    const int64_t heads = from->ne[2];
    ggml_context * const context = make_context(2 * (size_t) heads);
    for (int64_t h = 0; h < heads && n > 0; h++) {
        ggml_tensor * parts[2];
        for (int i = 0; i < 2; i++) {
            ggml_tensor * of = i == 0 ? from : to;
            parts[i]         = ggml_view_2d(context, of, of->ne[0], n, of->nb[1], (size_t) h * of->nb[2]);
            ggml_backend_view_init(parts[i]);
        }
        ggml_backend_tensor_copy(parts[0], parts[1]);
    }
    ggml_free(context);
}

}  // namespace kvedge
