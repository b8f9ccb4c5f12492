// Profiles: numbers that were calibrated once for a model, and that some members need beside the prompt.

#pragma once

#include "plan/plan.h"
#include "rows/rows.h"

#include <cstdint>
#include <vector>

namespace kvedge {

struct Profile {
    int32_t            n_layers  = 0;  // of the model, whether stored or not
    int32_t            n_columns = 0;
    std::vector<float> values;         // [n_layers][n_columns]
    std::vector<float> budgets;        // [n_columns] ascending, where columns are budgets; empty where they are heads

    // il: layer number in the model.
    const float * layer(int32_t il) const { return values.data() + (size_t) il * (size_t) n_columns; }
};

// A kind's name, what the columns of a profile of it are, and the arguments of `kvedge calibrate` that make one. none: all NULL.
struct KindText {
    const char * name;
    const char * columns;
    const char * command;
};

KindText text_of(ProfileKind kind);

// Whether every chosen member has the profile that it needs, in the shape of a model of n_layers layers whose stored
// ones are `shapes`. Errors: KVEDGE_E_ARGUMENT.
kvedge_status check_profiles(
    const kvedge_plan & plan, const std::vector<LayerShape> & shapes, int32_t n_layers, kvedge_error * err);

}  // namespace kvedge
