// Profiles of plans: copies, refused values, and budgets of models whose layers differ.

#include "check.h"
#include "plan/profile.h"
#include "compress/projection.h"

#include <cstring>
#include <random>

using namespace kvedge;

namespace {

struct Given {
    std::vector<float> q, k, v;
    kvedge_arrays      arrays{};
};

// Returns random arrays of n_layers layers with 4 query heads and 2 KV heads.
Given random_arrays(int32_t n_layers, int32_t n_tokens) {
    std::mt19937                    rng(5);
    std::normal_distribution<float> normal;
    Given                           g;
    const auto                      row = (size_t) n_layers * (size_t) n_tokens * 8;
    for (auto * x : { &g.q, &g.k, &g.v }) {
        x->resize(row * (x == &g.q ? 4 : 2));
        for (float & value : *x) {
            value = normal(rng);
        }
    }
    g.arrays = { n_layers, 4, 2, n_tokens, 8, g.q.data(), g.k.data(), g.v.data(), nullptr };
    return g;
}

kvedge_plan * heads_plan() {
    kvedge_plan * plan = nullptr;
    CHECK(kvedge_plan_create(&plan, nullptr) == KVEDGE_OK);
    CHECK(kvedge_plan_set(plan, "allocator", "heads", nullptr) == KVEDGE_OK);
    CHECK(kvedge_plan_set(plan, "budget", "0.5", nullptr) == KVEDGE_OK);
    return plan;
}

int32_t kept(const kvedge_plan * plan, const Given & g) {
    kvedge_result * r = nullptr;
    kvedge_error    err{};
    if (kvedge_compress_arrays(plan, &g.arrays, KVEDGE_TYPE_F16, 1, &r, &err) != KVEDGE_OK) {
        CHECK(err.status == KVEDGE_E_ARGUMENT && r == nullptr);
        return -1;
    }
    int32_t sum = 0;
    for (int32_t l = 0; l < g.arrays.n_layers; l++) {
        sum += kvedge_result_length(r, l, 0) + kvedge_result_length(r, l, 1);
    }
    kvedge_result_free(r);
    return sum;
}

void check_lifetime() {
    const Given   g    = random_arrays(2, 40);
    kvedge_plan * plan = heads_plan();
    CHECK(kept(plan, g) == -1);  // the profile is missing
    {
        std::vector<float> scores = { 1, 0, 3, 2, 9, 0, 0, 1 };
        CHECK(kvedge_plan_set_profile(plan, KVEDGE_STAGE_ALLOCATOR, scores.data(), nullptr, 2, 4, nullptr) == KVEDGE_OK);
    }
    CHECK(kept(plan, g) == 2 * 2 * 20);  // the plan has its own copy of the numbers
    auto copy = *plan;
    kvedge_plan_free(plan);
    CHECK(kept(&copy, g) == 2 * 2 * 20);
    CHECK(kept(&copy, random_arrays(3, 40)) == -1);  // a model with another number of layers
    auto second = copy;
    CHECK(kvedge_plan_set_profile(&second, KVEDGE_STAGE_ALLOCATOR, nullptr, nullptr, 0, 0, nullptr) == KVEDGE_OK);
    CHECK(kept(&second, g) == -1 && kept(&copy, g) == 2 * 2 * 20);  // clearing a copy does not change the original
    CHECK(kvedge_plan_set(&copy, "allocator", "uniform", nullptr) == KVEDGE_OK && kept(&copy, g) == 2 * 2 * 20);
    CHECK(kvedge_plan_set(&copy, "allocator", "heads", nullptr) == KVEDGE_OK && kept(&copy, g) == -1);
}

void check_refusals() {
    kvedge_plan * plan       = heads_plan();
    const float   scores[]   = { 1, 2, 3, 4 };
    const float   bad[]      = { 1, 2, 3, -4 };
    const auto    set        = [&](int32_t stage, const float * values, const float * budgets, int32_t l, int32_t n) {
        kvedge_error err{};
        const auto   status = kvedge_plan_set_profile(plan, (kvedge_stage) stage, values, budgets, l, n, &err);
        CHECK(status == KVEDGE_OK || strlen(err.message) > 10);
        return status;
    };
    CHECK(set(KVEDGE_STAGE_ALLOCATOR, scores, nullptr, 1, 4) == KVEDGE_OK);
    CHECK(set(KVEDGE_STAGE_ALLOCATOR, bad, nullptr, 1, 4) == KVEDGE_E_ARGUMENT);
    CHECK(set(KVEDGE_STAGE_ALLOCATOR, scores, nullptr, 0, 4) == KVEDGE_E_ARGUMENT);
    CHECK(set(KVEDGE_STAGE_ALLOCATOR, scores, nullptr, 1 << 30, 1 << 30) == KVEDGE_E_ARGUMENT);
    CHECK(set(KVEDGE_STAGE_ALLOCATOR, scores, nullptr, -1, 4) == KVEDGE_E_ARGUMENT);
    CHECK(set(KVEDGE_STAGE_ALLOCATOR, scores, scores, 1, 4) == KVEDGE_E_ARGUMENT);  // budgets above 1
    CHECK(set(KVEDGE_STAGE_SCORER, scores, nullptr, 1, 4) == KVEDGE_E_ARGUMENT);
    CHECK(set(KVEDGE_STAGE_REDUCER, scores, nullptr, 1, 4) == KVEDGE_E_ARGUMENT);
    CHECK(set(4, scores, nullptr, 1, 4) == KVEDGE_E_ARGUMENT && set(-1, scores, nullptr, 1, 4) == KVEDGE_E_ARGUMENT);
    CHECK(kvedge_plan_set_profile(nullptr, KVEDGE_STAGE_ALLOCATOR, scores, nullptr, 1, 4, nullptr) == KVEDGE_E_ARGUMENT);
    kvedge_plan_free(plan);
}

void check_rotations() {
    const Given   g    = random_arrays(2, 40);
    kvedge_plan * plan = heads_plan();
    CHECK(kvedge_plan_set(plan, "allocator", "uniform", nullptr) == KVEDGE_OK && kvedge_plan_set(plan, "scorer", "expected", nullptr) == KVEDGE_OK);
    const double good[9] = { 1.0, 0.1 }, bad[] = { 1.0, NAN };
    const auto   set     = [&](int32_t pairs, const double * angles, int32_t n) {
        kvedge_error err{};
        const auto   status = kvedge_plan_set_rotation(plan, (kvedge_pairs) pairs, angles, n, &err);
        CHECK(status == KVEDGE_OK || strlen(err.message) > 10);
        return status;
    };
    const int32_t all = kept(plan, g);
    CHECK(all > 0);
    for (int32_t pairs : { KVEDGE_PAIRS_NORM, KVEDGE_PAIRS_NEOX }) {
        CHECK(set(pairs, good, 2) == KVEDGE_OK && kept(plan, g) == all);
    }
    CHECK(set(2, good, 2) == KVEDGE_E_ARGUMENT && set(-1, good, 2) == KVEDGE_E_ARGUMENT && set(0, bad, 2) == KVEDGE_E_ARGUMENT);
    CHECK(set(0, good, -1) == KVEDGE_E_ARGUMENT && set(0, good, 1 << 30) == KVEDGE_E_ARGUMENT);
    CHECK(kvedge_plan_set_rotation(nullptr, KVEDGE_PAIRS_NORM, good, 2, nullptr) == KVEDGE_E_ARGUMENT);
    CHECK(set(0, good, 9) == KVEDGE_OK && kept(plan, g) == -1);  // heads have fewer channels
    CHECK(kvedge_plan_set(plan, "scorer", "knorm", nullptr) == KVEDGE_OK && kept(plan, g) == all);  // knorm needs no rotation
    CHECK(set(0, nullptr, 0) == KVEDGE_OK && kvedge_plan_set(plan, "scorer", "expected", nullptr) == KVEDGE_OK && kept(plan, g) == all);
    kvedge_plan_free(plan);
}

void check_projections_of_arrays() {
    const Given   g    = random_arrays(2, 40);
    kvedge_plan * plan = heads_plan();
    CHECK(kvedge_plan_set(plan, "allocator", "uniform", nullptr) == KVEDGE_OK && kvedge_plan_set(plan, "scorer", "cumulative", nullptr) == KVEDGE_OK);
    const int32_t all = kept(plan, g);
    CHECK(all > 0 && kvedge_plan_set(plan, "critical", "l1", nullptr) == KVEDGE_OK);
    CHECK(kept(plan, g) == -1);  // the projection is missing
    std::vector<float> w(2 * 4 * 8 * 5, 0.5f);
    const auto         set = [&](const float * values, int32_t n_layers, int32_t n_heads, int32_t d, int32_t width) {
        kvedge_error err{};
        const auto   status = kvedge_plan_set_projection(plan, values, n_layers, n_heads, d, width, &err);
        CHECK(status == KVEDGE_OK || strlen(err.message) > 10);
        return status;
    };
    CHECK(set(w.data(), 2, 4, 8, 5) == KVEDGE_OK && kept(plan, g) == all);
    kvedge_plan_set(plan, "critical", "l2", nullptr);
    CHECK(kept(plan, g) == all);
    CHECK(set(w.data(), 0, 4, 8, 5) == KVEDGE_E_ARGUMENT && set(w.data(), 2, 4, 8, 0) == KVEDGE_E_ARGUMENT && set(w.data(), 2, -4, 8, 5) == KVEDGE_E_ARGUMENT);
    CHECK(kvedge_plan_set_projection(nullptr, w.data(), 2, 4, 8, 5, nullptr) == KVEDGE_E_ARGUMENT);
    w[100] = NAN;
    CHECK(set(w.data(), 2, 4, 8, 5) == KVEDGE_E_ARGUMENT && kept(plan, g) == all);  // the earlier weights stay
    w[100] = 0.0f;
    kvedge_result * r = nullptr;
    kvedge_error    err{};
    CHECK(set(w.data(), 1, 4, 8, 10) == KVEDGE_OK);
    CHECK(kvedge_compress_arrays(plan, &g.arrays, KVEDGE_TYPE_F16, 1, &r, &err) == KVEDGE_E_UNSUPPORTED && strstr(err.message, "critical l2"));
    CHECK(set(nullptr, 0, 0, 0, 0) == KVEDGE_OK && kept(plan, g) == -1);
    kvedge_plan_free(plan);
}

// A model whose second layer has unusable output weights.
struct OddWeights : OutputWeights {
    std::string unusable(size_t layer, const LayerShape &) const override { return layer == 1 ? "blk.3.attn_output.weight is odd" : ""; }
    int32_t     width(size_t) const override { return 4; }
    void        read(size_t, int32_t, float *) const override { CHECK(false); }
};

void check_projections_of_models() {
    const std::vector<LayerShape> shapes = { { 1, 4, 2, 8, 8 }, { 3, 4, 4, 8, 8 } };
    const Projections             odd(std::make_shared<OddWeights>());
    kvedge_plan                   plan = full_plan();
    kvedge_error                  err{};
    CHECK(check_projections(plan, shapes, nullptr, &err) == KVEDGE_OK && check_projections(plan, shapes, &odd, &err) == KVEDGE_OK);
    plan.scorer   = find_scorer("window");
    plan.critical = Critical::l1;
    CHECK(check_projections(plan, { shapes[0] }, &odd, &err) == KVEDGE_OK && check_projections(plan, shapes, nullptr, &err) == KVEDGE_E_ARGUMENT);
    CHECK(check_projections(plan, shapes, &odd, &err) == KVEDGE_E_UNSUPPORTED);
    CHECK(strstr(err.message, "layer 3") && strstr(err.message, "blk.3.attn_output.weight") && !strchr(err.message, '\n'));
}

// kvedge stores layers 1 and 3 of five layers, with 2 and 4 KV heads: profile rows go by the model's layer numbers, the total is exact.
void check_uneven_layers() {
    const std::vector<LayerShape> shapes = { { 1, 4, 2, 8, 8 }, { 3, 4, 4, 8, 8 } };
    Profile                       p;
    p.n_layers = 5, p.n_columns = 4;
    p.values = { 900, 900, 900, 900, 1, 1, 0, 0, 900, 900, 900, 900, 0, 0, 0, 2, 900, 900, 900, 900 };
    kvedge_plan plan = full_plan();
    CHECK(kvedge_plan_set(&plan, "allocator", "heads", nullptr) == KVEDGE_OK);
    CHECK(kvedge_plan_set(&plan, "allocator.ratio", "0.5", nullptr) == KVEDGE_OK);
    plan.profiles[KVEDGE_STAGE_ALLOCATOR] = std::make_shared<Profile>(p);
    CHECK(check_profiles(plan, shapes, 5, nullptr) == KVEDGE_OK);
    CHECK(check_profiles(plan, shapes, 4, nullptr) == KVEDGE_E_ARGUMENT);

    std::vector<std::vector<int32_t>> out = { { 0, 0 }, { 0, 0, 0, 0 } };
    AllocateInput in{};
    in.n_tokens  = 1000;
    in.budget    = 110;
    in.recent    = 10;
    in.shapes    = &shapes;
    in.n_threads = 1;
    in.params    = plan.params[KVEDGE_STAGE_ALLOCATOR];
    in.profile   = &p;
    plan.allocator->allocate(in, out);
    CHECK((out[0] == std::vector<int32_t>{ 60 + 150, 60 }));
    CHECK((out[1] == std::vector<int32_t>{ 60, 60, 60, 60 + 150 }));
}

// Allocator calibrated, with layers 1 and 3 of five stored: only the profile rows of stored layers count.
void check_shares() {
    const std::vector<LayerShape> shapes = { { 1, 4, 2, 8, 8 }, { 3, 4, 4, 8, 8 } };
    Profile                       p;
    p.n_layers = 5, p.n_columns = 4;
    p.values = { 9, 9, 9, 9, 90, 4, 0, 0, 9, 9, 9, 9, 1, 2, 2, 1, 9, 9, 9, 9 };
    kvedge_plan plan = full_plan();
    CHECK(kvedge_plan_set(&plan, "allocator", "calibrated", nullptr) == KVEDGE_OK);
    const auto fits = [&] {
        plan.profiles[KVEDGE_STAGE_ALLOCATOR] = std::make_shared<Profile>(p);
        return check_profiles(plan, shapes, 5, nullptr);
    };
    CHECK(fits() == KVEDGE_OK);
    std::vector<std::vector<int32_t>> out = { { 0, 0 }, { 0, 0, 0, 0 } };
    AllocateInput in{};
    in.n_tokens = in.largest_budget = 100;
    in.budget   = 30;
    in.recent   = 15;
    in.shapes   = &shapes;
    in.params   = plan.params[KVEDGE_STAGE_ALLOCATOR];
    in.profile  = &p;
    plan.allocator->allocate(in, out);  // 120 of 180 pairs go by the shares: 100, 8, 2, 4, 4 and 2
    CHECK((out[0] == std::vector<int32_t>{ 100, 16 }) && (out[1] == std::vector<int32_t>{ 16, 16, 16, 16 }));
    CHECK(kvedge_plan_set(&plan, "allocator.measured", "1", nullptr) == KVEDGE_OK);
    plan.allocator->allocate(in, out);
    CHECK((out[0] == std::vector<int32_t>{ 100, 32 }) && (out[1] == std::vector<int32_t>{ 8, 16, 16, 8 }));
    in.fixed_recent = 15;
    plan.allocator->allocate(in, out);
    CHECK((out[0] == std::vector<int32_t>{ 100, 20 }) && (out[1] == std::vector<int32_t>{ 15, 15, 15, 15 }));

    for (size_t i = 0; i < 4; i++) {
        p.values[4 + i] = p.values[12 + i] = 0;
    }
    CHECK(fits() == KVEDGE_E_ARGUMENT);  // all shares of the stored layers are 0
}

// A plan whose scorer and allocator both take a profile: both are required, each has its own shape, and each is cleared separately.
void check_two_stages() {
    const std::vector<LayerShape> shapes = { { 0, 4, 2, 8, 8 }, { 2, 4, 1, 8, 8 } };
    const float                   scores[12]     = { 1, 2, 3, 4, 0, 0, 0, 0, 1, 1, 1, 1 };
    const float                   redundancy[6]  = { 0.5f, 1, 0, 0, 0.25f, 0 };
    const float                   too_large[6]   = { 0.5f, 1.5f, 0, 0, 0.25f, 0 };
    const float                   budgets[2]     = { 0.2f, 0.5f };
    kvedge_plan * plan = heads_plan();
    CHECK(kvedge_plan_set(plan, "scorer", "mixkv", nullptr) == KVEDGE_OK);
    const auto check = [&] { return check_profiles(*plan, shapes, 3, nullptr); };
    const auto give  = [&](kvedge_stage stage, const float * values, const float * at, int32_t columns) {
        return kvedge_plan_set_profile(plan, stage, values, at, 3, columns, nullptr);
    };
    CHECK(give(KVEDGE_STAGE_ALLOCATOR, scores, nullptr, 4) == KVEDGE_OK && check() == KVEDGE_OK);
    CHECK(kvedge_plan_set(plan, "scorer.source", "profile", nullptr) == KVEDGE_OK && check() == KVEDGE_E_ARGUMENT);
    CHECK(give(KVEDGE_STAGE_SCORER, redundancy, nullptr, 2) == KVEDGE_OK && check() == KVEDGE_OK);
    CHECK(give(KVEDGE_STAGE_SCORER, too_large, nullptr, 2) == KVEDGE_OK && check() == KVEDGE_E_ARGUMENT);
    CHECK(give(KVEDGE_STAGE_SCORER, scores, nullptr, 4) == KVEDGE_OK && check() == KVEDGE_E_ARGUMENT);
    CHECK(give(KVEDGE_STAGE_SCORER, redundancy, budgets, 2) == KVEDGE_OK && check() == KVEDGE_E_ARGUMENT);
    CHECK(give(KVEDGE_STAGE_SCORER, redundancy, nullptr, 1) == KVEDGE_OK && check() == KVEDGE_E_ARGUMENT);
    CHECK(kvedge_plan_set(plan, "scorer.mode", "even", nullptr) == KVEDGE_OK && check() == KVEDGE_OK);  // mode even ignores it
    CHECK(kvedge_plan_set(plan, "scorer.mode", "headwise", nullptr) == KVEDGE_OK);
    CHECK(give(KVEDGE_STAGE_SCORER, redundancy, nullptr, 2) == KVEDGE_OK && check() == KVEDGE_OK);
    CHECK(kvedge_plan_set(plan, "allocator", "heads", nullptr) == KVEDGE_OK && check() == KVEDGE_E_ARGUMENT);
    CHECK(!plan->profiles[KVEDGE_STAGE_ALLOCATOR] && plan->profiles[KVEDGE_STAGE_SCORER]);
    kvedge_plan_free(plan);
}

}  // namespace

int main() {
    check_lifetime();
    check_refusals();
    check_rotations();
    check_projections_of_arrays();
    check_projections_of_models();
    check_uneven_layers();
    check_shares();
    check_two_stages();
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
