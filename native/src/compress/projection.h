// The output projection W_O of each layer, which maps values to the residual stream, and the weights of the critical rule
// (CriticalKV, Feng et al. 2025, arXiv:2502.03805).

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

// The output projections of a context's layers, and a cache of their Gram matrices. For one thread at a time.
class Projections {
  public:
    explicit Projections(std::shared_ptr<const OutputWeights> weights) : weights_(std::move(weights)) {}

    const OutputWeights & weights() const { return *weights_; }

    // Returns [H][T]: the norm of v W_O[h] for each query head h and each pending value v of a layer. Throws std::bad_alloc,
    // StageFailure.
    Bulk<float> lengths(const PendingView & view, size_t layer, const LayerShape & shape, Critical norm, int32_t n_threads);

    // Writes out [Hkv][T]: the mean of lengths() over the query heads of each KV head. The caller sizes `out`.
    // Throws std::bad_alloc, StageFailure.
    void weigh(const PendingView & view, size_t layer, const LayerShape & shape, Critical norm, int32_t n_threads, Bulk<float> & out);

    uint64_t bytes() const;  // of the cached Gram matrices

  private:
    using Grams = std::vector<float>;  // [H][d_v (d_v + 1) / 2] lower triangles of W_O[h] W_O[h]', row by row

    const Grams & grams(size_t layer, const LayerShape & shape, int32_t n_threads);

    std::shared_ptr<const OutputWeights> weights_;
    std::vector<Grams>                   grams_;  // [layer] empty until the first use
};

// Checks that the output projections exist, if the plan's scorer or critical rule needs them. projections: may be NULL.
// Errors: KVEDGE_E_ARGUMENT (no projections), KVEDGE_E_UNSUPPORTED (with the layer and the reason).
kvedge_status check_projections(
    const kvedge_plan & plan, const std::vector<LayerShape> & shapes, const Projections * projections, kvedge_error * err);

}  // namespace kvedge
