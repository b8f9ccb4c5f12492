#include "plan/plan.h"

#include "plan/custom.h"
#include "system/error.h"
#include "plan/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <locale>
#include <new>
#include <sstream>
#include <string>

namespace kvedge {

kvedge_plan full_plan() {
    kvedge_plan p{};
    p.scorer       = find_scorer("position");
    p.allocator    = find_allocator("uniform");
    p.reducer      = find_reducer("evict");
    p.decode       = find_decode("keep-all");
    p.pruner       = find_pruner("none");
    p.budget_ratio = 1.0;
    p.recent_auto  = true;
    return p;
}

namespace {

int32_t share(double ratio, int32_t n_tokens) { return (int32_t) std::floor(ratio * n_tokens + 1e-9); }

// A number of KV pairs or a ratio. A text with a decimal point or an exponent is a ratio: "16" is a number, "0.1" a ratio.
struct Amount {
    bool    is_ratio;
    double  ratio;
    int32_t pairs;
};

bool parse_amount(const char * text, Amount & out) {
    // A stream with the classic locale, because strtod depends on the application's locale ("0,2" in Europe).
    std::istringstream in(text);
    in.imbue(std::locale::classic());
    out          = {};
    out.is_ratio = strpbrk(text, ".eE") != nullptr;
    if (out.is_ratio) {
        in >> std::noskipws >> out.ratio;
    } else {
        in >> std::noskipws >> out.pairs;
    }
    return !in.fail() && in.peek() == std::istringstream::traits_type::eof() && std::isfinite(out.ratio);
}

// Parses true, 1, false or 0. Returns false and does not change `out` for any other text.
bool parse_bool(const char * text, bool & out) {
    const bool yes = !strcmp(text, "true") || !strcmp(text, "1"), no = !strcmp(text, "false") || !strcmp(text, "0");
    out            = yes || (out && !no);
    return yes || no;
}

std::string members(const kvedge_plan & plan, kvedge_stage stage) {
    std::string list;
    for (int32_t i = 0; const char * name = kvedge_stage_name(stage, i); i++) {
        list += (i ? ", " : "") + std::string(name);
    }
    for (const auto & own : plan.own) {
        list += own.stage == stage ? ", " + std::string(own.member->name) : "";
    }
    return list;
}

// Sets the member of a stage and its default settings, and removes the old member's profile.
kvedge_status set_stage(kvedge_plan & plan, kvedge_stage stage, const char * value, kvedge_error * err) {
    const Member * found = known_member(plan, stage, value);
    if (!found) {
        return fail(err, KVEDGE_E_UNKNOWN, "no %s named '%s'; there are: %s", STAGE_NAMES[stage], value, members(plan, stage).c_str());
    }
    switch (stage) {
        case KVEDGE_STAGE_SCORER:    plan.scorer = static_cast<const Scorer *>(found); break;
        case KVEDGE_STAGE_ALLOCATOR: plan.allocator = static_cast<const Allocator *>(found); break;
        case KVEDGE_STAGE_REDUCER:   plan.reducer = static_cast<const Reducer *>(found); break;
        case KVEDGE_STAGE_DECODE:    plan.decode = static_cast<const DecodePolicy *>(found); break;
        case KVEDGE_STAGE_PRUNER:    plan.pruner = static_cast<const Pruner *>(found); break;
    }
    plan.profiles[stage].reset();
    for (int32_t i = 0; found->params && found->params[i].name; i++) {
        plan.params[stage][i] = found->params[i].fallback;
    }
    return ok(err);
}

// Returns the index of `word` in a list such as "a,b,c", or -1.
int32_t choice_of(const char * choices, const std::string & word) {
    std::istringstream list(choices);
    std::string        item;
    for (int32_t i = 0; std::getline(list, item, ','); i++) {
        if (item == word) {
            return i;
        }
    }
    return -1;
}

kvedge_status set_param(double & slot, const Param & p, const std::string & key, const char * value, kvedge_error * err) {
    if (p.choices) {
        const int32_t i = choice_of(p.choices, value);
        slot            = i < 0 ? slot : i;
        return i >= 0 ? ok(err) : fail(err, KVEDGE_E_ARGUMENT, "%s must be one of %s, not '%s'", key.c_str(), p.choices, value);
    }
    Amount a;
    if (!parse_amount(value, a) || (p.step > 0 && a.is_ratio)) {
        return fail(err, KVEDGE_E_ARGUMENT, "%s '%s' is not a %snumber", key.c_str(), value, p.step > 0 ? "whole " : "");
    }
    const double x = a.is_ratio ? a.ratio : a.pairs;
    if (x < p.lowest || x > p.highest || (p.step > 1 && std::fmod(x - p.lowest, p.step) != 0.0)) {
        const std::string steps = p.step > 1 ? " in steps of " + std::to_string(p.step) : "";
        return fail(err, KVEDGE_E_ARGUMENT, "%s %s is out of range; use a number in [%g, %g]%s", key.c_str(), value, p.lowest, p.highest,
                    steps.c_str());
    }
    slot = x;
    return ok(err);
}

// Sets a setting of a stage's member. key: STAGE.SETTING, such as "scorer.window".
kvedge_status set_member_param(kvedge_plan & plan, const std::string & key, const char * value, kvedge_error * err) {
    const size_t dot = key.find('.');
    for (int32_t stage = 0; stage < N_STAGES; stage++) {
        if (key.compare(0, dot, STAGE_NAMES[stage]) != 0) {
            continue;
        }
        const Member & m = plan_member(plan, stage);
        std::string    names;
        for (int32_t i = 0; m.params && m.params[i].name; i++) {
            if (key.substr(dot + 1) == m.params[i].name) {
                return set_param(plan.params[stage][i], m.params[i], key, value, err);
            }
            names += (i ? ", " : "") + std::string(m.params[i].name);
        }
        return fail(err, KVEDGE_E_UNKNOWN, "%s '%s' has no setting '%s'; there are: %s", STAGE_NAMES[stage], m.name,
                    key.c_str() + dot + 1, names.empty() ? "none" : names.c_str());
    }
    return fail(err, KVEDGE_E_UNKNOWN, "a plan has no setting '%s'; settings of members start with scorer., allocator., reducer., "
                "decode. or pruner.", key.c_str());
}

// A setting whose value is a ratio of the tokens or a number of KV pairs or tokens.
struct AmountKey {
    const char * name;
    const char * use;   // examples for the error message
    const char * unit;  // unit of the number
    int32_t      least;
    double kvedge_plan::*  ratio;
    int32_t kvedge_plan::* number;
};

const AmountKey AMOUNTS[] = {
    { "budget", "a ratio like 0.2 or KV pairs like 128", "KV pairs", 1, &kvedge_plan::budget_ratio, &kvedge_plan::budget_pairs },
    { "image_tokens", "a ratio like 0.5 or tokens like 288", "tokens", 1, &kvedge_plan::image_ratio, &kvedge_plan::image_tokens },
    { "recent", "KV pairs like 16, a ratio like 0.1, or auto", "KV pairs", 0, &kvedge_plan::recent_ratio, &kvedge_plan::recent_pairs },
};

kvedge_status set_amount(kvedge_plan & plan, const AmountKey & key, const char * value, kvedge_error * err) {
    Amount a;
    if (!parse_amount(value, a)) {
        return fail(err, KVEDGE_E_ARGUMENT, "%s '%s' is not a number; use %s", key.name, value, key.use);
    }
    if (a.is_ratio ? !((key.least == 0 || a.ratio > 0.0) && a.ratio >= 0.0 && a.ratio <= 1.0) : a.pairs < key.least) {
        return fail(err, KVEDGE_E_BUDGET, "%s %s is out of range; use a ratio in %s, 1], or %s from %d up", key.name, value,
                    key.least == 0 ? "[0" : "(0", key.unit, key.least);
    }
    plan.*key.ratio  = a.ratio;
    plan.*key.number = a.pairs;
    return ok(err);
}

kvedge_status set_recent(kvedge_plan & plan, const AmountKey & key, const char * value, kvedge_error * err) {
    const bool automatic = !strcmp(value, "auto");
    const auto status    = automatic ? ok(err) : set_amount(plan, key, value, err);
    plan.recent_auto     = status == KVEDGE_OK ? automatic : plan.recent_auto;
    return status;
}

kvedge_status set_critical(kvedge_plan & plan, const std::string & key, const char * value, kvedge_error * err) {
    const bool    norm    = key == "critical";
    const char *  choices = norm ? "none,l1,l2" : "budget,free";
    const int32_t i       = choice_of(choices, value);
    if (i < 0) {
        return fail(err, KVEDGE_E_ARGUMENT, "%s must be one of %s, not '%s'", key.c_str(), choices, value);
    }
    plan.critical      = norm ? (Critical) i : plan.critical;
    plan.critical_free = norm ? plan.critical_free : i == 1;
    return ok(err);
}

kvedge_status set_tokens(int32_t & slot, const char * key, const char * value, kvedge_error * err) {
    Amount a;
    if (!parse_amount(value, a) || a.is_ratio) {
        return fail(err, KVEDGE_E_ARGUMENT, "%s '%s' is not a whole number of tokens; use a number such as 4", key, value);
    }
    if (a.pairs < 0) {
        return fail(err, KVEDGE_E_BUDGET, "%s %s is out of range; use 0 or more", key, value);
    }
    slot = a.pairs;
    return ok(err);
}

}  // namespace

const Member & plan_member(const kvedge_plan & plan, int32_t stage) {
    switch (stage) {
        case KVEDGE_STAGE_SCORER:    return *plan.scorer;
        case KVEDGE_STAGE_ALLOCATOR: return *plan.allocator;
        case KVEDGE_STAGE_REDUCER:   return *plan.reducer;
        case KVEDGE_STAGE_PRUNER:    return *plan.pruner;
        default:                     return *plan.decode;
    }
}

int32_t later_budget(const kvedge_plan & plan, int32_t n_tokens) {
    const int32_t floor = plan.budget_ratio > 0.0 ? std::min(n_tokens, plan.later_floor) : 0;
    return std::max(floor, kvedge_plan_budget(&plan, n_tokens));
}

kvedge_plan plan_after(const kvedge_plan & plan, int32_t n_before, int32_t n_tokens) {
    kvedge_plan   out    = plan;
    const int32_t budget = later_budget(plan, n_tokens);
    if (n_before > 0 && budget > kvedge_plan_budget(&plan, n_tokens)) {
        out.budget_ratio = 0.0;
        out.budget_pairs = budget;
    }
    return out;
}

Observation plan_observes(const kvedge_plan & plan) {
    Observation out;
    for (int32_t stage = 0; stage < N_STAGES; stage++) {
        if (const Member & m = plan_member(plan, stage); m.observes) {
            m.observes(plan.params[stage], out);
        }
    }
    if (const CustomScorer * own = plan.scorer->custom) {
        out.columns[column::sums] = own->given.column_sums;
        out.window                = own->given.n_queries;
    }
    out.columns[column::sums] = out.sums() || plan.decode->needs_scores;
    return out;
}

bool plan_projects(const kvedge_plan & plan) { return plan.critical != Critical::none || plan_observes(plan).apart; }

bool plan_evicts(const kvedge_plan & plan) { return plan.decode->evict && plan.budget_ratio != 1.0; }

Reach plan_reach(const kvedge_plan & plan) { return plan.allocator->reach ? plan.allocator->reach(plan) : Reach::rows; }

int32_t plan_whole(const kvedge_plan & plan) {
    return plan.scorer->custom ? 0 : plan_observes(plan).whole_up_to();
}

int32_t plan_recent(const kvedge_plan & plan, int32_t n_tokens, int32_t kept) {
    if (plan.recent_auto && plan.scorer->custom) {
        return std::min(kept / 2, plan.scorer->custom->given.recent);
    }
    if (plan.recent_auto) {
        const int32_t even = kvedge_plan_budget(&plan, n_tokens);
        return plan.scorer->auto_recent ? plan.scorer->auto_recent(kept, even, plan.params[KVEDGE_STAGE_SCORER]) : 0;
    }
    return std::min(n_tokens, plan.recent_ratio > 0.0 ? share(plan.recent_ratio, n_tokens) : plan.recent_pairs);
}

const char * name_of(Critical norm) {
    constexpr const char * NAMES[] = { "none", "l1", "l2" };
    return NAMES[(int) norm];
}

kvedge_status check_critical(const kvedge_plan & plan, kvedge_error * err) {
    const auto are_attention = plan.scorer->scores_are_attention;
    if (plan.critical == Critical::none || (are_attention && are_attention(plan.params[KVEDGE_STAGE_SCORER]))) {
        return ok(err);
    }
    std::string others;
    for (int32_t i = 0; const char * name = kvedge_stage_name(KVEDGE_STAGE_SCORER, i); i++) {
        others += find_scorer(name)->scores_are_attention == always_attention ? std::string(name) + ", " : "";
    }
    return fail(err, KVEDGE_E_ARGUMENT,
                "critical %s works only with a scorer that scores by attention alone, not with scorer '%s'; use scorer %sexpected "
                "with scorer.vnorm=false, or critical none", name_of(plan.critical), plan.scorer->name, others.c_str());
}

}  // namespace kvedge

using namespace kvedge;

extern "C" kvedge_status kvedge_plan_create(kvedge_plan ** out, kvedge_error * err) try {
    if (!out) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_plan_create: out is NULL");
    }
    *out = new (std::nothrow) kvedge_plan(full_plan());
    return *out ? ok(err) : fail(err, KVEDGE_E_MEMORY, "no memory for a plan");
} catch (...) {
    return caught(err, "make a plan");
}

extern "C" void kvedge_plan_free(kvedge_plan * plan) try { delete plan; } catch (...) { }

extern "C" kvedge_status kvedge_plan_set(kvedge_plan * plan, const char * key, const char * value, kvedge_error * err) try {
    if (!plan || !key || !value) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_plan_set: plan, key or value is NULL");
    }
    const std::string k = key;
    for (int32_t stage = 0; stage < N_STAGES; stage++) {
        if (k == STAGE_NAMES[stage]) {
            return set_stage(*plan, (kvedge_stage) stage, value, err);
        }
    }
    for (const AmountKey & amount : AMOUNTS) {
        if (k == amount.name) {
            return k == "recent" ? set_recent(*plan, amount, value, err) : set_amount(*plan, amount, value, err);
        }
    }
    if (k == "sinks" || k == "later_floor") {
        return set_tokens(k == "sinks" ? plan->sinks : plan->later_floor, key, value, err);
    }
    if (k == "text_prior") {
        return parse_bool(value, plan->text_prior)
                   ? ok(err)
                   : fail(err, KVEDGE_E_ARGUMENT, "text_prior '%s' is neither true nor false; use one of the two", value);
    }
    if (k == "critical" || k == "critical_half") {
        return set_critical(*plan, k, value, err);
    }
    if (k == "text_overflow") {
        if (strcmp(value, "keep_all") != 0 && strcmp(value, "budget") != 0) {
            return fail(err, KVEDGE_E_ARGUMENT, "text_overflow '%s' is neither budget nor keep_all; use one of the two", value);
        }
        plan->keep_all_text = !strcmp(value, "keep_all");
        return ok(err);
    }
    if (k.find('.') != std::string::npos) {
        return set_member_param(*plan, k, value, err);
    }
    return fail(err, KVEDGE_E_UNKNOWN,
                "a plan has no setting '%s'; there are: scorer, allocator, reducer, decode, pruner, budget, image_tokens, recent, "
                "sinks, text_prior, text_overflow, critical, critical_half, later_floor", key);
} catch (...) {
    return caught(err, "change a plan");
}

extern "C" kvedge_status kvedge_plan_check(const kvedge_plan * plan, kvedge_error * err) try {
    if (!plan) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_plan_check: plan is NULL");
    }
    if (plan->budget_ratio == 0.0 && !plan->recent_auto && plan->recent_ratio == 0.0 &&
        (int64_t) plan->recent_pairs + plan->sinks > plan->budget_pairs) {
        return fail(err, KVEDGE_E_BUDGET,
                    "a budget of %d KV pairs is smaller than the protected KV pairs (recent %d + sinks %d); raise the budget or lower "
                    "recent and sinks", plan->budget_pairs, plan->recent_pairs, plan->sinks);
    }
    if (plan->budget_ratio > 0.0 && plan->recent_ratio > plan->budget_ratio && !plan->recent_auto) {
        return fail(err, KVEDGE_E_BUDGET, "recent %g of the prompt does not fit a budget of %g; raise the budget or lower recent",
                    plan->recent_ratio, plan->budget_ratio);
    }
    return check_critical(*plan, err);
} catch (...) {
    return caught(err, "check a plan");
}

extern "C" int32_t kvedge_plan_budget(const kvedge_plan * plan, int32_t n_tokens) try {
    if (!plan || n_tokens <= 0) {
        return 0;
    }
    if (n_tokens <= plan_whole(*plan)) {
        return n_tokens;
    }
    const int32_t n = plan->budget_ratio > 0.0 ? share(plan->budget_ratio, n_tokens) : plan->budget_pairs;
    return std::clamp(n, 1, n_tokens);
} catch (...) {
    return 0;
}
