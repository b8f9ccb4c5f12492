// The list of all built-in members. The build writes it to plan/members.h, from the file names in native/src/members.

#include "plan/members.h"
#include "plan/profile.h"
#include "plan/stages.h"
#include "system/error.h"
#include "system/structs.h"

#include <cstring>

namespace kvedge {

#define DECLARE(Type, stage, name) extern const Type stage##_##name;
KVEDGE_MEMBERS(DECLARE)

namespace {

template <class T> constexpr kvedge_stage STAGE_OF = KVEDGE_STAGE_SCORER;
template <> constexpr kvedge_stage STAGE_OF<Allocator>    = KVEDGE_STAGE_ALLOCATOR;
template <> constexpr kvedge_stage STAGE_OF<Reducer>      = KVEDGE_STAGE_REDUCER;
template <> constexpr kvedge_stage STAGE_OF<DecodePolicy> = KVEDGE_STAGE_DECODE;
template <> constexpr kvedge_stage STAGE_OF<Pruner>       = KVEDGE_STAGE_PRUNER;

struct Registered {
    kvedge_stage   stage;
    const Member * member;
};

#define REGISTERED(Type, stage, name) { STAGE_OF<Type>, &stage##_##name },
const Registered MEMBERS[] = { KVEDGE_MEMBERS(REGISTERED) };

template <class T> const T * find(const char * name) { return static_cast<const T *>(find_member(STAGE_OF<T>, name)); }

}  // namespace

const Member * find_member(kvedge_stage stage, const char * name) {
    if (stage == KVEDGE_STAGE_REDUCER && strcmp(name, "feature") == 0) {
        name = "averaged";  // "feature" is PrefixKV's name (table 12) for LOOK-M's averaged merge
    }
    for (const Registered & r : MEMBERS) {
        if (r.stage == stage && strcmp(r.member->name, name) == 0) {
            return r.member;
        }
    }
    return nullptr;
}

const Scorer *       find_scorer(const char * name) { return find<Scorer>(name); }
const Allocator *    find_allocator(const char * name) { return find<Allocator>(name); }
const Reducer *      find_reducer(const char * name) { return find<Reducer>(name); }
const DecodePolicy * find_decode(const char * name) { return find<DecodePolicy>(name); }
const Pruner *       find_pruner(const char * name) { return find<Pruner>(name); }

}  // namespace kvedge

using namespace kvedge;

extern "C" const char * kvedge_stage_name(kvedge_stage stage, int32_t i) try {
    for (const Registered & r : MEMBERS) {
        if (r.stage == stage && i-- == 0) {
            return r.member->name;
        }
    }
    return nullptr;
} catch (...) {
    return nullptr;
}

extern "C" int32_t kvedge_stage_count(kvedge_stage stage) try {
    int32_t n = 0;
    while (kvedge_stage_name(stage, n)) {
        n++;
    }
    return n;
} catch (...) {
    return 0;
}

extern "C" const kvedge_setting * kvedge_stage_setting(kvedge_stage stage, const char * member, int32_t i) try {
    const Member * m = member ? find_member(stage, member) : nullptr;
    for (const Param * p = m ? m->params : nullptr; p && p->name; p++) {
        if (i-- == 0) {
            return p;
        }
    }
    return nullptr;
} catch (...) {
    return nullptr;
}

namespace {

int32_t count_settings(const Member & m) {
    int32_t n = 0;
    while (m.params && m.params[n].name) {
        n++;
    }
    return n;
}

void state_facts(const Member & m, const double * settings, kvedge_stage_facts & out) {
    Observation seen;
    if (m.observes) {
        m.observes(settings, seen);
    }
    out.profile      = m.profile ? text_of(m.profile(settings)).name : nullptr;
    out.does_without = m.does_without && m.does_without(settings);
    out.whole_up_to  = seen.whole_up_to();
    out.projects     = seen.apart;
    out.queries      = seen.queries;
}

void state_facts(const Scorer & s, const double * settings, kvedge_stage_facts & out) {
    out.recent      = s.auto_recent ? s.auto_recent(out.kept, out.even, settings) : 0;
    out.reserved    = s.reserved ? s.reserved(out.kept, settings) : 0;
    out.attends     = s.scores_are_attention && s.scores_are_attention(settings);
    out.sinks_first = s.sinks_first;
}

}  // namespace

extern "C" kvedge_status kvedge_stage_get_facts(
    kvedge_stage stage, const char * member, const double * settings, int32_t n_settings, kvedge_stage_facts * facts,
    kvedge_error * err) try {
    const Member *     m = member ? find_member(stage, member) : nullptr;
    kvedge_stage_facts own{};
    if (!m || n_settings != count_settings(*m) || (n_settings > 0 && !settings) || !read_struct(facts, own)) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_stage_get_facts: the member is unknown, n_settings is wrong, settings is NULL, or "
                    "struct_size of facts is not set");
    }
    state_facts(*m, settings, own);
    if (stage == KVEDGE_STAGE_SCORER) {
        state_facts(static_cast<const Scorer &>(*m), settings, own);
    }
    write_struct(own, facts, facts->struct_size);
    return ok(err);
} catch (...) {
    return caught(err, "get the facts of a stage");
}
