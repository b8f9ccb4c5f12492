// A setting that is refused leaves the plan as it was.

#include "check.h"
#include "core/plan.h"

using namespace kvedge;

namespace {

kvedge_status set(kvedge_plan & plan, const char * key, const char * value) { return kvedge_plan_set(&plan, key, value, nullptr); }

void test_refused() {
    kvedge_plan plan = full_plan();
    CHECK(set(plan, "text_prior", "true") == KVEDGE_OK && plan.text_prior);
    CHECK(set(plan, "text_prior", "perhaps") == KVEDGE_E_ARGUMENT && plan.text_prior);
    CHECK(set(plan, "text_prior", "0") == KVEDGE_OK && !plan.text_prior);
    CHECK(set(plan, "text_prior", "") == KVEDGE_E_ARGUMENT && !plan.text_prior);
    CHECK(set(plan, "text_overflow", "keep_all") == KVEDGE_OK && plan.keep_all_text);
    CHECK(set(plan, "text_overflow", "both") == KVEDGE_E_ARGUMENT && plan.keep_all_text);
    CHECK(set(plan, "text_overflow", "budget") == KVEDGE_OK && !plan.keep_all_text);
    CHECK(set(plan, "sinks", "4") == KVEDGE_OK && set(plan, "sinks", "-1") == KVEDGE_E_BUDGET && plan.sinks == 4);
    CHECK(set(plan, "recent", "3") == KVEDGE_OK && set(plan, "recent", "1.5") == KVEDGE_E_BUDGET && plan.recent_pairs == 3);
    CHECK(set(plan, "scorer", "window") == KVEDGE_OK && set(plan, "scorer.window", "16") == KVEDGE_OK);
    CHECK(set(plan, "scorer.window", "0") == KVEDGE_E_ARGUMENT && plan_window(plan) == 16);
}

}  // namespace

int main() {
    test_refused();
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
