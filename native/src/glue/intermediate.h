// Intermediate results of llama.cpp's graphs. Their buffer is as large as the largest graph needs, from the time it is made;
// its pages are taken when they are first written, and between two graphs nobody reads them.

#pragma once

#include <cstddef>

struct ggml_tensor;
struct ggml_backend_buffer;

namespace kvedge {

class Intermediate {
  public:
    // The place of a result of the graph that runs. Only the CPU's own memory is kept in mind.
    void note(const ggml_tensor * result);

    // For whoever knows that the buffer may be moved before the next note().
    void forget() { buffer_ = nullptr; }

    // Gives the pages back, until they are written again; forgets the buffer. Between two graphs. Returns its bytes.
    size_t release();

  private:
    ggml_backend_buffer * buffer_ = nullptr;
};

}  // namespace kvedge
