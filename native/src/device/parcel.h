// What the host gives to a graph of ours and takes from it: tensors side by side in one buffer, which is sent in one piece and
// fetched in one piece.

#pragma once

#include "system/pages.h"
#include "device/tensors.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace kvedge {

class Parcel {
  public:
    explicit Parcel(ggml_backend_dev_t device, std::shared_ptr<Worker> worker = nullptr);  // whose memory it may use

    // The values of a tensor that no operation makes: write(values, i) fills in a part of them, for each i < n_parts, before they
    // are sent, on several threads at a time. What it refers to must last as long.
    template <class X> void send(ggml_tensor * t, const std::function<void(X *, int32_t)> & write, int32_t n_parts = 1) {
        const size_t at = place(t, sent_bytes_);
        sent_.emplace_back(t, at);
        for (int32_t i = 0; i < n_parts; i++) {
            tasks_.push_back([write, at, i](uint8_t * values) { write((X *) (values + at), i); });
        }
    }
    // The result of an operation, which then lies here and nowhere else.
    void fetch(ggml_tensor * t) { fetched_.emplace_back(t, place(t, fetched_bytes_)); }

    // Memory for all of them on the device, before the graph's own. False: there is none.
    bool allocate();
    void upload(int32_t n_threads);  // what is sent
    void download(int32_t n_threads = 1);  // what was fetched

    const float * values(const ggml_tensor * t) const;  // of a result
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
    uint8_t *                                      values_ = nullptr;  // what is sent, and then what was fetched
    Pages                                          pages_;   // where they lie, if they are many
};

}  // namespace kvedge
