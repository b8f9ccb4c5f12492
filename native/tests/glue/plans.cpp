// Plans through llama.cpp: each member of each stage, each storage type, and custom stages.

#include "world.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace {

// Reads a prompt of text, image and text.
void read_prompt(World & w, int32_t seq = 0) {
    CHECK(w.decode(words(w.model, PROMPT / 2, 1), seq) == 0);
    CHECK(w.decode_image(PROMPT / 4, seq) == 0);
    CHECK(w.decode(words(w.model, PROMPT / 4, 2), seq) == 0);
}

bool finite(const std::vector<float> & logits) {
    for (float x : logits) {
        if (!std::isfinite(x)) {
            return false;
        }
    }
    return true;
}

int64_t rows(const World & w) {
    int64_t n = 0;
    for (int32_t l = 0; l < w.stats().n_layers; l++) {
        for (int32_t h = 0, length; (length = kvedge_head_length(w.kv, 0, l, h)) >= 0; h++) {
            n += length;
        }
    }
    return n;
}

// Checks that the KV heads keep the plan's budget on average, and that the answer can be decoded.
void try_plan(World & w, Plan & plan, const char * what) {
    kvedge_error err{};
    w.clear();
    if (!w.good(kvedge_set_plan(w.kv, plan.plan, &err), err)) {
        std::fprintf(stderr, "%s\n", what);
    }
    read_prompt(w);
    const int64_t all = rows(w);
    CHECK(w.good(kvedge_compress(w.kv, 0, &err), err));
    const int64_t heads = all / PROMPT, budget = kvedge_plan_budget(plan.plan, PROMPT);
    if (std::llabs(rows(w) - heads * budget) > heads) {
        std::fprintf(stderr, "%s keeps %d rows of %d heads, not %d each\n", what, (int) rows(w), (int) heads, (int) budget);
        failures()++;
    }
    w.answer(3);
    CHECK(finite(w.logits()));
}

}  // namespace

void every_member(llama_model * model) {
    World w(model, nullptr);
    for (int32_t stage = KVEDGE_STAGE_SCORER; stage <= KVEDGE_STAGE_DECODE; stage++) {
        for (int32_t i = 0; const char * name = kvedge_stage_name((kvedge_stage) stage, i); i++) {
            static const char * const KEYS[] = { "scorer", "allocator", "reducer", "decode" };
            Plan plan({ { "scorer", "cumulative" }, { "budget", "0.25" } });
            plan.set(KEYS[stage], name);
            if (!strcmp(name, "window") || !strcmp(name, "mixkv")) {
                plan.set("scorer.window", "8");
            }
            if (!strcmp(name, "heads")) {
                const int32_t      layers = llama_model_n_layer(model), heads = llama_model_n_head(model);
                std::vector<float> scores((size_t) (layers * heads), 1.0f);
                scores[1] = 5.0f;
                CHECK(kvedge_plan_set_profile(plan.plan, KVEDGE_STAGE_ALLOCATOR, scores.data(), nullptr, layers, heads, nullptr) == KVEDGE_OK);
            }
            if (!strcmp(name, "spectral")) {
                plan.set("scorer", "dct");
            }
            try_plan(w, plan, name);
            if (stage == KVEDGE_STAGE_DECODE) {
                w.answer(40);  // enough to drop, seal and pack rows
                CHECK(finite(w.logits()));
            }
        }
    }
}

// The setting `critical` with the model's weights. Each norm runs twice, because the second run uses weights that the first has read.
void critical_rule(llama_model * model) {
    World w(model, nullptr);
    for (const char * norm : { "l1", "l2", "l1", "l2" }) {
        Plan plan({ { "scorer", "window" }, { "scorer.window", "8" }, { "critical", norm }, { "budget", "0.25" } });
        try_plan(w, plan, norm);
    }
}

// An uncompressed cache gives the logits of llama.cpp's own cache.
void as_without_a_cache(llama_model * model) {
    World ours(model, nullptr), theirs(model, nullptr, KVEDGE_TYPE_F16, false);
    for (World * w : { &ours, &theirs }) {
        read_prompt(*w);
        w->answer(5);
    }
    const auto a = ours.logits(), b = theirs.logits();
    for (size_t i = 0; i < a.size(); i++) {
        CHECK(close_to(a[i], b[i], 2e-2));
    }
}

void storage_types(llama_model * model) {
    Plan plan({ { "scorer", "cumulative" }, { "reducer", "pivotal" }, { "budget", "0.5" } });
    for (int32_t type = KVEDGE_TYPE_F16; type <= KVEDGE_TYPE_KIVI2; type++) {
        World w(model, plan.plan, (kvedge_type) type);
        read_prompt(w);
        const uint64_t before = w.stats().bytes;
        w.answer(70);  // starts the automatic compression, and fills two groups of 32 generated rows
        CHECK(w.stats().n_compressions == 1 && w.stats().after_bytes < before);
        CHECK(finite(w.logits()));
    }
}

// ---------------------------------------------------------------------------------------------------------

namespace {

std::atomic<int> calls{ 0 };

kvedge_status by_value(const kvedge_score_input * in, float * out, kvedge_error *) {
    calls++;
    for (int32_t i = 0; i < in->n_heads_kv * in->n_tokens; i++) {
        out[i] = std::fabs(in->v[(size_t) i * (size_t) in->d_v]);
    }
    return KVEDGE_OK;
}

kvedge_status refuses(const kvedge_score_input *, float *, kvedge_error * err) {
    std::snprintf(err->message, sizeof(err->message), "not today");
    return KVEDGE_E_UNSUPPORTED;
}

kvedge_status throws(const kvedge_score_input *, float *, kvedge_error *) { throw std::runtime_error("a stage of ill manners"); }

kvedge_status evenly(const kvedge_allocate_input * in, int32_t * counts, kvedge_error *) {
    std::fill(counts, counts + in->n_rows, in->budget);
    return KVEDGE_OK;
}

kvedge_status halved(const kvedge_reduce_input * in, float *, float * v, kvedge_error *) {
    for (int32_t i = 0; i < in->n_kept * in->d_v; i++) {
        v[i] /= 2;
    }
    return KVEDGE_OK;
}

void add_scorer(Plan & plan, const char * name, kvedge_status (*score)(const kvedge_score_input *, float *, kvedge_error *), bool safe) {
    kvedge_custom_scorer given{};
    kvedge_error         err{};
    given.struct_size = sizeof(given);
    given.name        = name;
    given.score       = score;
    given.thread_safe = safe;
    given.n_queries   = 4;
    given.column_sums = true;
    CHECK(kvedge_plan_add_scorer(plan.plan, &given, &err) == KVEDGE_OK);
}

}  // namespace

void own_stages(llama_model * model) {
    calls = 0;
    Plan plan({ { "budget", "24" } });
    add_scorer(plan, "by-value", by_value, true);
    add_scorer(plan, "refuses", refuses, false);
    add_scorer(plan, "throws", throws, true);
    kvedge_custom_allocator even{};
    even.struct_size = sizeof(even);
    even.name        = "evenly";
    even.allocate    = evenly;
    kvedge_custom_reducer half{};
    half.struct_size = sizeof(half);
    half.name        = "halved";
    half.thread_safe = true;
    half.reduce      = halved;
    CHECK(kvedge_plan_add_allocator(plan.plan, &even, nullptr) == KVEDGE_OK);
    CHECK(kvedge_plan_add_reducer(plan.plan, &half, nullptr) == KVEDGE_OK);
    plan.set("scorer", "by-value");
    plan.set("allocator", "evenly");
    plan.set("reducer", "halved");
    World w(model, plan.plan);
    read_prompt(w);
    w.answer(2);
    CHECK(calls == w.stats().n_layers && w.kept(0, 0).size() == 24 + 2);

    for (const char * name : { "refuses", "throws" }) {
        kvedge_error err{};
        plan.set("scorer", name);
        w.clear();
        CHECK(kvedge_set_plan(w.kv, plan.plan, &err) == KVEDGE_OK);
        read_prompt(w);
        CHECK(kvedge_compress(w.kv, 0, &err) == (strcmp(name, "throws") ? KVEDGE_E_STAGE : KVEDGE_E_STATE) && err.message[0]);
        CHECK(w.kept(0, 0).size() == PROMPT);  // unchanged
        CHECK(w.decode(words(model, 1, 3)) != 0);  // fails because the compression before it fails
        CHECK(kvedge_take_error(w.kv, &err) != KVEDGE_OK && err.message[0]);
    }
}
