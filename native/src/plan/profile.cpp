#include "plan/profile.h"

#include "system/error.h"

#include <algorithm>
#include <cmath>
#include <memory>

namespace kvedge {

KindText text_of(ProfileKind kind) {
    switch (kind) {
        case ProfileKind::visual_heads:    return { "visual-heads", "query heads", "heads" };
        case ProfileKind::retrieval_heads: return { "retrieval-heads", "query heads", "heads --kind retrieval" };
        case ProfileKind::redundancy:      return { "key-redundancy", "KV heads", "heads --kind redundancy" };
        case ProfileKind::head_budgets:    return { "head-budgets", "KV heads", "budgets" };
        case ProfileKind::prefix:          return { "prefix", "kept shares by budget", "prefix" };
        default:                           return {};
    }
}

namespace {

constexpr int32_t LARGEST_PROFILE = 1 << 16;  // most layers and most columns; far more than any model has

ProfileKind kind_of(const kvedge_plan & plan, int32_t stage) {
    const Member & m = plan_member(plan, stage);
    return m.profile ? m.profile(plan.params[stage]) : ProfileKind::none;
}

bool ascending_shares(const std::vector<float> & budgets) {
    for (size_t i = 0; i < budgets.size(); i++) {
        if (!(budgets[i] > (i ? budgets[i - 1] : 0.0f) && budgets[i] <= 1.0f)) {
            return false;
        }
    }
    return true;
}

int32_t most_heads(const std::vector<LayerShape> & shapes, ProfileKind kind) {
    int32_t most = 0;
    for (const LayerShape & s : shapes) {
        most = std::max(most, kind == ProfileKind::visual_heads || kind == ProfileKind::retrieval_heads ? s.n_heads : s.n_heads_kv);
    }
    return most;
}

// Returns whether any stored KV head has a share above 0. Without one, the pairs cannot be shared out.
bool any_share(const Profile & p, const std::vector<LayerShape> & shapes) {
    return std::any_of(shapes.begin(), shapes.end(), [&](const LayerShape & s) {
        const float * row = p.layer(s.il);
        return std::any_of(row, row + s.n_heads_kv, [](float x) { return x > 0.0f; });
    });
}

kvedge_status check_numbers(
    const Profile & p, const char * who, ProfileKind kind, const std::vector<LayerShape> & shapes, kvedge_error * err) {
    const bool above = std::any_of(p.values.begin(), p.values.end(), [](float x) { return x > 1.0f; });
    if (kind == ProfileKind::redundancy && above) {
        return fail(err, KVEDGE_E_ARGUMENT, "the profile of %s holds numbers above 1; use a profile with redundancies in [0, 1]", who);
    }
    if (kind == ProfileKind::head_budgets && !any_share(p, shapes)) {
        return fail(err, KVEDGE_E_ARGUMENT, "the profile of %s has no share above 0 for any stored layer; use a profile of this model",
                    who);
    }
    return KVEDGE_OK;
}

kvedge_status check_shape(
    const Profile & p, const char * who, ProfileKind kind, const std::vector<LayerShape> & shapes, int32_t n_layers,
    kvedge_error * err) {
    const bool     heads = kind != ProfileKind::prefix;
    const KindText text  = text_of(kind);
    if (heads != p.budgets.empty()) {
        return fail(err, KVEDGE_E_ARGUMENT, "%s needs a profile of %s%s", who, text.columns, heads ? ", without budgets" : "");
    }
    if (p.n_layers != n_layers) {
        return fail(err, KVEDGE_E_ARGUMENT, "the profile of %s belongs to another model: the profile has %d layers, the model has %d; use "
                    "a profile of this model", who, p.n_layers, n_layers);
    }
    if (const int32_t most = most_heads(shapes, kind); heads && p.n_columns != most) {
        return fail(err, KVEDGE_E_ARGUMENT, "the profile of %s belongs to another model: the profile has %d %s per layer, the model has "
                    "%d; use a profile of this model", who, p.n_columns, text.columns, most);
    }
    return check_numbers(p, who, kind, shapes, err);
}

}  // namespace

kvedge_status check_profiles(
    const kvedge_plan & plan, const std::vector<LayerShape> & shapes, int32_t n_layers, kvedge_error * err) {
    for (int32_t stage = 0; stage < N_STAGES; stage++) {
        const ProfileKind kind = kind_of(plan, stage);
        if (kind == ProfileKind::none) {
            continue;
        }
        const Member & m    = plan_member(plan, stage);
        const char *   name = m.name;
        if (!plan.profiles[stage] && m.does_without && m.does_without(plan.params[stage])) {
            continue;
        }
        if (!plan.profiles[stage]) {
            return fail(err, KVEDGE_E_ARGUMENT, "%s '%s' needs a profile of the model; make a profile with `kvedge calibrate %s`",
                        STAGE_NAMES[stage], name, text_of(kind).command);
        }
        if (const auto status = check_shape(*plan.profiles[stage], name, kind, shapes, n_layers, err); status != KVEDGE_OK) {
            return status;
        }
    }
    return KVEDGE_OK;
}

}  // namespace kvedge

using namespace kvedge;

extern "C" kvedge_status kvedge_plan_set_profile(
    kvedge_plan * plan, kvedge_stage stage, const float * values, const float * budgets, int32_t n_layers, int32_t n_columns,
    kvedge_error * err) try {
    if (!plan || stage < KVEDGE_STAGE_SCORER || stage > KVEDGE_STAGE_DECODE) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_plan_set_profile: plan is NULL, or stage is unknown");
    }
    if (!values) {
        plan->profiles[stage].reset();
        return ok(err);
    }
    const Member & m = plan_member(*plan, stage);
    if (!m.profile) {
        return fail(err, KVEDGE_E_ARGUMENT, "%s '%s' takes no profile; omit the profile", STAGE_NAMES[stage], m.name);
    }
    if (n_layers < 1 || n_columns < 1 || n_layers > LARGEST_PROFILE || n_columns > LARGEST_PROFILE) {
        return fail(err, KVEDGE_E_ARGUMENT, "a profile cannot have %d layers and %d columns; use 1 to 65536 of each", n_layers, n_columns);
    }
    auto p       = std::make_shared<Profile>();
    p->n_layers  = n_layers;
    p->n_columns = n_columns;
    p->values.assign(values, values + (size_t) n_layers * (size_t) n_columns);
    if (budgets) {
        p->budgets.assign(budgets, budgets + n_columns);
    }
    if (!ascending_shares(p->budgets)) {
        return fail(err, KVEDGE_E_ARGUMENT, "the budgets of a profile must be ascending shares in (0, 1]");
    }
    const float most = budgets ? 1.0f : HUGE_VALF;
    if (std::any_of(p->values.begin(), p->values.end(), [&](float x) { return !(x >= 0.0f && x <= most) || std::isinf(x); })) {
        return fail(err, KVEDGE_E_ARGUMENT, "the values of a profile must be %s",
                    budgets ? "shares in [0, 1]" : "finite and not negative");
    }
    plan->profiles[stage] = std::move(p);
    return ok(err);
} catch (...) {
    return caught(err, "set the profile");
}
