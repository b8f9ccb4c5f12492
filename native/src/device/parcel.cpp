#include "device/parcel.h"

#include "system/threads.h"

#include <new>

namespace kvedge {

Parcel::Parcel(ggml_backend_dev_t device)
    : device_(device), alignment_(ggml_backend_buft_get_alignment(ggml_backend_dev_buffer_type(device))) {}

size_t Parcel::place(const ggml_tensor * t, size_t & end) const {
    const size_t at = end;
    end             = (at + ggml_nbytes(t) + alignment_ - 1) / alignment_ * alignment_;
    return at;
}

bool Parcel::allocate() {
    const auto type = ggml_backend_dev_buffer_type(device_);
    buffer_.reset(ggml_backend_buft_alloc_buffer(type, sent_bytes_ + fetched_bytes_ + alignment_));
    if (!buffer_) {
        return false;
    }
    auto * const base = (uint8_t *) ggml_backend_buffer_get_base(buffer_.get());
    for (const auto & [t, at] : sent_) {
        ggml_backend_tensor_alloc(buffer_.get(), t, base + at);
    }
    for (const auto & [t, at] : fetched_) {
        ggml_backend_tensor_alloc(buffer_.get(), t, base + sent_bytes_ + at);
    }
    return true;
}

ggml_tensor * Parcel::piece(ggml_context * context, size_t offset, size_t bytes) const {
    ggml_tensor * all = ggml_new_tensor_1d(context, GGML_TYPE_I8, (int64_t) bytes);
    ggml_backend_tensor_alloc(buffer_.get(), all, (uint8_t *) ggml_backend_buffer_get_base(buffer_.get()) + offset);
    return all;
}

// Pages of their own: large ones where the system has them, and not written before they are filled.
Pages Parcel::room(size_t bytes) {
    Pages out = Pages::take(bytes);
    if (bytes > 0 && !out) {
        throw std::bad_alloc();
    }
    return out;
}

void Parcel::upload(int32_t n_threads) {
    if (sent_bytes_ == 0) {
        return;
    }
    values_ = room(sent_bytes_);
    parallel_for(n_threads, (int32_t) tasks_.size(), [this](int32_t i, int32_t) { tasks_[(size_t) i](values_.data()); });
    const GgmlContext context = make_context(ggml_tensor_overhead());
    ggml_backend_tensor_set(piece(context.get(), 0, sent_bytes_), values_.data(), 0, sent_bytes_);
    values_ = Pages();
}

void Parcel::download() {
    values_ = room(fetched_bytes_);
    if (values_) {
        const GgmlContext context = make_context(ggml_tensor_overhead());
        ggml_backend_tensor_get(piece(context.get(), sent_bytes_, fetched_bytes_), values_.data(), 0, fetched_bytes_);
    }
}

const float * Parcel::values(const ggml_tensor * t) const {
    const auto * base = (const uint8_t *) ggml_backend_buffer_get_base(buffer_.get()) + sent_bytes_;
    return (const float *) (values_.data() + ((const uint8_t *) t->data - base));
}

}  // namespace kvedge
