#include "fuzz/plans.h"

#include <cmath>

namespace kvedge::fuzz {

namespace {

const char * const STAGES[] = { "scorer", "allocator", "reducer", "decode", "pruner" };
const char * const BUDGETS[] = { "0.5", "0.2", "1", "7", "16", "32", "1.0", "0.01", "2147483647", "0.999" };
const char * const RECENTS[] = { "auto", "0", "3", "0.1", "0.0", "1.0", "40", "2147483647" };
const char * const COUNTS[]  = { "0", "1", "4", "33", "2147483647" };

template <size_t N> const char * one_of(Input & in, const char * const (&words)[N]) { return words[in.byte() % N]; }

void set(kvedge_plan * plan, const std::string & key, const std::string & value) {
    kvedge_error err{};
    (void) checked_status(kvedge_plan_set(plan, key.c_str(), value.c_str(), &err), err);
}

std::string word(const char * choices, int32_t i) {
    std::vector<std::string> words(1);
    for (const char * c = choices; *c; c++) {
        if (*c == ',') {
            words.emplace_back();
        } else {
            words.back() += *c;
        }
    }
    return words[(size_t) i % words.size()];
}

// Returns a value of a setting, which is nearly always valid.
std::string value_of(Input & in, const kvedge_setting & setting) {
    if (setting.choices) {
        return word(setting.choices, in.byte());
    }
    const double share = in.byte() / 255.0;
    double       x     = std::clamp(setting.lowest, -1e6, 1e6);
    x += share * (std::clamp(setting.highest, -1e6, 64.0 + std::max(0.0, x)) - x);
    if (setting.step > 0) {
        const auto step = (double) setting.step;
        return std::to_string((long long) (setting.lowest + step * (double) (long long) ((x - setting.lowest) / step)));
    }
    return std::to_string(x);
}

void draw_stage(Input & in, kvedge_plan * plan, int32_t stage) {
    const int32_t n = kvedge_stage_count((kvedge_stage) stage);
    const char *  member = kvedge_stage_name((kvedge_stage) stage, in.byte() % n);
    set(plan, STAGES[stage], member);
    const uint8_t chosen = in.byte();  // bit i: set setting i of the member
    for (int32_t i = 0; const kvedge_setting * setting = kvedge_stage_setting((kvedge_stage) stage, member, i); i++) {
        if (chosen >> (i % 8) & 1) {
            set(plan, std::string(STAGES[stage]) + "." + setting->name, value_of(in, *setting));
        }
    }
}

void draw_profile(Input & in, kvedge_plan * plan, int32_t n_layers, int32_t n_columns) {
    const auto         stage = (kvedge_stage) in.between(0, 4);
    std::vector<float> values((size_t) n_layers * (size_t) n_columns), budgets;
    for (float & x : values) {
        x = in.byte() / 255.0f;
    }
    for (int32_t i = 0; i < n_columns; i++) {
        budgets.push_back((float) (i + 1) / (float) n_columns);
    }
    kvedge_error  err{};
    const bool    with       = (in.byte() & 1) != 0;
    const float * of_budgets = with ? budgets.data() : nullptr;
    (void) checked_status(kvedge_plan_set_profile(plan, stage, values.data(), of_budgets, n_layers, n_columns, &err), err);
}

float odd_number(Input & in) {
    const float numbers[] = { 0.0f, -0.0f, 1e-42f, 65504.0f, -65520.0f, 3e38f, -3e38f, 1.0f };
    const auto  which     = in.byte();
    if (which < 8) {
        return numbers[which];
    }
    return which == 8 ? (float) INFINITY : which == 9 ? (float) NAN : in.number<float>();
}

void fill(std::vector<float> & x, size_t n, uint32_t & state) {
    x.resize(n);
    for (float & value : x) {
        state = state * 1664525u + 1013904223u;
        value = (float) ((int32_t) (state >> 8) - (1 << 23)) / (float) (1 << 22);
    }
}

void check_head(const kvedge_result * result, const kvedge_arrays & of, int32_t l, int32_t h) {
    const int32_t n = kvedge_result_length(result, l, h);
    REQUIRE(n >= 1 && n <= of.n_tokens);
    const int32_t * kept = kvedge_result_kept(result, l, h);
    for (int32_t i = 0; i < n; i++) {
        REQUIRE(kept[i] >= 0 && kept[i] < of.n_tokens && (i == 0 || kept[i] > kept[i - 1]));
    }
    const size_t bytes = (size_t) n * (size_t) of.head_size * sizeof(float);
    std::vector<float> copy((size_t) n * (size_t) of.head_size);
    memcpy(copy.data(), kvedge_result_k(result, l, h), bytes);
    memcpy(copy.data(), kvedge_result_v(result, l, h), bytes);
}

}  // namespace

PlanHandle new_plan() {
    kvedge_plan * plan = nullptr;
    kvedge_error  err{};
    REQUIRE(checked_status(kvedge_plan_create(&plan, &err), err) == KVEDGE_OK);
    return PlanHandle(plan);
}

void draw_plan(Input & in, kvedge_plan * plan, int32_t n_layers, int32_t n_heads, int32_t n_heads_kv) {
    for (int32_t stage = 0; stage < 5; stage++) {
        draw_stage(in, plan, stage);
    }
    set(plan, "budget", one_of(in, BUDGETS));
    set(plan, "recent", one_of(in, RECENTS));
    set(plan, "sinks", one_of(in, COUNTS));
    const uint8_t flags = in.byte();
    set(plan, "text_prior", flags & 1 ? "true" : "false");
    set(plan, "text_overflow", flags & 2 ? "keep_all" : "budget");
    set(plan, "critical", flags & 16 ? "l1" : flags & 32 ? "l2" : "none");
    set(plan, "critical_half", flags & 64 ? "free" : "budget");
    set(plan, "image_tokens", one_of(in, BUDGETS));
    if (flags & 4) {
        draw_profile(in, plan, n_layers, flags & 8 ? n_heads : n_heads_kv);
    }
    kvedge_error err{};
    (void) checked_status(kvedge_plan_check(plan, &err), err);
}

void draw_arrays(Input & in, Arrays & out) {
    kvedge_arrays & of = out.of;
    of.n_layers   = in.between(1, 2);
    of.n_heads_kv = in.between(1, 3);
    of.n_heads    = of.n_heads_kv * in.between(1, 2);
    of.n_tokens   = in.between(1, 80);
    const int32_t sizes[] = { 8, 32, 16, 24, 40, 64 };
    of.head_size  = sizes[in.byte() % 6];
    uint32_t state = in.number<uint32_t>();
    const size_t rows = (size_t) of.n_layers * (size_t) of.n_tokens * (size_t) of.head_size;
    fill(out.q, rows * (size_t) of.n_heads, state);
    fill(out.k, rows * (size_t) of.n_heads_kv, state);
    fill(out.v, rows * (size_t) of.n_heads_kv, state);
    for (std::vector<float> * x : { &out.q, &out.k, &out.v }) {
        for (int32_t i = in.between(0, 3); i > 0; i--) {  // writes a run of one odd number
            const size_t at = in.number<uint16_t>() % x->size(), n = std::min<size_t>(x->size() - at, 1 + in.byte());
            std::fill_n(x->begin() + (std::ptrdiff_t) at, n, odd_number(in));
        }
    }
    const uint8_t period = in.byte();  // tokens of each image; 0: no images
    out.mask.clear();
    for (int32_t t = 0; period > 0 && t < of.n_tokens; t++) {
        out.mask.push_back((uint8_t) (t % (period + 1) != 0));
    }
    of.q = out.q.data();
    of.k = out.k.data();
    of.v = out.v.data();
    of.image_mask = period > 0 ? out.mask.data() : nullptr;
}

void give_projection(kvedge_plan * plan, const kvedge_arrays & of) {
    constexpr int32_t  WIDTH = 7;
    uint32_t           state = 1;
    std::vector<float> weights;
    kvedge_error       err{};
    fill(weights, (size_t) of.n_layers * (size_t) of.n_heads * (size_t) of.head_size * (size_t) WIDTH, state);
    (void) checked_status(kvedge_plan_set_projection(plan, weights.data(), of.n_layers, of.n_heads, of.head_size, WIDTH, &err), err);
}

bool compress(Input & in, const kvedge_plan * plan, const Arrays & arrays) {
    const kvedge_arrays & of     = arrays.of;
    const auto            type_k = (kvedge_type) in.between(0, 7), type_v = (kvedge_type) in.between(0, 7);
    const int32_t         step   = in.byte() % 48, threads = 1 + (in.byte() == 255);
    kvedge_result *       made   = nullptr;
    kvedge_error          err{};
    const auto            status = step > 0 ? kvedge_stream_arrays(plan, &of, type_k, type_v, step, threads, &made, &err)
                                            : kvedge_compress_arrays_as(plan, &of, type_k, type_v, threads, &made, &err);
    const ResultHandle    result(made);
    REQUIRE((checked_status(status, err) == KVEDGE_OK) == (made != nullptr));
    for (int32_t i = 0; made && i < of.n_layers * of.n_heads_kv; i++) {
        check_head(made, of, i / of.n_heads_kv, i % of.n_heads_kv);
        REQUIRE((kvedge_result_scores(made, i / of.n_heads_kv, i % of.n_heads_kv) != nullptr) <= (step == 0));
    }
    REQUIRE(!made || kvedge_result_length(made, of.n_layers, 0) == -1);
    return made != nullptr;
}

}  // namespace kvedge::fuzz
