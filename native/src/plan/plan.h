#pragma once

#include "plan/stages.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvedge {

struct GivenWeights;

// By what the critical rule measures projected values (projection.h).
enum class Critical { none, l1, l2 };
const char * name_of(Critical norm);

}  // namespace kvedge

struct kvedge_plan {
    const kvedge::Scorer *       scorer    = nullptr;
    const kvedge::Allocator *    allocator = nullptr;
    const kvedge::Reducer *      reducer   = nullptr;
    const kvedge::DecodePolicy * decode    = nullptr;
    const kvedge::Pruner *       pruner    = nullptr;

    // Values of the members' settings, in the order of their params; by kvedge_stage.
    double params[kvedge::N_STAGES][kvedge::MAX_PARAMS] = {};

    // Profiles of the members that take one, by kvedge_stage. Never changed, so that copies of a plan share them.
    std::shared_ptr<const kvedge::Profile> profiles[kvedge::N_STAGES];

    // Each amount is a ratio of the prompt's tokens (ratio > 0) or a number of KV pairs (ratio = 0).
    double  budget_ratio = 1.0;
    int32_t budget_pairs = 0;
    bool    recent_auto  = true;
    double  recent_ratio = 0.0;
    int32_t recent_pairs = 0;
    int32_t sinks        = 0;

    // Rows of an image that the model reads: a ratio (above 0), or a number.
    double  image_ratio  = 1.0;
    int32_t image_tokens = 0;

    bool text_prior    = false;
    bool keep_all_text = false;  // text_overflow = keep_all

    kvedge::Critical critical = kvedge::Critical::none;
    bool critical_free = false;  // critical_half = free: half of what protection leaves, not of the budget

    // A later message keeps so many tokens at least: a fifth of a short question does not say what is asked.
    int32_t later_floor = 32;

    // How positions turn the queries and keys of arrays; NULL: not at all. Copies of the plan share it.
    std::shared_ptr<const kvedge::Rotation> rotation;

    // What values of arrays are projected by; NULL: it was not given. Copies of the plan share it.
    std::shared_ptr<const kvedge::GivenWeights> projection;

    // Stages of the program's own (custom.h). Copies of the plan share them.
    struct Own {
        kvedge_stage                          stage;
        std::shared_ptr<const kvedge::Member> member;
    };
    std::vector<Own> own;
};

namespace kvedge {

kvedge_plan full_plan();

// What the plan wants gathered while the prompt is read.
Observation plan_observes(const kvedge_plan & plan);
constexpr const char * STAGE_NAMES[] = { "scorer", "allocator", "reducer", "decode", "pruner" };  // by kvedge_stage

// The member chosen for a stage (kvedge_stage).
const Member & plan_member(const kvedge_plan & plan, int32_t stage);

// As kvedge_plan_budget, of n_tokens that follow others.
int32_t later_budget(const kvedge_plan & plan, int32_t n_tokens);

// The plan by which n_tokens are compressed that follow n_before others: of what comes first the plan itself, of a later
// message one whose budget keeps later_floor of them, where it is a share.
kvedge_plan plan_after(const kvedge_plan & plan, int32_t n_before, int32_t n_tokens);

// Whether the output projections of the layers are needed: by the scorer, or by the critical rule.
bool plan_projects(const kvedge_plan & plan);

// The longest prompt that is kept whole, whatever the budget.
int32_t plan_whole(const kvedge_plan & plan);

// Whether the decode policy may take rows out of an answer.
bool plan_evicts(const kvedge_plan & plan);

// How far the plan's allocator looks.
Reach plan_reach(const kvedge_plan & plan);

// Last tokens of a prompt of n_tokens that the plan asks to protect in a head of `kept` pairs; may exceed these, and then
// gives way (select.cpp).
int32_t plan_recent(const kvedge_plan & plan, int32_t n_tokens, int32_t kept);

// Whether the plan's scorer is one that the critical rule can weigh. Errors: KVEDGE_E_ARGUMENT.
kvedge_status check_critical(const kvedge_plan & plan, kvedge_error * err);

}  // namespace kvedge
