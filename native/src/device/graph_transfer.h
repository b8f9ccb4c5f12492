// GraphTransfer: the inputs and results of one of kvedge's device graphs, side by side in one buffer. Inputs are uploaded in one copy,
// results are downloaded in one copy.

#pragma once

#include "system/pages.h"
#include "device/tensors.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace kvedge {

class GraphTransfer {
  public:
    explicit GraphTransfer(ggml_backend_dev_t device, std::shared_ptr<Worker> worker = nullptr);  // worker: lends memory

    // Adds an input tensor. upload() calls write(values, i) for each i < n_parts, on several threads at a time; call i fills part i
    // of the tensor's values. All that `write` refers to must live until upload() returns.
    template <class X> void send(ggml_tensor * t, const std::function<void(X *, int32_t)> & write, int32_t n_parts = 1) {
        const size_t at = place(t, sent_bytes_);
        sent_.emplace_back(t, at);
        for (int32_t i = 0; i < n_parts; i++) {
            tasks_.push_back([write, at, i](uint8_t * values) { write((X *) (values + at), i); });
        }
    }
    // Adds a result tensor, whose memory becomes part of this buffer.
    void fetch(ggml_tensor * t) { fetched_.emplace_back(t, place(t, fetched_bytes_)); }

    // Takes device memory for all added tensors; call before Worker::make_room. False: the device is out of memory.
    bool allocate();
    void upload(int32_t n_threads);  // writes the inputs and copies them to the device. Throws std::bad_alloc
    void download(int32_t n_threads = 1);  // copies the results to the host. Throws std::bad_alloc

    const float * values(const ggml_tensor * t) const;  // a result after download()
    size_t        sent_bytes() const { return sent_bytes_; }
    size_t        fetched_bytes() const { return fetched_bytes_; }

  private:
    using Places = std::vector<std::pair<ggml_tensor *, size_t>>;

    size_t        place(const ggml_tensor * t, size_t & end) const;
    uint8_t *     room(size_t bytes);  // throws std::bad_alloc
    void          travel(bool there, size_t offset, size_t bytes, int32_t n_threads) const;
    ggml_tensor * piece(ggml_context * context, size_t offset, size_t bytes) const;

    ggml_backend_dev_t                             device_;
    size_t                                         alignment_;
    std::shared_ptr<Worker>                        worker_;
    std::shared_ptr<ggml_backend_buffer>           buffer_;
    Places                                         sent_, fetched_;
    size_t                                         sent_bytes_ = 0, fetched_bytes_ = 0;
    std::vector<std::function<void(uint8_t *)>>    tasks_;
    uint8_t *                                      values_ = nullptr;  // host copy: of the inputs, after download() of the results
    Pages                                          pages_;   // memory of values_, if it is too large for the worker's staging
};

}  // namespace kvedge
