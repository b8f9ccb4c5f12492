#include "plan/custom.h"

#include "system/error.h"
#include "system/structs.h"
#include "kernels/widen.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

namespace kvedge {

namespace {

constexpr size_t  LONGEST_NAME   = 40;
constexpr int32_t MOST_QUERIES   = 1 << 20;
constexpr float   LARGEST_IN_F16 = 65504.0f;

template <class... A> [[noreturn]] void give_up(const char * format, A... args) {
    kvedge_error e{};
    fail(&e, KVEDGE_E_STAGE, format, args...);
    throw StageFailure(e.message);
}

// Calls a callback of the program. Throws StageFailure, with the callback's message, if it returns a status other than KVEDGE_OK.
template <class F> void call(const char * stage, const char * name, const F & callback) {
    kvedge_error        own{};
    const kvedge_status status = callback(&own);
    if (status == KVEDGE_OK) {
        return;
    }
    own.message[sizeof(own.message) - 1] = '\0';
    if (own.message[0]) {
        give_up("%s '%s': %s", stage, name, own.message);
    }
    give_up("%s '%s' failed with status %d and without a message", stage, name, (int) status);
}

// Writes the pending rows of the heads [first, first + n) of a layer as float32: k [n][T][d_k], v [n][T][d_v].
void widen(const ScoreInput & in, int32_t first, int32_t n, std::vector<float> & k, std::vector<float> & v) {
    const LayerShape & shape = in.shape;
    const auto T = (size_t) in.n_tokens, dk = (size_t) shape.d_k, dv = (size_t) shape.d_v;
    k.resize((size_t) n * T * dk);
    v.resize((size_t) n * T * dv);
    for (int32_t h = 0; h < n; h++) {
        const size_t   row  = (size_t) h * T;
        const HeadView view = in.view->head(in.layer, first + h);
        widen_rows(view.pending, shape, k.data() + row * dk, v.data() + row * dv);
    }
}

// Scores the KV heads [first, first + n) of a layer. The custom scorer sees them as a layer with n heads. image [T].
void score_heads(const ScoreInput & in, int32_t first, int32_t n, const uint8_t * image, float * out) {
    const kvedge_custom_scorer & given = in.self->custom->given;
    const LayerShape &           shape = in.shape;
    const int32_t                group = shape.n_heads / shape.n_heads_kv;
    const auto                   T = (size_t) in.n_tokens, heads = (size_t) n;
    std::vector<float>           k, v, q, sums;
    widen(in, first, n, k, v);
    kvedge_score_input to{ in.layer,  in.n_layers, n * group, n, in.n_tokens,
                           shape.d_k, shape.d_v, k.data(), v.data(), image, 0, nullptr, nullptr, in.params, given.user_data };
    if (given.n_queries > 0 && in.window_q) {
        to.n_queries   = std::min(given.n_queries, in.n_window);
        const auto row = (size_t) shape.n_heads * (size_t) shape.d_k, part = (size_t) (n * group) * (size_t) shape.d_k;
        for (int32_t t = in.n_window - to.n_queries; t < in.n_window; t++) {
            const float * from = in.window_q + (size_t) t * row + (size_t) (first * group) * (size_t) shape.d_k;
            q.insert(q.end(), from, from + part);
        }
        for (float & x : q) {  // custom scorers get queries without the model's scale
            x *= std::sqrt((float) shape.d_k);
        }
        to.q = q.data();
    }
    if (given.column_sums && in.observed->have().sums()) {
        const Columns & seen = in.observed->layer((size_t) in.layer).columns;
        sums.resize(heads * T);
        for (size_t h = 0; h < heads; h++) {
            const double * from = seen.sums().data() + ((size_t) first + h) * (size_t) seen.capacity;
            std::transform(from, from + T, sums.begin() + (std::ptrdiff_t) (h * T), [](double x) { return (float) x; });
        }
        to.column_sums = sums.data();
    }
    std::fill(out, out + heads * T, 0.0f);
    call("scorer", given.name, [&](kvedge_error * err) { return given.score(&to, out, err); });
    const float * nan = std::find_if(out, out + heads * T, [](float x) { return std::isnan(x); });
    if (nan != out + heads * T) {
        const auto at = (size_t) (nan - out);
        give_up("scorer '%s' gave NaN for layer %d, KV head %d, token %d", given.name, in.layer, first + (int) (at / T), (int) (at % T));
    }
}

// Scores a layer. In a stream whose heads hold different tokens, each head is scored in a call of its own, because
// kvedge_score_input has only one image mask.
void score(const ScoreInput & in, float * out) {
    const int32_t n = in.shape.n_heads_kv;
    if (!in.heads) {
        score_heads(in, 0, n, in.image, out);
        return;
    }
    for (int32_t h = 0; h < n; h++) {
        const size_t at = (size_t) h * (size_t) in.n_tokens;
        score_heads(in, h, 1, in.heads + at, out + at);
    }
}

void allocate(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    const kvedge_custom_allocator & given = in.self->custom->given;
    const auto                      T     = (size_t) in.n_tokens;
    std::vector<float>              scores;
    std::vector<int32_t>            heads;
    size_t                          n_rows = 0;
    for (size_t l = 0; l < out.size(); l++) {
        heads.push_back((int32_t) out[l].size());
        n_rows += out[l].size();
    }
    scores.reserve(n_rows * T);
    for (const auto & of_layer : *in.scores) {
        scores.insert(scores.end(), of_layer.begin(), of_layer.end());
    }
    std::vector<int32_t>        counts(n_rows, 0);
    const kvedge_allocate_input to{ (int32_t) out.size(), (int32_t) n_rows, in.n_tokens, heads.data(), scores.data(), in.image,
                                    in.budget, in.recent, in.params, given.user_data };
    call("allocator", given.name, [&](kvedge_error * err) { return given.allocate(&to, counts.data(), err); });

    int64_t sum = 0;
    size_t  row = 0;
    for (size_t l = 0; l < out.size(); l++) {
        for (size_t h = 0; h < out[l].size(); h++, row++) {
            if (counts[row] < 1 || counts[row] > in.n_tokens) {
                give_up("allocator '%s' gives layer %d, KV head %d a budget of %d KV pairs; a KV head of %d tokens needs a budget of 1 to "
                        "%d",
                        given.name, (int) l, (int) h, counts[row], in.n_tokens, in.n_tokens);
            }
            out[l][h] = counts[row];
            sum += counts[row];
        }
    }
    if (sum != (int64_t) n_rows * in.budget) {
        give_up("allocator '%s' gives %lld KV pairs in total, but the total must be %lld: %d for each of %d KV heads", given.name,
                (long long) sum, (long long) n_rows * in.budget, in.budget, (int) n_rows);
    }
}

void check_rows(const ReduceInput & in, const char * name, const float * rows, int32_t d, const char * what) {
    const float limit = in.type == Type::f16 ? LARGEST_IN_F16 : FLT_MAX;
    for (size_t i = 0; i < (size_t) in.n_kept * (size_t) d; i++) {
        if (!(std::fabs(rows[i]) <= limit)) {
            give_up("reducer '%s' gave %g in the %s of token %d of layer %d, KV head %d; the cache stores finite numbers up to %g",
                    name, (double) rows[i], what, in.kept[i / (size_t) d], in.layer, in.head, (double) limit);
        }
    }
}

void reduce(const ReduceInput & in, const ReducedRows & out) {
    const kvedge_custom_reducer & given = in.self->custom->given;
    const auto                    dk = (size_t) in.d_k, dv = (size_t) in.d_v;
    for (size_t i = 0; i < (size_t) in.n_kept; i++) {
        std::copy_n(in.k + (size_t) in.kept[i] * dk, dk, out.k + i * dk);
        std::copy_n(in.v + (size_t) in.kept[i] * dv, dv, out.v + i * dv);
    }
    const kvedge_reduce_input to{ in.layer, in.n_layers, in.head, in.n_tokens, in.d_k, in.d_v, in.k, in.v, in.kept, in.n_kept,
                                  in.sinks, in.recent, in.params, given.user_data };
    call("reducer", given.name, [&](kvedge_error * err) { return given.reduce(&to, out.k, out.v, err); });
    check_rows(in, given.name, out.k, in.d_k, "key");
    check_rows(in, given.name, out.v, in.d_v, "value");
}

size_t no_scratch(const ReduceSize &) { return 0; }

// ---------------------------------------------------------------------------------------------------------

bool is_name(const char * name) {
    const size_t n = name ? strnlen(name, LONGEST_NAME + 1) : 0;
    return n >= 1 && n <= LONGEST_NAME && name[0] >= 'a' && name[0] <= 'z' && std::all_of(name, name + n, [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
    });
}

bool is_setting(const kvedge_setting & s) {
    if (!s.name || !s.name[0] || strnlen(s.name, LONGEST_NAME + 1) > LONGEST_NAME || s.step < 0) {
        return false;
    }
    if (s.choices) {
        const auto last = std::count(s.choices, s.choices + strlen(s.choices), ',');
        return s.choices[0] && s.fallback >= 0 && s.fallback <= (double) last && s.fallback == std::floor(s.fallback);
    }
    return s.lowest <= s.fallback && s.fallback <= s.highest &&
           (s.step == 0 || std::fmod(s.fallback - s.lowest, (double) s.step) == 0.0);
}

// Checks the fields that all kinds of custom stages have, copies the texts and settings, and adds the stage to plan.own.
template <class C> kvedge_status take(
    kvedge_plan & plan, const std::shared_ptr<C> & made, kvedge_stage number, bool has_function, kvedge_error * err) {
    C &          custom = *made;
    auto &       given  = custom.given;
    const char * stage  = STAGE_NAMES[number];
    if (!is_name(given.name)) {
        return fail(err, KVEDGE_E_ARGUMENT, "the name of a %s must have 1 to %d characters of a-z, 0-9 and -, and must start with a "
                    "letter", stage, (int) LONGEST_NAME);
    }
    if (known_member(plan, number, given.name)) {
        return fail(err, KVEDGE_E_ARGUMENT, "there is a %s named '%s' already; choose another name", stage, given.name);
    }
    if (!has_function) {
        return fail(err, KVEDGE_E_ARGUMENT, "%s '%s' has no function; set the function pointer", stage, given.name);
    }
    if (given.n_settings < 0 || given.n_settings > MAX_PARAMS || (given.n_settings > 0 && !given.settings)) {
        return fail(err, KVEDGE_E_ARGUMENT, "%s '%s' has n_settings %d; use 0 to %d, and set settings if n_settings is above 0", stage,
                    given.name, given.n_settings, MAX_PARAMS);
    }
    const auto keep = [&](const char * text) { return text ? custom.texts.emplace_back(text).c_str() : nullptr; };
    for (int32_t i = 0; i < given.n_settings; i++) {
        const kvedge_setting & s = given.settings[i];
        if (!is_setting(s)) {
            return fail(err, KVEDGE_E_ARGUMENT, "setting %d of %s '%s' is invalid; use a short name, a step of 0 or more, and a fallback "
                        "within the range or the choices", i, stage, given.name);
        }
        custom.params.push_back({ keep(s.name), nullptr, s.fallback, s.lowest, s.highest, s.step, keep(s.choices) });
    }
    custom.params.push_back({});
    given.name           = keep(given.name);
    given.summary        = nullptr;
    given.settings       = nullptr;
    custom.member.name   = given.name;
    custom.member.params = custom.params.data();
    custom.member.custom = &custom;
    plan.own.push_back({ number, { made, &custom.member } });
    return ok(err);
}

kvedge_status incomplete(const char * function, kvedge_error * err) {
    return fail(err, KVEDGE_E_ARGUMENT, "%s: plan or stage is NULL, struct_size of the stage is not set, or the stage is of a newer "
                "kvedge.h", function);
}

}  // namespace

const Member * known_member(const kvedge_plan & plan, kvedge_stage stage, const char * name) {
    for (const auto & own : plan.own) {
        if (own.stage == stage && !strcmp(own.member->name, name)) {
            return own.member.get();
        }
    }
    return find_member(stage, name);
}

}  // namespace kvedge

using namespace kvedge;

extern "C" kvedge_status kvedge_plan_add_scorer(kvedge_plan * plan, const kvedge_custom_scorer * given, kvedge_error * err) try {
    auto                   custom = std::make_shared<CustomScorer>();
    kvedge_custom_scorer & own    = custom->given;
    if (!plan || !read_struct(given, own)) {
        return incomplete("kvedge_plan_add_scorer", err);
    }
    if (own.n_queries < 0 || own.n_queries > MOST_QUERIES || own.recent < 0) {
        return fail(err, KVEDGE_E_ARGUMENT, "n_queries of a scorer must be 0 to %d, and recent must be 0 or more", MOST_QUERIES);
    }
    custom->member.score = score;
    return take(*plan, custom, KVEDGE_STAGE_SCORER, own.score != nullptr, err);
} catch (...) {
    return caught(err, "add the scorer");
}

extern "C" kvedge_status kvedge_plan_add_allocator(
    kvedge_plan * plan, const kvedge_custom_allocator * given, kvedge_error * err) try {
    auto                      custom = std::make_shared<CustomAllocator>();
    kvedge_custom_allocator & own    = custom->given;
    if (!plan || !read_struct(given, own)) {
        return incomplete("kvedge_plan_add_allocator", err);
    }
    custom->member.allocate = allocate;
    return take(*plan, custom, KVEDGE_STAGE_ALLOCATOR, own.allocate != nullptr, err);
} catch (...) {
    return caught(err, "add the allocator");
}

extern "C" kvedge_status kvedge_plan_add_reducer(kvedge_plan * plan, const kvedge_custom_reducer * given, kvedge_error * err) try {
    auto                    custom = std::make_shared<CustomReducer>();
    kvedge_custom_reducer & own    = custom->given;
    if (!plan || !read_struct(given, own)) {
        return incomplete("kvedge_plan_add_reducer", err);
    }
    custom->member.reduce  = reduce;
    custom->member.scratch = no_scratch;
    return take(*plan, custom, KVEDGE_STAGE_REDUCER, own.reduce != nullptr, err);
} catch (...) {
    return caught(err, "add the reducer");
}
