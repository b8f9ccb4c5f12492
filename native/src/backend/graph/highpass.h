// primitives/dct.h's HighPass as ggml's operations.

#pragma once

#include "backend/graph/parcel.h"

#include <cstdint>

namespace kvedge {

class GraphHighPass {
  public:
    GraphHighPass(int32_t n_tokens, double gamma);

    static bool takes(int32_t n_tokens, double gamma);  // whether its constants are of a reasonable size
    bool        all_pass() const { return kept_ == n_; }  // nothing is taken from anything

    // Of one graph, before all else.
    void prepare(ggml_context * c, Parcel & parcel);

    // Of rows [d, n, heads] f32: [n, 1, heads] mean square of what is taken from each.
    ggml_tensor * deviation(ggml_context * c, ggml_tensor * rows) const;

    // Bytes of memory while rows of one head are measured.
    static size_t work_bytes(int32_t n_tokens, int64_t d) { return 3 * (size_t) n_tokens * (size_t) d * sizeof(float); }

  private:
    int64_t       n_, kept_;
    ggml_tensor * basis_ = nullptr;  // [n, kept]
    ggml_tensor * back_  = nullptr;  // [kept, n]
};

}  // namespace kvedge
