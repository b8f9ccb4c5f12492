// Tensors that share one buffer on a device.

#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>
#include <memory>

namespace kvedge {

class Tensors {
  public:
    Tensors() = default;
    explicit Tensors(size_t n);  // room for n tensors. Throws std::bad_alloc

    ggml_tensor * add(ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1);
    bool          allocate(ggml_backend_dev_t device);  // memory for all of them, all zero. False: there is none
    uint64_t      bytes() const { return buffer_ ? ggml_backend_buffer_get_size(buffer_.get()) : 0; }

  private:
    struct Free {
        void operator()(ggml_context * c) const { ggml_free(c); }
        void operator()(ggml_backend_buffer * b) const { ggml_backend_buffer_free(b); }
    };
    std::unique_ptr<ggml_context, Free>        context_;
    std::unique_ptr<ggml_backend_buffer, Free> buffer_;
};

// The first n slots of every head, from one tensor [d, slots, heads] to another, on their device.
void copy_slots(ggml_tensor * from, ggml_tensor * to, int64_t n);

}  // namespace kvedge
