// Profiles: numbers that are calibrated once for a model. Some members need a profile.

#pragma once

#include "plan/plan.h"
#include "rows/rows.h"

#include <cstdint>
#include <vector>

namespace kvedge {

struct Profile {
    int32_t            n_layers  = 0;  // all layers of the model, stored or not
    int32_t            n_columns = 0;
    std::vector<float> values;         // [n_layers][n_columns]
    std::vector<float> budgets;        // [n_columns] ascending ratios, if each column is a budget; empty if each column is a head

    // Returns the [n_columns] values of a layer. il: layer number in the model.
    const float * layer(int32_t il) const { return values.data() + (size_t) il * (size_t) n_columns; }
};

// Texts for one ProfileKind: its name, its columns, and the arguments of `kvedge calibrate` that make it. All NULL for `none`.
struct KindText {
    const char * name;
    const char * columns;
    const char * command;
};

KindText text_of(ProfileKind kind);

// Checks that every member of the plan has the profile that it needs, and that the profile fits a model of n_layers layers
// with the stored layers `shapes`. Errors: KVEDGE_E_ARGUMENT.
kvedge_status check_profiles(
    const kvedge_plan & plan, const std::vector<LayerShape> & shapes, int32_t n_layers, kvedge_error * err);

}  // namespace kvedge
