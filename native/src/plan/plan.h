#pragma once

#include "plan/stages.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvedge {

struct GivenWeights;

// The norm by which the critical rule measures projected values (compress/projection.h).
enum class Critical { none, l1, l2 };
const char * name_of(Critical norm);

}  // namespace kvedge

struct kvedge_plan {
    const kvedge::Scorer *       scorer    = nullptr;
    const kvedge::Allocator *    allocator = nullptr;
    const kvedge::Reducer *      reducer   = nullptr;
    const kvedge::DecodePolicy * decode    = nullptr;
    const kvedge::Pruner *       pruner    = nullptr;

    // [kvedge_stage][setting] values of the members' settings, in the order of Member::params.
    double params[kvedge::N_STAGES][kvedge::MAX_PARAMS] = {};

    // [kvedge_stage] profiles of the members, or NULL. A profile never changes, so copies of a plan share it.
    std::shared_ptr<const kvedge::Profile> profiles[kvedge::N_STAGES];

    // Budget and recent are each a ratio of the prompt's tokens (ratio > 0) or a number of KV pairs (ratio = 0).
    double  budget_ratio = 1.0;
    int32_t budget_pairs = 0;
    bool    recent_auto  = true;
    double  recent_ratio = 0.0;
    int32_t recent_pairs = 0;
    int32_t sinks        = 0;

    // Image rows that the pruner keeps for the model: a ratio (ratio > 0) or a number of rows (ratio = 0).
    double  image_ratio  = 1.0;
    int32_t image_tokens = 0;

    bool text_prior    = false;
    bool keep_all_text = false;  // text_overflow = keep_all

    kvedge::Critical critical = kvedge::Critical::none;
    bool critical_free = false;  // critical_half = free: half of the unprotected pairs; else half of the budget

    // Fewest tokens that a later message keeps if the budget is a ratio. A fifth of a short question would lose its meaning.
    int32_t later_floor = 32;

    // The rotary encoding of the queries and keys of arrays; NULL: none. Copies of the plan share it.
    std::shared_ptr<const kvedge::Rotation> rotation;

    // The output projection for the values of arrays; NULL: not given. Copies of the plan share it.
    std::shared_ptr<const kvedge::GivenWeights> projection;

    // Custom stages that the program added (plan/custom.h). Copies of the plan share them.
    struct Own {
        kvedge_stage                          stage;
        std::shared_ptr<const kvedge::Member> member;
    };
    std::vector<Own> own;
};

namespace kvedge {

// Returns the default plan, which keeps every KV pair.
kvedge_plan full_plan();
// Returns the quantities that the plan's members need from the prompt's attention.
Observation plan_observes(const kvedge_plan & plan);
constexpr const char * STAGE_NAMES[] = { "scorer", "allocator", "reducer", "decode", "pruner" };  // [kvedge_stage]

// Returns the member that the plan uses for a stage (kvedge_stage).
const Member & plan_member(const kvedge_plan & plan, int32_t stage);

// Returns the budget (KV pairs per head) for a later message of n_tokens. A budget ratio keeps at least later_floor tokens.
int32_t later_budget(const kvedge_plan & plan, int32_t n_tokens);

// Returns the plan that compresses n_tokens after n_before older tokens: a copy of `plan`, but for n_before > 0 a budget ratio
// keeps at least later_floor tokens.
kvedge_plan plan_after(const kvedge_plan & plan, int32_t n_before, int32_t n_tokens);

// Returns whether the scorer or the critical rule needs the output projections of the layers.
bool plan_projects(const kvedge_plan & plan);

// Returns the longest prompt, in tokens, that stays whole under any budget.
int32_t plan_whole(const kvedge_plan & plan);

// Returns whether the decode policy may drop rows during an answer.
bool plan_evicts(const kvedge_plan & plan);

// Returns the data that the plan's allocator reads.
Reach plan_reach(const kvedge_plan & plan);

// Returns the number of last tokens that the plan asks to protect in a head that keeps `kept` of n_tokens. The result may be
// larger than `kept`; fit_protection (compress/select.cpp) limits it.
int32_t plan_recent(const kvedge_plan & plan, int32_t n_tokens, int32_t kept);

// Checks that the critical rule can weigh the scores of the plan's scorer. Errors: KVEDGE_E_ARGUMENT.
kvedge_status check_critical(const kvedge_plan & plan, kvedge_error * err);

}  // namespace kvedge
