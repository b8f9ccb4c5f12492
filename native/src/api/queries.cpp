// Questions about a plan that are answered before anything runs.

#include "system/error.h"
#include "observe/observed.h"
#include "compress/stream.h"

using namespace kvedge;

extern "C" int32_t kvedge_plan_later_budget(const kvedge_plan * plan, int32_t n_tokens) try {
    return plan ? later_budget(*plan, n_tokens) : 0;
} catch (...) {
    return 0;
}

extern "C" kvedge_status kvedge_plan_check_stream(const kvedge_plan * plan, kvedge_error * err) try {
    return plan ? check_stream(*plan, err) : fail(err, KVEDGE_E_ARGUMENT, "kvedge_plan_check_stream: plan is NULL");
} catch (...) {
    return caught(err, "check a plan");
}

extern "C" bool kvedge_plan_replays(const kvedge_plan * plan) try {
    return plan && plan_observes(*plan).again;
} catch (...) {
    return false;
}

extern "C" uint64_t kvedge_plan_score_bytes(
    const kvedge_plan * plan, int32_t n_tokens, int32_t n_heads, int32_t n_heads_kv, int32_t d_k) try {
    if (!plan || n_tokens < 1 || n_heads < 1 || n_heads_kv < 1 || d_k < 1 || plan->budget_ratio == 1.0) {
        return 0;
    }
    const LayerShape layer{ 0, n_heads, n_heads_kv, d_k, d_k };
    const auto       heads  = (uint64_t) n_heads, heads_kv = (uint64_t) n_heads_kv;
    const uint64_t   weighs = plan->critical != Critical::none ? heads_kv : plan_projects(*plan) ? heads : 0;
    const uint64_t   scores = kvedge_plan_budget(plan, n_tokens) < n_tokens ? (heads_kv + weighs) * sizeof(float) : 0;
    return observed_bytes(plan_observes(*plan), layer, n_tokens) + scores * (uint64_t) n_tokens;
} catch (...) {
    return 0;
}
