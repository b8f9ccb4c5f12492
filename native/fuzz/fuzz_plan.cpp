// Fuzzes plans: kvedge_plan_set with any key and value, profiles of any shape, and the functions that read a plan.
//
// Input: lines `key=value`. A line `!` is followed by a profile: stage, layers, columns, flags, numbers.

#include "compress/bounded.h"
#include "plan/plan.h"
#include "plan/storage.h"
#include "fuzz/plans.h"

using namespace kvedge;
using namespace kvedge::fuzz;

namespace {

bool same(const kvedge_plan & a, const kvedge_plan & b) {
    bool out = a.scorer == b.scorer && a.allocator == b.allocator && a.reducer == b.reducer && a.decode == b.decode && a.pruner == b.pruner;
    for (int32_t stage = 0; stage < N_STAGES; stage++) {
        out = out && a.profiles[stage] == b.profiles[stage] && std::equal(a.params[stage], a.params[stage] + MAX_PARAMS, b.params[stage]);
    }
    out = out && a.budget_ratio == b.budget_ratio && a.budget_pairs == b.budget_pairs && a.recent_auto == b.recent_auto &&
          a.recent_ratio == b.recent_ratio && a.recent_pairs == b.recent_pairs && a.sinks == b.sinks;
    return out && a.image_ratio == b.image_ratio && a.image_tokens == b.image_tokens && a.text_prior == b.text_prior &&
           a.keep_all_text == b.keep_all_text && a.critical == b.critical && a.critical_free == b.critical_free && a.later_floor == b.later_floor;
}

void set_profile(Input & in, kvedge_plan * plan, kvedge_error & err) {
    const auto         stage = (kvedge_stage) in.between(0, 7);
    const int32_t      n_layers = in.between(-1, 6), n_columns = in.between(-1, 6);
    const uint8_t      flags = in.byte();
    std::vector<float> numbers((size_t) (std::max(n_layers, 0) * std::max(n_columns, 0) + std::max(n_columns, 0)));
    for (float & x : numbers) {
        x = flags & 4 ? in.number<float>() : in.byte() / 255.0f;
    }
    const float * budgets = numbers.data() + numbers.size() - (size_t) std::max(n_columns, 0);
    const float * values  = flags & 1 ? nullptr : numbers.data();
    (void) checked_status(kvedge_plan_set_profile(plan, stage, values, flags & 2 ? budgets : nullptr, n_layers, n_columns, &err), err);
}

void ask(const kvedge_plan * plan) {
    kvedge_error err{};
    (void) checked_status(kvedge_plan_check(plan, &err), err);
    (void) checked_status(kvedge_plan_check_stream(plan, &err), err);
    for (int32_t type : { 0, 3, 5 }) {
        Storage storage;
        REQUIRE(make_storage(type, type + 1, storage));
        (void) checked_status(check_bounded(*plan, storage, &err), err);
    }
    for (int32_t n : { 1, 2, 31, 32, 1000, INT32_MAX }) {
        const int32_t budget = kvedge_plan_budget(plan, n), later = kvedge_plan_later_budget(plan, n), rows = kvedge_plan_image_tokens(plan, n);
        REQUIRE(budget >= 1 && budget <= n && later >= budget && later <= n && rows >= 1 && rows <= n);
        (void) kvedge_plan_score_bytes(plan, n, 8, 4, 64);
        for (int32_t kept : { 1, budget }) {
            REQUIRE(plan_recent(*plan, n, kept) >= 0);
        }
    }
    REQUIRE(kvedge_plan_budget(plan, 0) == 0 && kvedge_plan_later_budget(plan, -1) <= 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    Input            in(data, size);
    const PlanHandle plan = new_plan();
    for (int i = 0; i < 64 && in.left() > 0; i++) {
        const kvedge_plan before = *plan;
        kvedge_error      err{};
        const std::string line = in.line();
        if (line == "!") {
            set_profile(in, plan.get(), err);
        } else {
            const size_t equals = std::min(line.find('='), line.size());
            const auto   value  = equals < line.size() ? line.substr(equals + 1) : std::string();
            (void) checked_status(kvedge_plan_set(plan.get(), line.substr(0, equals).c_str(), value.c_str(), &err), err);
        }
        REQUIRE(err.status == KVEDGE_OK || same(before, *plan));
    }
    ask(plan.get());
    return 0;
}
