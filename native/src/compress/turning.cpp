#include "compress/turning.h"

#include "system/error.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

constexpr int32_t LARGEST_ROTATION = 4096;  // most pairs of channels

kvedge_status check_rotations(
    const kvedge_plan & plan, const std::vector<LayerShape> & shapes, const Rotations & rotations, kvedge_error * err) {
    for (size_t l = 0; l < shapes.size() && plan_observes(plan).moments >= 0; l++) {
        const Rotation & rotation = rotations[l];
        if (!rotation.unknown.empty()) {
            return fail(err, KVEDGE_E_UNSUPPORTED, "scorer '%s' must remove the positions from queries, but in layer %d %s; use another "
                        "scorer", plan.scorer->name, shapes[l].il, rotation.unknown.c_str());
        }
        if (2 * rotation.angles.size() > (size_t) shapes[l].d_k) {
            return fail(err, KVEDGE_E_ARGUMENT, "a rotation of %zu channels does not fit heads of %d numbers; pass fewer angles",
                        2 * rotation.angles.size(), shapes[l].d_k);
        }
    }
    return ok(err);
}

}  // namespace kvedge

using namespace kvedge;

extern "C" kvedge_status kvedge_plan_set_rotation(
    kvedge_plan * plan, kvedge_pairs pairs, const double * angles, int32_t n, kvedge_error * err) try {
    if (!plan || (pairs != KVEDGE_PAIRS_NORM && pairs != KVEDGE_PAIRS_NEOX)) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_plan_set_rotation: plan is NULL, or pairs is neither KVEDGE_PAIRS_NORM nor "
                    "KVEDGE_PAIRS_NEOX");
    }
    if (!angles) {
        plan->rotation.reset();
        return ok(err);
    }
    if (n < 0 || n > LARGEST_ROTATION || !std::all_of(angles, angles + n, [](double x) { return std::isfinite(x); })) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_plan_set_rotation: the angles are invalid; pass 0 to %d angles, all finite",
                    LARGEST_ROTATION);
    }
    auto rotation    = std::make_shared<Rotation>();
    rotation->halves = pairs == KVEDGE_PAIRS_NEOX;
    rotation->angles.assign(angles, angles + n);
    plan->rotation = std::move(rotation);
    return ok(err);
} catch (...) {
    return caught(err, "set the rotation");
}
