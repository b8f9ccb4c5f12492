// Compares a prompt compressed layer by layer with the same prompt compressed at its end: the rows and tokens are equal, and the memory
// never exceeds the kept rows and one layer. Includes earlier turns, an answer that awaits its compression, failures and aborts.

#include "attention/attention.h"
#include "kernels/kernels.h"
#include "store/store.h"
#include "check.h"
#include "compress/bounded.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

using namespace kvedge;

namespace {

const std::vector<LayerShape> SHAPES = { { 0, 4, 2, 64, 32 }, { 1, 2, 1, 32, 64 }, { 2, 4, 4, 32, 32 } };

struct Tokens {
    std::vector<std::vector<float>> q, k, v;  // [layer][n][heads][d]
    std::vector<uint8_t>            image;
    std::vector<int32_t>            pos;

    int32_t n() const { return (int32_t) pos.size(); }
};

Tokens random_tokens(int32_t n, int32_t first, uint32_t seed) {
    std::mt19937                    rng(seed);
    std::normal_distribution<float> normal;
    Tokens                          t;
    const auto                      fill = [&](std::vector<std::vector<float>> & to, int32_t heads, int32_t d) {
        to.emplace_back((size_t) n * (size_t) heads * (size_t) d);
        std::generate(to.back().begin(), to.back().end(), [&] { return normal(rng); });
    };
    for (const LayerShape & s : SHAPES) {
        fill(t.q, s.n_heads, s.d_k);
        fill(t.k, s.n_heads_kv, s.d_k);
        fill(t.v, s.n_heads_kv, s.d_v);
    }
    for (int32_t i = 0; i < n; i++) {
        t.pos.push_back(first + i);
        t.image.push_back(i > n / 4 && i < 3 * n / 4);
    }
    return t;
}

// Stores the rows of the last entered tokens in one layer and computes their attention, as a graph does.
void run_layer(Sequence & seq, const Tokens & t, size_t l, const Observation & wanted, std::vector<float> * out = nullptr) {
    const LayerShape &    s     = SHAPES[l];
    const Storage         plain = seq.rows.storage().plain();
    std::vector<SpinLock> locks((size_t) s.n_heads_kv);
    std::vector<float>    result((size_t) t.n() * (size_t) s.n_heads * (size_t) s.d_v);
    for (int32_t i = 0; i < t.n(); i++) {
        const auto at = seq.rows.place_from_end(i, t.n());
        for (int32_t h = 0; h < s.n_heads_kv; h++) {
            const size_t row = (size_t) i * (size_t) s.n_heads_kv + (size_t) h;
            kernels().from_f32(plain.k, t.k[l].data() + row * (size_t) s.d_k, k_row(at, (int32_t) l, h), (size_t) s.d_k);
            kernels().from_f32(plain.v, t.v[l].data() + row * (size_t) s.d_v, v_row(at, (int32_t) l, h), (size_t) s.d_v);
        }
    }
    AttendJob job{};
    job.rows       = &seq.rows;
    job.layer     = (int32_t) l;
    job.n         = t.n();
    job.causal    = true;
    job.q         = t.q[l].data();
    job.q_head    = (size_t) s.d_k;
    job.q_token   = (size_t) s.n_heads * (size_t) s.d_k;
    job.out       = result.data();
    job.out_head  = (size_t) s.d_v;
    job.out_token = (size_t) s.n_heads * (size_t) s.d_v;
    job.scale     = 1.0f / std::sqrt((float) s.d_k);
    job.wanted    = wanted;
    job.seen      = &seq.observed;
    job.locks     = locks.data();
    if (wanted.window > 0) {
        record_window(job, seq.observed, 0, 1);
    }
    Scratch scratch;
    CHECK(scratch.reserve(SHAPES, seq.rows.head_length((int32_t) l, 0) + t.n()));
    for (int32_t task = 0; task < prefill_tasks(job, scratch); task++) {
        prefill_task(job, task, scratch);
    }
    if (out) {
        *out = result;
    }
}

void read_ordinary(Sequence & seq, const kvedge_plan & plan, const Tokens & t) {
    const Observation wanted = plan_observes(plan);
    CHECK(make_room(seq, wanted, t.n()) && seq.rows.append(t.n(), t.pos.data(), false));
    seq.rows.mark_images(t.n(), t.image.data());
    seq.observe(t.n(), true);
    for (size_t l = 0; l < SHAPES.size(); l++) {
        run_layer(seq, t, l, wanted);
    }
}

void compress_now(Sequence & seq, const kvedge_plan & plan) {
    Compression  outcome;
    kvedge_error err{};
    CHECK(compress_pending(seq, plan, 2, outcome, &err) == KVEDGE_OK);
}

void read_bounded(Sequence & seq, const kvedge_plan & plan, const Tokens & t, Compression & outcome) {
    BoundedPrompt prompt(seq, plan);
    kvedge_error  err{};
    CHECK(BoundedPrompt::pays(seq, plan, t.n()));
    CHECK(prompt.enter(t.n(), t.pos.data(), t.image.data(), &err) == KVEDGE_OK);
    seq.observe(t.n(), true);
    for (size_t l = 0; l < SHAPES.size(); l++) {
        CHECK(prompt.layers() == (int32_t) l && !prompt.done());
        run_layer(seq, t, l, prompt.wanted());
        CHECK(prompt.finish_layer(l, &err) == KVEDGE_OK);
    }
    CHECK(prompt.done() && !prompt.failed());
    outcome.before_bytes = prompt.outcome().before_bytes;
    outcome.after_bytes  = prompt.outcome().after_bytes;
    outcome.peak_bytes   = prompt.outcome().peak_bytes;
}

std::vector<float> rows_of(const Sequence & seq, int32_t l, int32_t h) {
    const LayerShape & s = SHAPES[(size_t) l];
    std::vector<float> out;
    each_segment(seq.rows, l, h, [&](const Segment & seg) {
        const size_t at = out.size(), n = (size_t) seg.n;
        out.resize(at + n * (size_t) (s.d_k + s.d_v));
        kernels().widen(seg.k, seg.n, s.d_k, out.data() + at, (size_t) s.d_k);
        kernels().widen(seg.v, seg.n, s.d_v, out.data() + at + n * (size_t) s.d_k, (size_t) s.d_v);
    });
    return out;
}

void check_same(const Sequence & a, const Sequence & b) {
    CHECK(a.rows.contents().pos == b.rows.contents().pos && a.rows.contents().image == b.rows.contents().image && a.rows.pending_length() == b.rows.pending_length());
    for (int32_t l = 0; l < (int32_t) SHAPES.size(); l++) {
        for (int32_t h = 0; h < SHAPES[(size_t) l].n_heads_kv; h++) {
            CHECK(a.rows.head_tokens(l, h) == b.rows.head_tokens(l, h));
            CHECK(rows_of(a, l, h) == rows_of(b, l, h));
            std::vector<double> x((size_t) a.rows.head_length(l, h)), y((size_t) b.rows.head_length(l, h));
            read_scores(a.rows, l, h, x.data());
            read_scores(b.rows, l, h, y.data());
            std::vector<float> of_a(x.size()), of_b(y.size());
            read_biases(a.rows, l, h, of_a.data());
            read_biases(b.rows, l, h, of_b.data());
            CHECK(x == y && of_a == of_b);
        }
    }
}

struct Case {
    std::vector<std::pair<const char *, const char *>> set;
    Storage                                            storage;
};

kvedge_plan * make_plan(const Case & c) {
    kvedge_plan * plan = nullptr;
    kvedge_error  err{};
    CHECK(kvedge_plan_create(&plan, &err) == KVEDGE_OK);
    for (const auto & [key, value] : c.set) {
        CHECK(kvedge_plan_set(plan, key, value, &err) == KVEDGE_OK);
    }
    CHECK(check_bounded(*plan, c.storage, &err) == KVEDGE_OK);
    return plan;
}

// Two turns, with an answer of three tokens in between, which the second compression covers, too.
void test_two_turns(const Case & c) {
    kvedge_plan * plan = make_plan(c);
    Sequence      ordinary(SHAPES, c.storage), bounded(SHAPES, c.storage);
    Compression   outcome;
    const Tokens  first = random_tokens(200, 0, 5), second = random_tokens(90, 203, 6);
    read_ordinary(ordinary, *plan, first);
    const uint64_t full = ordinary.rows.bytes();
    compress_now(ordinary, *plan);
    read_bounded(bounded, *plan, first, outcome);
    check_same(ordinary, bounded);
    const uint64_t page = 1 << 14;
    CHECK(outcome.after_bytes == bounded.rows.bytes());
    CHECK(outcome.peak_bytes <= bounded.rows.bytes() + full / 2 + index_bytes(bounded.rows) + (uint64_t) 200 * 4 * 8 * 64 + page);
    CHECK(outcome.before_bytes <= full && outcome.before_bytes + page > full);
    CHECK(bounded.score_bytes() == ordinary.score_bytes());
    for (auto * seq : { &ordinary, &bounded }) {
        for (int32_t i = 0; i < 3; i++) {
            const Tokens answer = random_tokens(1, 200 + i, 100 + (uint32_t) i);
            CHECK(seq->rows.append(1, answer.pos.data(), false));
            for (size_t l = 0; l < SHAPES.size(); l++) {
                run_layer(*seq, answer, l, {});
            }
        }
        seq->observed.skip_windows(seq->rows.pending_length());
    }
    read_ordinary(ordinary, *plan, second);
    compress_now(ordinary, *plan);
    read_bounded(bounded, *plan, second, outcome);
    check_same(ordinary, bounded);
    kvedge_plan_free(plan);
}

// If a bounded prompt is aborted after any layer, the sequence holds nothing of it, and reads the next prompt as a new sequence does.
void test_giving_up(const Case & c) {
    kvedge_plan * plan = make_plan(c);
    const Tokens  lost = random_tokens(120, 0, 7), kept = random_tokens(150, 0, 8);
    for (size_t after = 0; after < SHAPES.size(); after++) {
        Sequence    seq(SHAPES, c.storage), fresh(SHAPES, c.storage);
        Compression outcome;
        {
            BoundedPrompt prompt(seq, *plan);
            kvedge_error  err{};
            CHECK(prompt.enter(lost.n(), lost.pos.data(), lost.image.data(), &err) == KVEDGE_OK);
            seq.observe(lost.n(), true);
            for (size_t l = 0; l < after; l++) {
                run_layer(seq, lost, l, prompt.wanted());
                CHECK(prompt.finish_layer(l, &err) == KVEDGE_OK);
            }
            prompt.abandon();
            CHECK(prompt.failed() && !prompt.done());
        }
        CHECK(seq.rows.contents().pos.empty() && seq.rows.bytes() == 0 && seq.score_bytes() == 0);
        read_bounded(seq, *plan, kept, outcome);
        read_bounded(fresh, *plan, kept, outcome);
        check_same(seq, fresh);
    }
    kvedge_plan_free(plan);
}

kvedge_status refuse(const kvedge_score_input * in, float *, kvedge_error * err) {
    if (in->layer < 1) {
        return KVEDGE_OK;
    }
    snprintf(err->message, sizeof(err->message), "not this layer");
    return KVEDGE_E_ARGUMENT;
}

void test_failing_stage() {
    kvedge_plan *        plan = make_plan({ { { "budget", "0.3" } }, {} });
    kvedge_error         err{};
    kvedge_custom_scorer mine{};
    mine.struct_size = sizeof(mine);
    mine.name        = "refusing";
    mine.score       = refuse;
    CHECK(kvedge_plan_add_scorer(plan, &mine, &err) == KVEDGE_OK);
    CHECK(kvedge_plan_set(plan, "scorer", "refusing", &err) == KVEDGE_OK);
    CHECK(check_bounded(*plan, {}, &err) == KVEDGE_E_UNSUPPORTED);  // the scorer is not thread-safe
    mine.name        = "refusing-anywhere";
    mine.thread_safe = true;
    CHECK(kvedge_plan_add_scorer(plan, &mine, &err) == KVEDGE_OK);
    CHECK(kvedge_plan_set(plan, "scorer", "refusing-anywhere", &err) == KVEDGE_OK);
    CHECK(check_bounded(*plan, {}, &err) == KVEDGE_OK);

    Sequence      seq(SHAPES, {});
    BoundedPrompt prompt(seq, *plan);
    const Tokens  t = random_tokens(60, 0, 9);
    CHECK(prompt.enter(t.n(), t.pos.data(), t.image.data(), &err) == KVEDGE_OK);
    run_layer(seq, t, 0, prompt.wanted());
    CHECK(prompt.finish_layer(0, &err) == KVEDGE_OK);
    run_layer(seq, t, 1, prompt.wanted());
    CHECK(prompt.finish_layer(1, &err) == KVEDGE_E_STAGE && std::string(err.message).find("not this layer") != std::string::npos);
    CHECK(prompt.failed());
    prompt.abandon();
    CHECK(seq.rows.bytes() == 0 && seq.rows.contents().pos.empty());
    kvedge_plan_free(plan);
}

void test_refused_plans() {
    const auto check = [](const std::vector<std::pair<const char *, const char *>> & set, const Storage & storage, kvedge_status expected) {
        kvedge_plan * plan = nullptr;
        kvedge_error  err{};
        CHECK(kvedge_plan_create(&plan, &err) == KVEDGE_OK);
        for (const auto & [key, value] : set) {
            CHECK(kvedge_plan_set(plan, key, value, &err) == KVEDGE_OK);
        }
        CHECK(check_bounded(*plan, storage, &err) == expected);
        kvedge_plan_free(plan);
    };
    const Storage q8{ Type::q8_0, Type::q8_0 };
    for (const char * name : { "uniform", "pyramid", "ada", "heads" }) {
        check({ { "allocator", name } }, q8, KVEDGE_OK);
    }
    check({ { "allocator", "entropy" } }, {}, KVEDGE_E_UNSUPPORTED);
    check({ { "allocator", "prefix" } }, {}, KVEDGE_OK);
    check({ { "allocator", "prefix" } }, q8, KVEDGE_E_UNSUPPORTED);
    check({ { "allocator", "prefix" }, { "allocator.source", "profile" } }, q8, KVEDGE_OK);
    check({ { "allocator", "prefix" }, { "reducer", "pivotal" } }, {}, KVEDGE_E_UNSUPPORTED);
    check({ { "allocator", "prefix" }, { "scorer", "mean" } }, {}, KVEDGE_E_UNSUPPORTED);
    check({ { "allocator", "spectral" } }, {}, KVEDGE_E_UNSUPPORTED);
    check({ { "allocator", "spectral" }, { "scorer", "dct" } }, {}, KVEDGE_OK);
    check({ { "allocator", "spectral" }, { "scorer", "dct" }, { "scorer.gamma", "0.3" } }, {}, KVEDGE_E_UNSUPPORTED);
}

// An allocator that needs all layers: the result equals an ordinary compression, unless a layer's budget exceeds the rows that it kept
// provisionally. Then the layer keeps these rows, and other layers get the rest.
void test_clipped_budgets() {
    kvedge_plan * plan =
        make_plan({ { { "scorer", "cumulative" }, { "allocator", "prefix" }, { "recent", "1" }, { "budget", "0.2" } }, {} });
    Tokens        t    = random_tokens(200, 0, 11);
    for (float & x : t.q[1]) {
        x *= 0.01f;  // even attention: this layer needs many tokens for its share
    }
    for (size_t l : { 0u, 2u }) {  // every query attends to the same few tokens
        const size_t row = (size_t) SHAPES[l].n_heads * (size_t) SHAPES[l].d_k;
        for (size_t i = 0; i < t.q[l].size(); i++) {
            t.q[l][i] = 2.0f * t.q[l][i % row];
        }
    }
    Sequence    ordinary(SHAPES, {}), bounded(SHAPES, {});
    Compression outcome;
    read_ordinary(ordinary, *plan, t);
    compress_now(ordinary, *plan);
    read_bounded(bounded, *plan, t, outcome);
    CHECK(ordinary.rows.head_length(1, 0) > PROVISIONAL * 40 && bounded.rows.head_length(1, 0) == PROVISIONAL * 40);
    CHECK(bounded.rows.head_length(0, 0) + bounded.rows.head_length(1, 0) + bounded.rows.head_length(2, 0) == 3 * 40);
    CHECK(bounded.rows.head_length(0, 0) > ordinary.rows.head_length(0, 0));
    kvedge_plan_free(plan);
}

}  // namespace

int main() {
    const Storage              kivi{ of_keys(Type::kivi4), Type::kivi4 };
    const std::vector<Case> cases = {
        { { { "scorer", "cumulative" }, { "reducer", "pivotal" }, { "text_prior", "true" }, { "budget", "0.2" } }, {} },
        { { { "scorer", "cumulative" }, { "budget", "0.3" }, { "decode", "heavy-hitter" } }, {} },
        { { { "scorer", "window" }, { "scorer.window", "16" }, { "allocator", "ada" }, { "budget", "0.25" } }, {} },
        { { { "scorer", "mixkv" }, { "scorer.window", "16" }, { "allocator", "pyramid" }, { "budget", "0.4" } }, { Type::bf16, Type::f16 } },
        { { { "scorer", "mean" }, { "budget", "40" } }, {} },
        { { { "scorer", "vnorm" }, { "reducer", "averaged" }, { "reducer.bias", "mass" }, { "budget", "0.3" } }, {} },
        { { { "scorer", "vnorm" }, { "reducer", "averaged" }, { "budget", "0.3" } }, kivi },
        { { { "budget", "1.0" } }, kivi },
        { { { "scorer", "cumulative" }, { "allocator", "prefix" }, { "sinks", "1" }, { "recent", "1" }, { "budget", "0.3" } }, {} },
        { { { "scorer", "dct" }, { "allocator", "spectral" }, { "budget", "0.2" } }, {} },
    };
    for (const Case & c : cases) {
        test_two_turns(c);
        test_giving_up(c);
    }
    test_failing_stage();
    test_refused_plans();
    test_clipped_budgets();
    return failures() ? 1 : 0;
}
