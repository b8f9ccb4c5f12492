// Stages of the program's own: what kvedge_plan_add_scorer and its like were given, as members that the rest of the
// library calls like any other.

#pragma once

#include "plan/plan.h"
#include "plan/stages.h"

#include <list>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvedge {

// A stage of the program's own failed. Thrown inside the library only: compress_pending makes a status of it.
struct StageFailure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A stage and the texts that it points to. Its address must not change.
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

// Whether the stage may only be called on the thread that asked for the compression.
inline bool own_thread_only(const Scorer & s) { return s.custom && !s.custom->given.thread_safe; }
inline bool own_thread_only(const Reducer & r) { return r.custom && !r.custom->given.thread_safe; }

// The member of that name that the plan can use: one of the library's or one of its own; NULL if there is none.
const Member * known_member(const kvedge_plan & plan, kvedge_stage stage, const char * name);

}  // namespace kvedge
