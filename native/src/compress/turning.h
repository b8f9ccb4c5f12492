#pragma once

#include "plan/plan.h"
#include "rows/rows.h"

#include <vector>

namespace kvedge {

// Checks that every layer's rotation [layer] is known, if the plan's scorer turns queries back by their positions.
// Errors: KVEDGE_E_UNSUPPORTED (with the first layer of unknown rotation and the reason), KVEDGE_E_ARGUMENT (too many channels).
kvedge_status check_rotations(
    const kvedge_plan & plan, const std::vector<LayerShape> & shapes, const Rotations & rotations, kvedge_error * err);

}  // namespace kvedge
