// Whether a plan's scorer, which turns queries back, can know how.

#pragma once

#include "plan/plan.h"
#include "rows/rows.h"

#include <vector>

namespace kvedge {

// rotations: by layer, as shapes. Errors: KVEDGE_E_UNSUPPORTED, with the first layer whose rotation is not known, and why.
kvedge_status check_rotations(
    const kvedge_plan & plan, const std::vector<LayerShape> & shapes, const Rotations & rotations, kvedge_error * err);

}  // namespace kvedge
