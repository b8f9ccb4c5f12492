// What values add to the residual stream: the output projection W_O of each layer, and the critical rule that weighs scores
// by it (CriticalKV, Feng et al. 2025, arXiv:2502.03805).

#pragma once

#include "system/pages.h"
#include "rows/rows.h"
#include "plan/pending.h"
#include "plan/plan.h"
#include "plan/weights.h"

#include <memory>
#include <string>
#include <vector>

namespace kvedge {

// The weights of a context's layers, and what was computed of them once. For one thread at a time.
class Projections {
  public:
    explicit Projections(std::shared_ptr<const OutputWeights> weights) : weights_(std::move(weights)) {}

    const OutputWeights & weights() const { return *weights_; }

    // [H][T] how long the pending values of a layer are once each query head h projects them, |v W_O[h]|, by a norm. Throws
    // std::bad_alloc, StageFailure.
    Bulk<float> lengths(const PendingView & view, size_t layer, const LayerShape & shape, Critical norm, int32_t n_threads);

    // out [Hkv][T]: how long the pending values of a layer are once they are projected, v W_O[h], by the plan's norm; mean
    // of the query heads of a KV head. Throws std::bad_alloc, StageFailure.
    void weigh(const PendingView & view, size_t layer, const LayerShape & shape, Critical norm, int32_t n_threads, Bulk<float> & out);

    uint64_t bytes() const;  // of what is kept

  private:
    using Grams = std::vector<float>;  // [H][d_v (d_v + 1) / 2] the lower triangles of W_O[h] W_O[h]', row by row

    const Grams & grams(size_t layer, const LayerShape & shape, int32_t n_threads);

    std::shared_ptr<const OutputWeights> weights_;
    std::vector<Grams>                   grams_;  // [layer] those that were asked for
};

// Whether the weights that a plan's scorer or critical rule asks for are there. projections: NULL where there are none at all.
// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_UNSUPPORTED, with the layer and what it lacks.
kvedge_status check_projections(
    const kvedge_plan & plan, const std::vector<LayerShape> & shapes, const Projections * projections, kvedge_error * err);

}  // namespace kvedge
