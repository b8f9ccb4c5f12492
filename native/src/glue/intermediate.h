// Intermediate results of llama.cpp's graphs. Their buffer is as large as the largest graph needs. The system gives a page of the buffer
// when the page is first written. Between two graphs nobody reads the buffer.

#pragma once

#include <cstddef>

struct ggml_tensor;
struct ggml_backend_buffer;

namespace kvedge {

class Intermediate {
  public:
    // Remembers the buffer of a result of the running graph, if the buffer is in the CPU's own memory.
    void note(const ggml_tensor * result);

    // Forgets the buffer. Call this function if the buffer may move before the next note().
    void forget() { buffer_ = nullptr; }

    // Returns the buffer's pages to the system and forgets the buffer. Call between two graphs. Returns the size of the buffer.
    size_t release();

  private:
    ggml_backend_buffer * buffer_ = nullptr;
};

}  // namespace kvedge
