// Custom stages: the program adds them with kvedge_plan_add_scorer, _add_allocator or _add_reducer. Each one is stored as a
// member, so that the library calls it like a built-in stage.

#pragma once

#include "plan/plan.h"
#include "plan/stages.h"

#include <list>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvedge {

// A custom stage or an output projection failed. Only thrown inside the library: the public functions return KVEDGE_E_STAGE.
struct StageFailure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A custom stage, the struct that the program gave, and copies of the texts in it. Must not move: `member` points into it.
template <class M, class G> struct Custom {
    Custom()                           = default;
    Custom(const Custom &)             = delete;
    Custom & operator=(const Custom &) = delete;

    M                      member{};
    G                      given{};
    std::vector<Param>     params;
    std::list<std::string> texts;
};

struct CustomScorer : Custom<Scorer, kvedge_custom_scorer> {};
struct CustomAllocator : Custom<Allocator, kvedge_custom_allocator> {};
struct CustomReducer : Custom<Reducer, kvedge_custom_reducer> {};

// Returns whether the stage must run on the thread that called the compression.
inline bool own_thread_only(const Scorer & s) { return s.custom && !s.custom->given.thread_safe; }
inline bool own_thread_only(const Reducer & r) { return r.custom && !r.custom->given.thread_safe; }

// Returns the member `name` of a stage: a custom member of the plan, or a built-in member. NULL: no member has this name.
const Member * known_member(const kvedge_plan & plan, kvedge_stage stage, const char * name);

}  // namespace kvedge
