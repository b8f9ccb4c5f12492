// The output projections W_O of a model's layers. The critical rule, and scorer `replay` with `projected`, read them.

#pragma once

#include "rows/rows.h"

#include <cstdint>
#include <string>
#include <vector>

namespace kvedge {

// A source of W_O. `layer` is the index among the stored layers.
class OutputWeights {
  public:
    virtual ~OutputWeights() = default;
    // Returns the reason why the W_O of a layer cannot be used; empty: it can be used.
    virtual std::string unusable(size_t layer, const LayerShape & shape) const = 0;
    // Returns D, the width of the residual stream.
    virtual int32_t width(size_t layer) const = 0;
    // Writes the W_O of a layer to out [D][H * d_v]. Throws std::bad_alloc, StageFailure.
    virtual void read(size_t layer, int32_t n_threads, float * out) const = 0;
};

// The W_O that a program gives to kvedge_plan_set_projection for arrays.
struct GivenWeights : OutputWeights {
    int32_t            n_layers = 0, n_heads = 0, d_v = 0, n_width = 0;
    std::vector<float> values;  // [L][D][H * d_v]

    std::string unusable(size_t layer, const LayerShape & shape) const override;
    int32_t     width(size_t) const override { return n_width; }
    void        read(size_t layer, int32_t n_threads, float * out) const override;
};

}  // namespace kvedge
