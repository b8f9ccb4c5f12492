// Fuzzes custom stages: names, settings and structs of any content, and callbacks that write numbers from the fuzzer's bytes.

#include "fuzz/plans.h"
#include "kvedge.h"

#include <cmath>

using namespace kvedge::fuzz;

namespace {

// The user data of the callbacks: the bytes that they write numbers, and sometimes an error, from.
struct Said {
    Input in;
};

float value(Input & in) {
    const uint8_t b = in.byte();
    return b == 255 ? (float) NAN : b == 254 ? (float) INFINITY : b == 253 ? 1e30f : (float) b / 8.0f;
}

kvedge_status ended(Input & in, kvedge_error * err) {
    const uint8_t how = in.byte();
    if (how < 250) {
        return KVEDGE_OK;
    }
    if (how > 251) {
        memset(err->message, 'x', how > 253 ? sizeof(err->message) : 20);
    }
    return (kvedge_status) in.between(0, 9);
}

kvedge_status score(const kvedge_score_input * of, float * out, kvedge_error * err) {
    Input & in = ((Said *) of->user_data)->in;
    float   sum = 0.0f;
    for (size_t i = 0; i < (size_t) of->n_heads_kv * (size_t) of->n_tokens; i++) {
        sum += of->k[i * (size_t) of->d_k] + of->v[(i + 1) * (size_t) of->d_v - 1] + (float) of->image_mask[i % (size_t) of->n_tokens];
        sum += of->column_sums ? of->column_sums[i] : 0.0f;
        out[i] = value(in);
    }
    for (size_t i = 0; of->q && i < (size_t) of->n_queries * (size_t) of->n_heads * (size_t) of->d_k; i++) {
        sum += of->q[i];
    }
    out[0] += sum == 12345.0f ? 1.0f : 0.0f;
    return ended(in, err);
}

kvedge_status allocate(const kvedge_allocate_input * of, int32_t * counts, kvedge_error * err) {
    Input &       in   = ((Said *) of->user_data)->in;
    const uint8_t kind = in.byte();
    int32_t       rows = 0;
    for (int32_t l = 0; l < of->n_layers; l++) {
        rows += of->n_heads_kv[l];
    }
    REQUIRE(rows == of->n_rows && of->budget >= 1 && of->budget < of->n_tokens);
    for (int32_t r = 0; r < rows; r++) {
        const int32_t shift = kind & 1 ? in.between(0, 3) : 0;  // KV pairs that move from one head to the next head
        counts[r] += kind < 200 ? of->budget - (r + 1 < rows ? shift : 0) : in.number<int32_t>();
        counts[std::min(r + 1, rows - 1)] += kind < 200 && r + 1 < rows ? shift : 0;
    }
    return ended(in, err);
}

kvedge_status reduce(const kvedge_reduce_input * of, float * k, float * v, kvedge_error * err) {
    Input & in = ((Said *) of->user_data)->in;
    for (int32_t i = 0; i < of->n_kept; i++) {
        REQUIRE(of->kept[i] >= 0 && of->kept[i] < of->n_tokens && (i == 0 || of->kept[i] > of->kept[i - 1]));
        k[(size_t) i * (size_t) of->d_k] = value(in);
        v[(size_t) (i + 1) * (size_t) of->d_v - 1] += 1.0f;
    }
    return ended(in, err);
}

// The name and settings that a stage is declared with. They must live until the stage is added to a plan.
struct Declared {
    std::string    name, help, choices;
    kvedge_setting settings[9];
    int32_t        n_settings;
};

std::string text(Input & in, const char * usual) { return in.byte() & 1 ? usual : in.line(); }

void declare(Input & in, Declared & out, const char * usual) {
    out.name       = text(in, usual);
    out.help       = text(in, "one line");
    out.choices    = text(in, "mean,max");
    out.n_settings = in.between(-1, 9);
    for (kvedge_setting & s : out.settings) {
        s = { out.name.c_str(), out.help.c_str(), 1.0, 0.0, 4.0, in.between(0, 2), nullptr };
        const uint8_t flags = in.byte();
        s.choices  = flags & 1 ? out.choices.c_str() : nullptr;
        s.help     = flags & 2 ? nullptr : s.help;
        s.fallback = flags & 4 ? in.number<double>() : s.fallback;
        s.highest  = flags & 8 ? in.number<double>() : s.highest;
        s.name     = flags & 16 ? "x" : flags & 32 ? nullptr : s.name;
    }
}

template <class S> S begun(Input & in, const Declared & declared, Said & said) {
    S out{};
    const uint8_t odd = in.byte();
    out.struct_size = odd == 255 ? in.byte() % (sizeof(S) + 1) : sizeof(S);
    out.name        = odd == 254 ? nullptr : declared.name.c_str();
    out.summary     = declared.help.c_str();
    out.settings    = declared.settings;
    out.n_settings  = odd < 128 ? 0 : std::min(declared.n_settings, (int32_t) 9);
    out.user_data   = &said;
    return out;
}

void use(kvedge_plan * plan, const char * stage, const Declared & declared, kvedge_status added) {
    kvedge_error err{};
    const auto   status = checked_status(kvedge_plan_set(plan, stage, declared.name.c_str(), &err), err);
    REQUIRE(added != KVEDGE_OK || status == KVEDGE_OK);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    Input  in(data, size);
    Arrays arrays;
    draw_arrays(in, arrays);
    const PlanHandle plan = new_plan();
    draw_plan(in, plan.get(), arrays.of.n_layers, arrays.of.n_heads, arrays.of.n_heads_kv);
    give_projection(plan.get(), arrays.of);
    Declared a, b, c;
    declare(in, a, "mine");
    declare(in, b, "own");
    declare(in, c, "third");
    Said said{ in };  // callbacks read the input's next bytes

    kvedge_error err{};
    auto         scorer = begun<kvedge_custom_scorer>(in, a, said);
    scorer.n_queries    = in.byte() == 255 ? in.number<int32_t>() : in.between(0, 100);
    scorer.recent       = in.byte() == 255 ? in.number<int32_t>() : in.between(0, 20);
    scorer.column_sums  = (in.byte() & 1) != 0;
    scorer.score        = in.byte() == 255 ? nullptr : score;
    use(plan.get(), "scorer", a, checked_status(kvedge_plan_add_scorer(plan.get(), &scorer, &err), err));
    auto allocator      = begun<kvedge_custom_allocator>(in, b, said);
    allocator.allocate  = allocate;
    use(plan.get(), "allocator", b, checked_status(kvedge_plan_add_allocator(plan.get(), &allocator, &err), err));
    auto reducer        = begun<kvedge_custom_reducer>(in, c, said);
    reducer.reduce      = reduce;
    use(plan.get(), "reducer", c, checked_status(kvedge_plan_add_reducer(plan.get(), &reducer, &err), err));
    said.in = in;
    (void) compress(in, plan.get(), arrays);
    return 0;
}
