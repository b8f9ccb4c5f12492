#include "device/graph_transfer.h"

#include "system/threads.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace kvedge {

namespace {

constexpr size_t SMALL = 1 << 20;   // bytes below which several threads are not worth their start
constexpr size_t PIECE = 4 << 20;   // bytes of the staging memory that the worker keeps

}  // namespace

GraphTransfer::GraphTransfer(ggml_backend_dev_t device, std::shared_ptr<Worker> worker)
    : device_(device), alignment_(ggml_backend_buft_get_alignment(ggml_backend_dev_buffer_type(device))), worker_(std::move(worker)) {}

size_t GraphTransfer::place(const ggml_tensor * t, size_t & end) const {
    const size_t at = end;
    end             = (at + ggml_nbytes(t) + alignment_ - 1) / alignment_ * alignment_;
    return at;
}

bool GraphTransfer::allocate() {
    Worker own;
    buffer_ = (worker_ ? *worker_ : own).lend(device_, sent_bytes_ + fetched_bytes_ + alignment_);
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

ggml_tensor * GraphTransfer::piece(ggml_context * context, size_t offset, size_t bytes) const {
    ggml_tensor * all = ggml_new_tensor_1d(context, GGML_TYPE_I8, (int64_t) bytes);
    ggml_backend_tensor_alloc(buffer_.get(), all, (uint8_t *) ggml_backend_buffer_get_base(buffer_.get()) + offset);
    return all;
}

// Returns host memory: staging memory for few bytes, else fresh pages, which are large where the system has large pages.
uint8_t * GraphTransfer::room(size_t bytes) {
    if (worker_ && bytes <= PIECE) {
        return worker_->staging.room(device_, ggml_backend_dev_host_buffer_type(device_) ? PIECE : bytes);
    }
    pages_ = Pages::take(bytes);
    if (!pages_) {
        throw std::bad_alloc();
    }
    return pages_.data();
}

// Copies `bytes` bytes at `offset` of the buffer to the device (there) or back. Large copies go through staging memory piece by piece,
// as a device copies pinned memory at full speed.
void GraphTransfer::travel(bool there, size_t offset, size_t bytes, int32_t n_threads) const {
    const bool        direct  = !worker_ || !pages_ || !ggml_backend_dev_host_buffer_type(device_);
    uint8_t * const   between = direct ? nullptr : worker_->staging.room(device_, PIECE);
    const GgmlContext context = make_context((bytes / PIECE + 1) * ggml_tensor_overhead());
    for (size_t at = 0, n = 0; at < bytes; at += n) {
        n = direct ? bytes : std::min(PIECE, bytes - at);
        ggml_tensor * const part  = piece(context.get(), offset + at, n);
        const auto          copied = [&](int32_t i, int32_t) {
            const size_t first = (size_t) i * SMALL, some = std::min(SMALL, n - first);
            std::memcpy(there ? between + first : values_ + at + first, there ? values_ + at + first : between + first, some);
        };
        const auto copy = [&] { parallel_for(n_threads, direct ? 0 : (int32_t) ((n + SMALL - 1) / SMALL), copied); };
        if (there) {
            copy();
            ggml_backend_tensor_set(part, direct ? values_ : between, 0, n);
        } else {
            ggml_backend_tensor_get(part, direct ? values_ : between, 0, n);
            copy();
        }
    }
}

void GraphTransfer::upload(int32_t n_threads) {
    if (sent_bytes_ == 0) {
        return;
    }
    values_ = room(sent_bytes_);
    parallel_for(sent_bytes_ < SMALL ? 1 : n_threads, (int32_t) tasks_.size(), [this](int32_t i, int32_t) { tasks_[(size_t) i](values_); });
    travel(true, 0, sent_bytes_, n_threads);
    pages_ = Pages();
}

void GraphTransfer::download(int32_t n_threads) {
    if (fetched_bytes_ > 0) {
        values_ = room(fetched_bytes_);
        travel(false, sent_bytes_, fetched_bytes_, n_threads);
    }
}

const float * GraphTransfer::values(const ggml_tensor * t) const {
    const auto * base = (const uint8_t *) ggml_backend_buffer_get_base(buffer_.get()) + sent_bytes_;
    return (const float *) (values_ + ((const uint8_t *) t->data - base));
}

}  // namespace kvedge
