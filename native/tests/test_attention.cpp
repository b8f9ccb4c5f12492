// Prefill, decode, column sums and entropies over blocks of every kind, against an attention matrix written out in double precision.

#include "attention/attention.h"
#include "check.h"
#include "core/compress.h"
#include "primitives/entropy.h"

#include <algorithm>
#include <functional>
#include <random>
#include <thread>

using namespace kvedge;

namespace {

std::mt19937 rng(11);

std::vector<float> random_floats(size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float>              x(n);
    for (auto & v : x) {
        v = normal(rng);
    }
    return x;
}

struct Case {
    int32_t H, Hkv, d_k, d_v;
    bool    causal;
    float   softcap;
    bool    sinks;
    Storage storage;
};

void store(Sequence & seq, const std::vector<float> & k, const std::vector<float> & v, int32_t n) {
    const LayerShape & s     = seq.shapes()[0];
    const Storage      plain = seq.storage().plain();
    for (int32_t t = 0; t < n; t++) {
        const auto at = seq.place_from_end(t, n);
        for (int32_t h = 0; h < s.n_heads_kv; h++) {
            kernels().from_f32(plain.k, k.data() + (size_t) ((t * s.n_heads_kv + h) * s.d_k), seq.k_row(at, 0, h), (size_t) s.d_k);
            kernels().from_f32(plain.v, v.data() + (size_t) ((t * s.n_heads_kv + h) * s.d_v), seq.v_row(at, 0, h), (size_t) s.d_v);
        }
    }
}

void append(Sequence & seq, int32_t n) {
    const LayerShape &   s = seq.shapes()[0];
    std::vector<int32_t> pos((size_t) n);
    for (int32_t i = 0; i < n; i++) {
        pos[(size_t) i] = (int32_t) seq.pos.size() + i;
    }
    CHECK(seq.append(n, pos.data(), false));
    store(seq, random_floats((size_t) (n * s.n_heads_kv * s.d_k)), random_floats((size_t) (n * s.n_heads_kv * s.d_v)), n);
}

// All rows of a head, widened.
void rows_of(const Sequence & seq, int32_t head, std::vector<float> & k, std::vector<float> & v) {
    const LayerShape & s = seq.shapes()[0];
    k.clear();
    v.clear();
    seq.each_segment(0, head, false, [&](const Segment & seg) {
        const size_t at_k = k.size(), at_v = v.size();
        k.resize(at_k + (size_t) (seg.n * s.d_k));
        v.resize(at_v + (size_t) (seg.n * s.d_v));
        kernels().widen(seg.k, seg.n, s.d_k, k.data() + at_k, (size_t) s.d_k);
        kernels().widen(seg.v, seg.n, s.d_v, v.data() + at_v, (size_t) s.d_v);
    });
}

struct Expected {
    std::vector<double> out;   // [n][H][d_v]
    std::vector<double> sums;  // [Hkv][pending]
    std::vector<double> squares;  // likewise
    std::vector<double> entropy;  // [Hkv]
    std::vector<std::vector<double>> weights;  // [H] of the last token
};

Expected oracle(const Case & c, const AttendJob & job, int32_t pending) {
    const auto all = (size_t) (c.Hkv * pending);
    Expected   e{ std::vector<double>((size_t) (job.n * c.H * c.d_v)), std::vector<double>(all), std::vector<double>(all),
                std::vector<double>((size_t) c.Hkv), {} };
    const int           g = c.H / c.Hkv;
    std::vector<double> mean((size_t) (c.Hkv * job.n * pending));  // over the group
    for (int32_t h = 0; h < c.H; h++) {
        std::vector<float> k, v;
        rows_of(*job.seq, h / g, k, v);
        const auto n_keys = (int32_t) (k.size() / (size_t) c.d_k);
        for (int32_t t = 0; t < job.n; t++) {
            const int32_t       sees = c.causal ? n_keys - job.n + t + 1 : n_keys;
            std::vector<double> p((size_t) sees);
            double              top = c.sinks ? (double) job.sinks[h] : -1e300, total = 0.0;
            for (int32_t j = 0; j < sees; j++) {
                double s = 0.0;
                for (int32_t i = 0; i < c.d_k; i++) {
                    s += (double) job.q[(size_t) ((t * c.H + h) * c.d_k + i)] * k[(size_t) (j * c.d_k + i)];
                }
                s *= job.scale;
                p[(size_t) j] = c.softcap != 0.0f ? c.softcap * std::tanh(s / c.softcap) : s;
                top           = std::max(top, p[(size_t) j]);
            }
            for (auto & x : p) {
                x = std::exp(x - top);
                total += x;
            }
            total += c.sinks ? std::exp(job.sinks[h] - top) : 0.0;
            if (t == job.n - 1) {
                e.weights.push_back(p);
                std::transform(p.begin(), p.end(), e.weights.back().begin(), [total](double x) { return x / total; });
            }
            for (int32_t j = 0; j < sees; j++) {
                const double a = p[(size_t) j] / total;
                e.entropy[(size_t) (h / g)] -= a > 0.0 ? a * std::log(a) : 0.0;
                for (int32_t i = 0; i < c.d_v; i++) {
                    e.out[(size_t) ((t * c.H + h) * c.d_v + i)] += a * v[(size_t) (j * c.d_v + i)];
                }
                if (j >= n_keys - pending) {
                    const int32_t column = j - (n_keys - pending);
                    e.sums[(size_t) ((h / g) * pending + column)] += a / g;
                    mean[(size_t) (((h / g) * job.n + t) * pending + column)] += a / g;
                }
            }
        }
    }
    for (int32_t i = 0; i < c.Hkv * job.n; i++) {
        for (int32_t j = 0; j < pending; j++) {
            const double a = mean[(size_t) (i * pending + j)];
            e.squares[(size_t) ((i / job.n) * pending + j)] += a * a;
        }
    }
    return e;
}

void run_tasks(int32_t n, int32_t n_threads, const std::function<void(int32_t, int32_t)> & task) {
    std::atomic<int32_t>     next{ 0 };
    std::vector<std::thread> threads;
    for (int32_t w = 0; w < n_threads; w++) {
        threads.emplace_back([&, w] {
            for (int32_t i; (i = next.fetch_add(1)) < n;) {
                task(i, w);
            }
        });
    }
    for (auto & t : threads) {
        t.join();
    }
}

// Decodes n tokens on several threads. One token's weights are compared with the oracle.
void check_decode(const Case & c, const Sequence & seq, AttendJob job, const Expected & e, int32_t n_threads) {
    const size_t       row = (size_t) seq.head_length(0, 0) + 5;
    std::vector<float> weights((size_t) c.H * row, -1.0f);
    if (job.n == 1) {
        job.weights     = weights.data();
        job.weights_row = row;
    }
    std::fill_n(job.out, (size_t) (job.n * c.H * c.d_v), 0.0f);
    DecodePartials partials;
    CHECK(partials.reserve(seq.shapes(), job.n, n_threads));
    partials.start(c.Hkv);
    const int32_t splits = decode_splits(job, n_threads);
    run_tasks(decode_tasks(job, splits), n_threads, [&](int32_t i, int32_t) { decode_task(job, i, splits, partials); });
    for (size_t i = 0; i < e.out.size(); i++) {
        CHECK(close_to(job.out[i], e.out[i], 2e-5));
    }
    for (size_t h = 0; h < (size_t) c.H; h++) {
        const size_t n = job.n == 1 ? e.weights[h].size() : 0;
        for (size_t j = 0; j < row; j++) {
            CHECK(close_to(weights[h * row + j], j < n ? e.weights[h][j] : -1.0, 2e-6));
        }
    }
}

// One step of n tokens, by both paths, compared with the oracle.
void check_step(const Case & c, Sequence & seq, int32_t n) {
    constexpr int32_t  THREADS = 3;
    const auto         q       = random_floats((size_t) (n * c.H * c.d_k));
    const auto         sinks   = random_floats((size_t) c.H);
    std::vector<float> out((size_t) (n * c.H * c.d_v));
    CHECK(seq.ensure_sums(0, true) && seq.ensure_entropies());
    const auto before = seq.sums[0].sums, squares_before = seq.sums[0].squares, entropy_before = seq.entropies[0];

    AttendJob job{};
    job.seq       = &seq;
    job.n         = n;
    job.causal    = c.causal;
    job.q         = q.data();
    job.q_token   = (size_t) (c.H * c.d_k);
    job.q_head    = (size_t) c.d_k;
    job.out       = out.data();
    job.out_token = (size_t) (c.H * c.d_v);
    job.out_head  = (size_t) c.d_v;
    job.scale     = 1.0f / std::sqrt((float) c.d_k);
    job.softcap   = c.softcap;
    job.sinks     = c.sinks ? sinks.data() : nullptr;

    const int32_t  pending = seq.pending_length();
    const Expected e       = oracle(c, job, pending);

    std::vector<SpinLock> locks((size_t) c.Hkv);
    std::vector<Scratch>  scratch(THREADS);
    for (auto & s : scratch) {
        CHECK(s.reserve(seq.shapes(), seq.head_length(0, 0) + 1));
    }
    job.sums          = seq.sums[0].sums.data();
    job.squares       = seq.sums[0].squares.data();
    job.sums_capacity = seq.sums[0].capacity;
    job.entropy       = seq.entropies[0].data();
    job.locks         = locks.data();
    run_tasks(prefill_tasks(job, scratch[0]), THREADS, [&](int32_t i, int32_t w) { prefill_task(job, i, scratch[(size_t) w]); });
    for (size_t i = 0; i < out.size(); i++) {
        CHECK(close_to(out[i], e.out[i], 2e-5));
    }
    for (int32_t h = 0; h < c.Hkv; h++) {
        CHECK(close_to(seq.entropies[0][(size_t) h] - entropy_before[(size_t) h], e.entropy[(size_t) h], 1e-5));
        for (int32_t j = 0; j < pending; j++) {
            const auto at = (size_t) (h * job.sums_capacity + j);
            CHECK(close_to(seq.sums[0].squares[at] - squares_before[at], e.squares[(size_t) (h * pending + j)], 2e-5));
            CHECK(close_to(seq.sums[0].sums[at] - before[at], e.sums[(size_t) (h * pending + j)], 2e-5));
        }
    }

    check_decode(c, seq, job, e, THREADS);
    check_decode(c, seq, job, e, 1);
}

kvedge_plan half_plan() {
    kvedge_plan plan  = full_plan();
    plan.budget_ratio = 0.5;
    plan.scorer       = find_scorer("cumulative");
    plan.reducer      = find_reducer("pivotal");
    return plan;
}

void check_case(const Case & c) {
    const std::vector<LayerShape> shapes = { { 0, c.H, c.Hkv, c.d_k, c.d_v } };
    Sequence                      seq(shapes, c.storage);
    for (int32_t n : { 1, 70, 3, 699, 1 }) {
        append(seq, n);
        check_step(c, seq, n);
    }
    Compression  outcome;
    kvedge_error err{};
    CHECK(compress_pending(seq, half_plan(), 2, outcome, &err) == KVEDGE_OK);
    CHECK(outcome.reduced && seq.head_length(0, 0) == 387 && seq.pending_length() == 0);
    for (int32_t n : { 1, 1, 40 }) {  // a compressed block, single tokens and the next prompt
        append(seq, n);
        check_step(c, seq, n);
    }
    for (int32_t h = 0; h < c.Hkv; h++) {  // rows that a decode policy drops: near either end of the compressed block,
        for (int32_t row : { 2, 380, 200, 384, 384 }) {
            seq.drop_row(0, h, row);  // and, once that has 384 rows left, the oldest of the generated ones
        }
    }
    CHECK(seq.head_length(0, 0) == 424);
    check_step(c, seq, 40);
    seq.remove(760, 774);  // tokens of the compressed block
    seq.remove(775, 780);  // and of the pending ones
    CHECK(seq.pending_length() == 37 && seq.head_tokens(0, 0).size() == (size_t) seq.head_length(0, 0));
    append(seq, 2);
    check_step(c, seq, 2);
    check_step(c, seq, 1);
    const auto copy = seq.clone();
    CHECK(copy && copy->head_tokens(0, 0) == seq.head_tokens(0, 0));
    check_step(c, *copy, 2);
}

// How many queries saw each token, with an image whose tokens see each other.
void check_seen() {
    const std::vector<LayerShape> shapes = { { 0, 2, 1, 8, 8 } };
    Sequence                      seq(shapes, Storage{});
    std::vector<int32_t>          expected;
    const auto                    enter = [&](int32_t n, bool causal) {
        CHECK(seq.ensure_sums(n, true));
        append(seq, n);
        seq.observe(n, causal);
        const size_t first = expected.size();
        expected.resize(first + (size_t) n, 0);
        for (size_t query = first; query < expected.size(); query++) {
            for (size_t key = 0; key <= (causal ? query : expected.size() - 1); key++) {
                expected[key]++;
            }
        }
        for (size_t t = 0; t < expected.size(); t++) {
            CHECK(seq.seen[t] == expected[t]);
        }
    };
    enter(3, true);
    enter(5, false);
    enter(1, true);
    const auto copy = seq.clone();
    enter(40, true);
    seq.remove(2, 6);
    expected.erase(expected.begin() + 2, expected.begin() + 6);
    CHECK(std::equal(expected.begin(), expected.end(), seq.seen.begin()) && seq.seen[expected.size()] == 0);
    CHECK(copy->seen[0] == 9 && copy->seen[3] == 6);
    seq.close_pending();
    CHECK(seq.seen.empty() && seq.score_bytes() == 0);
}

// Attends over the last n tokens, text and images as the sequence says, and keeps their queries.
void attend_and_keep(Sequence & seq, const std::vector<float> & q, int32_t n, bool causal) {
    const LayerShape &    shape = seq.shapes()[0];
    std::vector<float>    out((size_t) (n * shape.n_heads * shape.d_v));
    std::vector<SpinLock> locks((size_t) shape.n_heads_kv);
    Scratch               scratch;
    CHECK(scratch.reserve(seq.shapes(), seq.head_length(0, 0)) && seq.ensure_entropies());
    seq.observe(n, causal);
    AttendJob job{};
    job.seq       = &seq;
    job.n         = n;
    job.causal    = causal;
    job.q         = q.data();
    job.q_token   = (size_t) (shape.n_heads * shape.d_k);
    job.q_head    = (size_t) shape.d_k;
    job.out       = out.data();
    job.out_token = (size_t) (shape.n_heads * shape.d_v);
    job.out_head  = (size_t) shape.d_v;
    job.scale     = 0.3f;
    job.softcap   = shape.softcap;
    job.entropy   = seq.entropies[0].data();
    job.queries   = &seq;
    job.locks     = locks.data();
    for (int32_t task = 0; task < prefill_tasks(job, scratch); task++) {
        prefill_task(job, task, scratch);
    }
}

CrossAttention between(const Sequence & seq, bool from_text) {
    CrossAttention cross;
    const auto     tokens = seq.pending_tokens();
    for (size_t i = 0; i < tokens.size(); i++) {
        if ((seq.image[(size_t) tokens[i]] != 0) == from_text) {
            cross.keys.push_back((int32_t) i);
        } else {
            cross.queries.push_back(tokens[i]);
            cross.unseen.push_back((int32_t) cross.keys.size());
        }
    }
    return cross;
}

// Text and images that look at all of each other, half of it known from the prompt's own attention, against sums in
// double precision. q: [token][H][D].
void check_cross(const Sequence & seq, const std::vector<float> & q) {
    const int32_t H = seq.shapes()[0].n_heads, D = seq.shapes()[0].d_k;
    const auto    tokens = seq.pending_tokens();
    const float   cap    = seq.shapes()[0].softcap;
    for (bool from_text : { true, false }) {
        const CrossAttention cross = between(seq, from_text);
        for (int32_t head = 0; head < 2; head++) {
            std::vector<float> k, v;
            rows_of(seq, head, k, v);
            const size_t old      = k.size() / (size_t) D - tokens.size();
            double       expected = 0.0;
            for (int32_t token : cross.queries) {
                for (int32_t h = 2 * head; h < 2 * head + 2; h++) {
                    double total = 0.0, weighted = 0.0;
                    for (int32_t key : cross.keys) {
                        double s = 0.0;
                        for (int32_t i = 0; i < D; i++) {
                            s += 0.3 * (double) q[(size_t) ((token * H + h) * D + i)] * (double) k[(old + (size_t) key) * (size_t) D + (size_t) i];
                        }
                        s = cap != 0.0f ? cap * std::tanh(s / cap) : s;
                        total += std::exp(s);
                        weighted += s * std::exp(s);
                    }
                    expected += std::log(total) - weighted / total;
                }
            }
            CHECK(close_to(attention_entropy(seq, 0, head, cross), expected, 1e-4));  // queries in half precision
        }
    }
}

void check_kept_queries(float softcap) {
    constexpr int32_t             H = 4, D = 24;
    const std::vector<LayerShape> shapes = { { 0, H, 2, D, 8, softcap } };
    Sequence                      seq(shapes, Storage{ Type::f32, Type::f32 });
    std::vector<float>            q;  // [token][H][D]
    const auto                    enter = [&](int32_t n, bool causal, const std::function<bool(int32_t)> & image) {
        CHECK(seq.ensure_queries(n));
        append(seq, n);
        for (int32_t i = 0; i < n; i++) {
            seq.image[seq.image.size() - (size_t) n + (size_t) i] = image(i) ? 1 : 0;
        }
        const auto part = random_floats((size_t) (n * H * D));
        attend_and_keep(seq, part, n, causal);
        q.insert(q.end(), part.begin(), part.end());
    };
    const auto text = [](int32_t) { return false; };
    enter(9, true, text);
    enter(70, false, [](int32_t) { return true; });  // an image whose tokens see each other
    enter(1, true, text);
    check_cross(seq, q);
    enter(640, true, [](int32_t i) { return i % 100 > 30; });
    check_cross(seq, q);
    const auto copy = seq.clone();
    enter(5, true, text);
    seq.remove(715, 800);  // a whole part and more
    CHECK(seq.query_parts.size() == 4);
    check_cross(seq, q);
    check_cross(*copy, q);
    CHECK(seq.score_bytes() >= (uint64_t) (720 * H * D * 2));
    seq.close_pending();  // the next turn's entropy is its own
    enter(33, true, [](int32_t i) { return i % 2 == 0; });
    check_cross(seq, q);
}

}  // namespace

int main() {
    check_seen();
    check_kept_queries(0.0f);
    check_kept_queries(2.0f);
    const Case cases[] = {
        { 4, 4, 64, 64, true, 0.0f, false, { Type::f16, Type::f16 } },    { 8, 2, 128, 128, true, 0.0f, false, { Type::f16, Type::f16 } },
        { 6, 1, 80, 80, true, 0.0f, false, { Type::bf16, Type::bf16 } },   { 24, 1, 96, 96, true, 0.0f, false, { Type::f32, Type::f32 } },
        { 4, 2, 128, 64, true, 30.0f, false, { Type::f16, Type::f16 } },  { 4, 4, 64, 64, false, 0.0f, false, { Type::f16, Type::f16 } },
        { 8, 4, 64, 64, true, 0.0f, true, { Type::f16, Type::f16 } },     { 2, 1, 256, 256, false, 20.0f, true, { Type::f32, Type::f32 } },
        { 4, 4, 64, 64, true, 0.0f, false, { Type::q8_0, Type::q8_0 } },
        { 8, 2, 128, 64, true, 0.0f, true, { Type::q4_0, Type::q4_0 } },
        { 4, 4, 128, 128, true, 0.0f, false, { Type::kivi2_k, Type::kivi2_v } },
        { 6, 2, 64, 96, true, 30.0f, false, { Type::kivi4_k, Type::kivi4_v } },
        { 4, 1, 64, 64, false, 0.0f, false, { Type::kivi4_k, Type::bf16 } },
        { 2, 2, 32, 32, true, 0.0f, false, { Type::f32, Type::kivi2_v } },
        { 4, 2, 64, 64, true, 0.0f, false, { Type::q8_0, Type::kivi4_v } },
    };
    for (const Case & c : cases) {
        check_case(c);
    }
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
