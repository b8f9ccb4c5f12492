// A refused setting leaves the plan unchanged. Also tests facts, the critical rule and image tokens of plans.

#include "check.h"
#include "plan/plan.h"

#include <cstring>
#include <vector>

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
    CHECK(set(plan, "critical", "l2") == KVEDGE_OK && plan.critical == Critical::l2);
    CHECK(set(plan, "critical", "l3") == KVEDGE_E_ARGUMENT && set(plan, "critical", "") == KVEDGE_E_ARGUMENT && plan.critical == Critical::l2);
    CHECK(set(plan, "critical_half", "free") == KVEDGE_OK && set(plan, "critical_half", "all") == KVEDGE_E_ARGUMENT && plan.critical_free);
    CHECK(set(plan, "sinks", "4") == KVEDGE_OK && set(plan, "sinks", "-1") == KVEDGE_E_BUDGET && plan.sinks == 4);
    CHECK(set(plan, "recent", "3") == KVEDGE_OK && set(plan, "recent", "1.5") == KVEDGE_E_BUDGET && plan.recent_pairs == 3);
    CHECK(set(plan, "scorer", "window") == KVEDGE_OK && set(plan, "scorer.window", "16") == KVEDGE_OK);
    CHECK(set(plan, "scorer.window", "0") == KVEDGE_E_ARGUMENT && plan_observes(plan).window == 16);
    CHECK(set(plan, "reducer", "feature") == KVEDGE_OK && plan.reducer == find_reducer("averaged") && set(plan, "reducer", "evict") == KVEDGE_OK);
}

// `critical` works only with scorers whose scores are attention and nothing else.
void test_critical() {
    for (int32_t i = 0; const char * name = kvedge_stage_name(KVEDGE_STAGE_SCORER, i); i++) {
        kvedge_plan  plan = full_plan();
        kvedge_error err{};
        CHECK(set(plan, "scorer", name) == KVEDGE_OK && kvedge_plan_check(&plan, &err) == KVEDGE_OK);
        CHECK(set(plan, "critical", "l1") == KVEDGE_OK);
        const bool weighed = plan.scorer->scores_are_attention && plan.scorer->scores_are_attention(plan.params[KVEDGE_STAGE_SCORER]);
        CHECK(kvedge_plan_check(&plan, &err) == (weighed ? KVEDGE_OK : KVEDGE_E_ARGUMENT));
        CHECK(weighed || (std::strstr(err.message, name) && !std::strchr(err.message, '\n')));
    }
    kvedge_plan plan = full_plan();
    CHECK(set(plan, "scorer", "expected") == KVEDGE_OK && set(plan, "critical", "l2") == KVEDGE_OK);
    CHECK(kvedge_plan_check(&plan, nullptr) == KVEDGE_E_ARGUMENT && set(plan, "scorer.vnorm", "false") == KVEDGE_OK);
    CHECK(kvedge_plan_check(&plan, nullptr) == KVEDGE_OK);
}

// Without a pruner all rows of an image are kept, whatever image_tokens says: the output needs room for all rows.
void test_no_pruner() {
    kvedge_plan plan = full_plan();
    CHECK(set(plan, "image_tokens", "0.5") == KVEDGE_OK && kvedge_plan_image_tokens(&plan, 10) == 10);
    const std::vector<float> rows(10 * 4, 1.0f);
    const kvedge_image       image{ sizeof(image), rows.data(), 10, 4, 0, 0 };
    std::vector<int32_t>     kept(10, -1);
    int32_t                  n = 5;
    kvedge_error             err{};
    CHECK(kvedge_prune(&plan, &image, 1, kept.data(), nullptr, &n, &err) == KVEDGE_E_ARGUMENT && kept[0] == -1);
    n = 10;
    CHECK(kvedge_prune(&plan, &image, 1, kept.data(), nullptr, &n, &err) == KVEDGE_OK && n == 10 && kept[9] == 9);
    CHECK(set(plan, "pruner", "grid") == KVEDGE_OK && kvedge_plan_image_tokens(&plan, 10) == 5);
}

// kvedge_stage_get_facts fails without struct_size, for an unknown member, and for a wrong number of settings.
void test_facts() {
    const double       settings[] = { 20, 5, 0, 0, 0, 0, 1, 4 };  // mixkv: window 20, source profile, a quarter of the budget recent
    kvedge_stage_facts facts{};
    const auto         ask = [&](const char * member, int32_t n) {
        return kvedge_stage_get_facts(KVEDGE_STAGE_SCORER, member, settings, n, &facts, nullptr);
    };
    CHECK(ask("mixkv", 8) == KVEDGE_E_ARGUMENT);  // no struct_size
    facts.struct_size = sizeof(facts);
    facts.kept        = 60;
    facts.even        = 60;
    CHECK(ask("mixkv", 7) == KVEDGE_E_ARGUMENT && ask("nobody", 8) == KVEDGE_E_ARGUMENT && facts.recent == 0);
    CHECK(ask("mixkv", 8) == KVEDGE_OK && facts.struct_size == sizeof(facts) && facts.whole_up_to == 20 && facts.recent == 15);
    CHECK(!strcmp(facts.profile, "key-redundancy") && !facts.attends && !facts.sinks_first && !facts.projects && !facts.queries);
}

}  // namespace

int main() {
    test_refused();
    test_facts();
    test_critical();
    test_no_pruner();
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
