// The output projections W_O of a model's layers, as the critical rule and scorer `replay` with `projected` ask for them.

#pragma once

#include "rows/rows.h"

#include <cstdint>
#include <string>
#include <vector>

namespace kvedge {

// Where the W_O of the layers lie. Layers count as the stored ones do.
class OutputWeights {
  public:
    virtual ~OutputWeights() = default;
    // Why those of a layer cannot be used; empty: they can.
    virtual std::string unusable(size_t layer, const LayerShape & shape) const = 0;
    // D, numbers of a row of the residual stream.
    virtual int32_t width(size_t layer) const = 0;
    // out [D][H * d_v]: a row for each number of the residual stream. Throws std::bad_alloc, StageFailure.
    virtual void read(size_t layer, int32_t n_threads, float * out) const = 0;
};

// The arrays' own, as kvedge_plan_set_projection was given them.
struct GivenWeights : OutputWeights {
    int32_t            n_layers = 0, n_heads = 0, d_v = 0, n_width = 0;
    std::vector<float> values;  // [L][D][H * d_v]

    std::string unusable(size_t layer, const LayerShape & shape) const override;
    int32_t     width(size_t) const override { return n_width; }
    void        read(size_t layer, int32_t n_threads, float * out) const override;
};

}  // namespace kvedge
