// Compares streams with plain lists of rows under random series of operations. Also streams arrays with every scorer.

#include "kernels/kernels.h"
#include "store/store.h"
#include "check.h"
#include "compress/stream.h"

#include <algorithm>
#include <random>
#include <string>

using namespace kvedge;

namespace {

std::mt19937 rng(11);

int32_t below(int32_t n) { return std::uniform_int_distribution<int32_t>(0, n - 1)(rng); }

const std::vector<LayerShape> SHAPES = { { 0, 4, 2, 16, 8 }, { 1, 3, 3, 8, 24 } };
constexpr int32_t             BOUND = 50, SINKS = 3;

float  value(int32_t token, size_t l, size_t h, bool is_value) { return (float) (token * 2 + (is_value ? 1 : 0)) + 0.25f * (float) (l * 3 + h); }
double sum_of(int32_t token, size_t l, size_t h) { return (double) (((size_t) token * 7919 + l * 31 + h * 17) % 1009); }

kvedge_plan test_plan() {
    kvedge_plan plan  = full_plan();
    plan.budget_ratio = 0.0;
    plan.budget_pairs = BOUND;
    plan.sinks        = SINKS;
    plan.scorer       = find_scorer("cumulative");
    return plan;
}

template <class F> void each_head(const F & visit) {
    for (size_t l = 0; l < SHAPES.size(); l++) {
        for (size_t h = 0; h < (size_t) SHAPES[l].n_heads_kv; h++) {
            visit(l, h);
        }
    }
}

void append(Sequence & seq, int32_t n) {
    std::vector<int32_t> pos;
    for (int32_t i = 0; i < n; i++) {
        pos.push_back(seq.rows.n_tokens() + i);
    }
    const auto first = seq.rows.n_tokens();
    CHECK(make_room(seq, { { true, false } }, n) && seq.rows.append(n, pos.data(), below(2) != 0));
    const int32_t before = seq.rows.pending_length() - n;
    each_head([&](size_t l, size_t h) {
        for (int32_t i = 0; i < n; i++) {
            const auto         at = seq.rows.place_from_end(i, n);
            std::vector<float> k((size_t) SHAPES[l].d_k, value(first + i, l, h, false)), v((size_t) SHAPES[l].d_v, value(first + i, l, h, true));
            kernels().from_f32(Type::f32, k.data(), k_row(at, (int32_t) l, (int32_t) h), k.size());
            kernels().from_f32(Type::f32, v.data(), v_row(at, (int32_t) l, (int32_t) h), v.size());
            seq.observed.layer(l).columns.sums()[h * (size_t) seq.observed.layer(l).columns.capacity + (size_t) (before + i)] = sum_of(first + i, l, h);
        }
    });
}

// Checks that every KV head holds n rows, and that each row and each sum belongs to its token.
void check_rows(const Sequence & seq, int32_t n) {
    CHECK(seq.rows.pending_length() == n);
    each_head([&](size_t l, size_t h) {
        const auto tokens = seq.rows.head_tokens((int32_t) l, (int32_t) h);
        CHECK((int32_t) tokens.size() == n && pending_tokens(seq.rows, (int32_t) l, (int32_t) h) == tokens);
        CHECK(std::is_sorted(tokens.begin(), tokens.end()) && std::adjacent_find(tokens.begin(), tokens.end()) == tokens.end());
        size_t at = 0;
        each_segment(seq.rows, (int32_t) l, (int32_t) h, [&](const Segment & s) {
            std::vector<float> k((size_t) (s.n * SHAPES[l].d_k)), v((size_t) (s.n * SHAPES[l].d_v));
            kernels().widen(s.k, s.n, SHAPES[l].d_k, k.data(), (size_t) SHAPES[l].d_k);
            kernels().widen(s.v, s.n, SHAPES[l].d_v, v.data(), (size_t) SHAPES[l].d_v);
            for (int32_t r = 0; r < s.n; r++, at++) {
                CHECK(k[(size_t) (r * SHAPES[l].d_k)] == value(tokens[at], l, h, false));
                CHECK(v[(size_t) ((r + 1) * SHAPES[l].d_v - 1)] == value(tokens[at], l, h, true));
            }
        });
        for (size_t i = 0; i < tokens.size() && seq.observed.have().sums(); i++) {
            CHECK(seq.observed.layer(l).columns.sums()[h * (size_t) seq.observed.layer(l).columns.capacity + i] == sum_of(tokens[i], l, h));
        }
    });
}

// Returns the tokens that H2O keeps: sinks, the newest half, and the tokens with the largest sums among the others.
std::vector<int32_t> expected(std::vector<int32_t> tokens, size_t l, size_t h) {
    const size_t n = tokens.size(), recent = BOUND / 2;
    std::stable_sort(tokens.begin() + SINKS, tokens.end() - (std::ptrdiff_t) recent,
                     [&](int32_t a, int32_t b) { return sum_of(a, l, h) > sum_of(b, l, h); });
    tokens.erase(tokens.begin() + (std::ptrdiff_t) (BOUND - recent), tokens.begin() + (std::ptrdiff_t) (n - recent));
    std::sort(tokens.begin(), tokens.end());
    return tokens;
}

void compress(Sequence & seq, const kvedge_plan & plan) {
    std::vector<std::vector<int32_t>> wanted;
    const bool                        full = seq.rows.pending_length() > BOUND;
    each_head([&](size_t l, size_t h) {
        const auto tokens = seq.rows.head_tokens((int32_t) l, (int32_t) h);
        wanted.push_back(full ? expected(tokens, l, h) : tokens);
    });
    const uint64_t before = seq.rows.bytes();
    Compression    outcome;
    kvedge_error   err{};
    CHECK(compress_stream(seq, plan, 1 + below(2), outcome, &err) == KVEDGE_OK);
    CHECK(outcome.reduced == full && outcome.before_bytes == before && outcome.after_bytes == seq.rows.bytes() && outcome.peak_bytes >= before);
    each_head([&](size_t l, size_t h) {
        CHECK(seq.rows.head_tokens((int32_t) l, (int32_t) h) == wanted.front());
        wanted.erase(wanted.begin());
    });
}

void random_series(int32_t steps) {
    const kvedge_plan plan = test_plan();
    auto              seq  = std::make_unique<Sequence>(SHAPES, Storage{ Type::f32, Type::f32 });
    kvedge_error      err{};
    CHECK(open_stream(*seq, plan, &err) == KVEDGE_OK);
    uint64_t most = 0;
    for (int32_t i = 0; i < steps; i++) {
        append(*seq, below(3) ? 1 + below(40) : 1);
        check_rows(*seq, seq->rows.pending_length());
        if (below(4)) {
            compress(*seq, plan);
            check_rows(*seq, seq->rows.pending_length());
        }
        if (below(6) == 0) {  // removes tokens at the end or in the middle
            const auto    n  = seq->rows.n_tokens();
            const int32_t p0 = below(n + 1), p1 = below(2) ? n : std::min(n, p0 + below(30));
            int32_t       fewest = INT32_MAX;
            each_head([&](size_t l, size_t h) {
                const auto tokens = seq->rows.head_tokens((int32_t) l, (int32_t) h);
                fewest = std::min(fewest, (int32_t) std::count_if(tokens.begin(), tokens.end(), [&](int32_t t) { return t < p0 || t >= p1; }));
            });
            seq->remove(p0, p1);
            CHECK(seq->rows.pending_length() <= fewest);
            check_rows(*seq, seq->rows.pending_length());
        }
        if (below(8) == 0) {
            auto copy = seq->clone();
            CHECK(copy && copy->rows.pending_length() == seq->rows.pending_length());
            check_rows(*copy, seq->rows.pending_length());
            seq = std::move(copy);
        }
        if (below(8) == 0) {  // closes the stream and opens it again, which clears the sums
            const int32_t n = seq->rows.pending_length();
            seq->close_pending();
            CHECK(seq->rows.pending_length() == 0);
            CHECK(open_stream(*seq, plan, &err) == KVEDGE_OK && seq->rows.pending_length() == n && make_room(*seq, { { true, false } }, 0));
            each_head([&](size_t l, size_t h) {
                const auto tokens = seq->rows.head_tokens((int32_t) l, (int32_t) h);
                for (size_t t = 0; t < tokens.size(); t++) {
                    seq->observed.layer(l).columns.sums()[h * (size_t) seq->observed.layer(l).columns.capacity + t] = sum_of(tokens[t], l, h);
                }
            });
            check_rows(*seq, n);
        }
        most = std::max(most, seq->rows.bytes());
    }
    CHECK(most <= 400 * 1024);  // a few blocks, however long the series is
}

// Opening a stream makes compressed rows pending, in front of the pending rows. Sums must stay with their rows.
void test_opening() {
    Sequence     seq(SHAPES, Storage{ Type::f32, Type::f32 });
    kvedge_plan  plan = test_plan();
    kvedge_error err{};
    Compression  outcome;
    append(seq, 80);
    CHECK(compress_pending(seq, plan, 1, outcome, &err) == KVEDGE_OK && seq.rows.pending_length() == 0);
    append(seq, 20);
    CHECK(open_stream(seq, plan, &err) == KVEDGE_OK && seq.rows.pending_length() == BOUND + 20);
    each_head([&](size_t l, size_t h) {
        const auto tokens = seq.rows.head_tokens((int32_t) l, (int32_t) h);
        for (size_t i = 0; i < tokens.size(); i++) {
            const double sum = seq.observed.layer(l).columns.sums()[h * (size_t) seq.observed.layer(l).columns.capacity + i];
            CHECK(sum == (i < BOUND ? 0.0 : sum_of(tokens[i], l, h)));
        }
    });
    Compression again;
    CHECK(compress_stream(seq, plan, 1, again, &err) == KVEDGE_OK && seq.rows.pending_length() == BOUND);
    plan.budget_pairs = BOUND / 2;
    CHECK(compress_pending(seq, plan, 1, again, &err) == KVEDGE_E_STATE && err.message[0]);  // KV heads hold different tokens
    CHECK(seq.rows.pending_length() == BOUND);
}

void test_refusals() {
    Sequence     quantised(SHAPES, Storage{ Type::q8_0, Type::q8_0 }), uneven(SHAPES, Storage{ Type::f32, Type::f32 });
    kvedge_plan  plan = test_plan();
    kvedge_error err{};
    CHECK(open_stream(quantised, plan, &err) == KVEDGE_E_UNSUPPORTED && err.message[0]);
    append(uneven, 80);
    uneven.close_pending();
    drop_row(uneven.rows, 1, 2, 5);
    CHECK(open_stream(uneven, plan, &err) == KVEDGE_E_UNSUPPORTED && uneven.rows.pending_length() == 0);
    plan.budget_ratio = 0.5;
    CHECK(check_stream(plan, &err) == KVEDGE_E_UNSUPPORTED);
}

void test_arrays() {
    constexpr int32_t  L = 2, H = 4, HKV = 2, T = 150, D = 16;
    std::vector<float> q(L * H * T * D), k(L * HKV * T * D), v(k.size());
    std::vector<uint8_t> image(T);
    std::normal_distribution<float> normal;
    for (auto * x : { &q, &k, &v }) {
        std::generate(x->begin(), x->end(), [&] { return normal(rng); });
    }
    std::generate(image.begin(), image.end(), [] { return (uint8_t) below(2); });
    const kvedge_arrays in{ L, H, HKV, T, D, q.data(), k.data(), v.data(), image.data() };
    for (const char * scorer : { "position", "cumulative", "window", "mixkv", "keydiff", "expected", "knorm", "vnorm", "random", "dct" }) {
        for (const char * reducer : { "evict", "pivotal" }) {
            kvedge_plan * plan = nullptr;
            kvedge_error  err{};
            CHECK(kvedge_plan_create(&plan, &err) == KVEDGE_OK);
            CHECK(kvedge_plan_set(plan, "scorer", scorer, &err) == KVEDGE_OK && kvedge_plan_set(plan, "reducer", reducer, &err) == KVEDGE_OK);
            CHECK(kvedge_plan_set(plan, "budget", "40", &err) == KVEDGE_OK && kvedge_plan_set(plan, "text_prior", "true", &err) == KVEDGE_OK);
            if (std::string(scorer) == "dct") {
                CHECK(kvedge_plan_set(plan, "scorer.share", "head", &err) == KVEDGE_OK);
            }
            for (int32_t step : { 1, 33, 200 }) {
                kvedge_result * r = nullptr;
                CHECK(kvedge_stream_arrays(plan, &in, KVEDGE_TYPE_F16, KVEDGE_TYPE_F16, step, 2, &r, &err) == KVEDGE_OK);
                for (int32_t i = 0; r && i < L * HKV; i++) {
                    CHECK(kvedge_result_length(r, i / HKV, i % HKV) == 40 && !kvedge_result_scores(r, i / HKV, i % HKV));
                }
                kvedge_result_free(r);
            }
            kvedge_plan_free(plan);
        }
    }
}

}  // namespace

// A plan that fails leaves the sums and the sinks of the plan before it.
void test_failed_plan() {
    const kvedge_plan plan  = test_plan();
    kvedge_plan       other = plan;
    Sequence          seq(SHAPES, Storage{ Type::f32, Type::f32 });
    kvedge_error      err{};
    Compression       outcome;
    CHECK(kvedge_plan_set(&other, "scorer", "window", &err) == KVEDGE_OK && kvedge_plan_set(&other, "sinks", "7", &err) == KVEDGE_OK);
    CHECK(open_stream(seq, plan, &err) == KVEDGE_OK);
    append(seq, BOUND + 30);
    CHECK(compress_stream(seq, other, 1, outcome, &err) == KVEDGE_E_STATE);
    CHECK(seq.observed.have().sums() && seq.rows.contents().sinks == SINKS);
    check_rows(seq, BOUND + 30);
    compress(seq, plan);
}

int main() {
    for (int32_t i = 0; i < 10; i++) {
        random_series(60);
    }
    test_opening();
    test_refusals();
    test_failed_plan();
    test_arrays();
    return failures() != 0;
}
