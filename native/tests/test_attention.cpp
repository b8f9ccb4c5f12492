// Compares prefill, decode, column sums and entropies over blocks of every kind with an explicit attention matrix in double precision.

#include "attention/attention.h"
#include "kernels/kernels.h"
#include "compress/compress.h"
#include "rows.h"

#include <algorithm>
#include <functional>
#include <string>
#include <thread>

using namespace kvedge;

namespace {

struct Case {
    int32_t H, Hkv, d_k, d_v;
    bool    causal;
    float   softcap;
    bool    sinks;
    Storage storage;
};

struct Expected {
    std::vector<double> out;   // [n][H][d_v]
    std::vector<double> sums;  // [Hkv][pending]
    std::vector<double> squares;  // [Hkv][pending]
    std::vector<double> entropy;  // [Hkv]
    std::vector<std::vector<double>> weights;  // [H] attention weights of the last token
};

// Returns rows [n][d] transposed, as [d][n].
std::vector<double> turned(const std::vector<float> & rows, size_t d) {
    std::vector<double> out(rows.size());
    for (size_t i = 0; i < rows.size(); i++) {
        out[i % d * (rows.size() / d) + i / d] = (double) rows[i];
    }
    return out;
}

// Returns the products of q with the first n keys of keys [d][all]. d is a multiple of 4. Most of the test's time is spent here.
std::vector<double> products(const float * q, const std::vector<double> & keys, int32_t d, int32_t n) {
    std::vector<double> out((size_t) n);
    const size_t        all = keys.size() / (size_t) d;
    for (int32_t i = 0; i < d; i += 4) {
        const double *a0 = &keys[(size_t) i * all], *a1 = a0 + all, *a2 = a1 + all, *a3 = a2 + all;
        for (int32_t j = 0; j < n; j++) {
            out[(size_t) j] += (q[i] * a0[j] + q[i + 1] * a1[j]) + (q[i + 2] * a2[j] + q[i + 3] * a3[j]);
        }
    }
    return out;
}

Expected oracle(const Case & c, const AttendJob & job, int32_t pending) {
    const auto all = (size_t) (c.Hkv * pending);
    Expected   e{ std::vector<double>((size_t) (job.n * c.H * c.d_v)), std::vector<double>(all), std::vector<double>(all),
                std::vector<double>((size_t) c.Hkv), {} };
    const int           g = c.H / c.Hkv;
    std::vector<double> mean((size_t) (c.Hkv * job.n * pending));  // mean over the query heads of a KV head
    for (int32_t h = 0; h < c.H; h++) {
        std::vector<float> k, v;
        rows_of(*job.rows, h / g, k, v);
        const auto                n_keys  = (int32_t) (k.size() / (size_t) c.d_k);
        const std::vector<double> columns = turned(k, (size_t) c.d_k), values(v.begin(), v.end());
        std::vector<float>        bias((size_t) n_keys);
        read_biases(*job.rows, 0, h / g, bias.data());
        for (int32_t t = 0; t < job.n; t++) {
            const int32_t       sees = c.causal ? n_keys - job.n + t + 1 : n_keys;
            std::vector<double> p   = products(job.q + (size_t) ((t * c.H + h) * c.d_k), columns, c.d_k, sees);
            double              top = c.sinks ? (double) job.sinks[h] : -1e300, total = 0.0;
            for (int32_t j = 0; j < sees; j++) {
                const double s = p[(size_t) j] * job.scale;
                p[(size_t) j]  = (c.softcap != 0.0f ? c.softcap * std::tanh(s / c.softcap) : s) + (double) bias[(size_t) j];
                top            = std::max(top, p[(size_t) j]);
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
                double *       out = &e.out[(size_t) ((t * c.H + h) * c.d_v)];
                const double * row = &values[(size_t) (j * c.d_v)];
                for (int32_t i = 0; i < c.d_v; i++) {
                    out[i] += a * row[i];
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

// Returns whether the kernels may round query rows and weights to 16 bits relative to the largest number of a block: if several query
// rows share a KV head, or always on 64-bit ARM (kernels_neondot_q.h).
bool in_16_bits(Type type, bool several) {
    const std::string name = kernels().name;
    const bool        dot  = name == "neondot" || name == "neoni8mm";
    return unrotated(type) == Type::q8_0 ? several || dot : dot && unrotated(type) == Type::q4_0;
}

// Decodes the job's tokens on several threads and compares the output with the oracle; for one token also weights and column sums.
void check_decode(const Case & c, const Sequence & seq, AttendJob job, const Expected & e, int32_t n_threads) {
    const size_t        row = (size_t) seq.rows.head_length(0, 0) + 5;
    std::vector<float>  weights((size_t) c.H * row, -1.0f);
    const auto          own = seq.clone();
    Columns &           to  = own->observed.layer(0).columns;
    std::fill(to.sums().begin(), to.sums().end(), 0.0);
    job.seen = &own->observed;
    if (job.n == 1) {
        job.weights     = weights.data();
        job.weights_row = row;
    }
    std::fill_n(job.out, (size_t) (job.n * c.H * c.d_v), 0.0f);
    DecodePartials partials;
    CHECK(partials.reserve(seq.rows.shapes(), job.n, n_threads));
    partials.start(c.Hkv);
    const int32_t splits = decode_splits(job, n_threads);
    run_tasks(decode_tasks(job, splits), n_threads, [&](int32_t i, int32_t) { decode_task(job, i, splits, partials); });
    const bool several = job.n * c.H > c.Hkv;
    const bool rounds  = in_16_bits(c.storage.k, several) || in_16_bits(c.storage.v, several);
    for (size_t i = 0; i < e.out.size(); i++) {
        CHECK(close_to(job.out[i], e.out[i], rounds ? 1e-4 : 2e-5));
    }
    for (size_t h = 0; h < (size_t) c.H; h++) {
        const size_t n = job.n == 1 ? e.weights[h].size() : 0;
        for (size_t j = 0; j < row; j++) {
            CHECK(close_to(weights[h * row + j], j < n ? e.weights[h][j] : -1.0, rounds ? 1e-5 : 2e-6));
        }
    }
    const int32_t pending = seq.rows.pending_length();
    for (int32_t i = 0; i < c.Hkv * pending; i++) {
        const double found = to.sums()[(size_t) (i / pending * to.capacity + i % pending)];
        CHECK(close_to(found, job.n == 1 ? e.sums[(size_t) i] : 0.0, 2e-6));
    }
}

// Drafts: checks that each of the job's tokens gives the same bits as when it is decoded alone.
void check_alone(const Case & c, const Sequence & seq, AttendJob job) {
    const auto         row = (size_t) (c.H * c.d_v);
    std::vector<float> together((size_t) job.n * row), alone(row);
    const auto         decode = [&](const AttendJob & now) {
        DecodePartials partials;
        CHECK(partials.reserve(seq.rows.shapes(), now.n, 1));
        partials.start(c.Hkv);
        for (int32_t i = 0; i < decode_tasks(now, 1); i++) {
            decode_task(now, i, 1, partials);
        }
    };
    job.as_alone = true;
    job.out      = together.data();
    decode(job);
    for (int32_t t = 0; t < job.n; t++) {
        const auto own = seq.clone();
        own->rows.take_back(job.n - 1 - t);
        AttendJob one = job;
        one.rows      = &own->rows;
        one.n         = 1;
        one.q         = job.q + (size_t) t * job.q_token;
        one.out       = alone.data();
        decode(one);
        CHECK(std::equal(alone.begin(), alone.end(), together.begin() + (std::ptrdiff_t) ((size_t) t * row)));
    }
}

// Compares one step of n tokens, by prefill and by decode, with the oracle.
void check_step(const Case & c, Sequence & seq, int32_t n) {
    constexpr int32_t  THREADS = 3;
    const auto         q       = random_floats((size_t) (n * c.H * c.d_k));
    const auto         sinks   = random_floats((size_t) c.H);
    std::vector<float> out((size_t) (n * c.H * c.d_v));
    CHECK(make_room(seq, { { true, true }, true }, 0));
    const auto before = seq.observed.layer(0).columns.sums(), squares_before = seq.observed.layer(0).columns.of[column::squares];
    const auto entropy_before = seq.observed.layer(0).entropy;

    AttendJob job{};
    job.rows       = &seq.rows;
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

    const int32_t  pending = seq.rows.pending_length();
    const Expected e       = oracle(c, job, pending);
    if (c.causal && n > 1 && pending >= n && (!c.storage.quantised() || pending < GROUP)) {  // no pending row is quantised
        check_alone(c, seq, job);
    }

    std::vector<SpinLock> locks((size_t) c.Hkv);
    std::vector<Scratch>  scratch(THREADS);
    for (auto & s : scratch) {
        CHECK(s.reserve(seq.rows.shapes(), seq.rows.head_length(0, 0) + 1));
    }
    job.wanted = { { true, true }, true };
    job.seen   = &seq.observed;
    job.locks  = locks.data();
    run_tasks(prefill_tasks(job, scratch[0]), THREADS, [&](int32_t i, int32_t w) { prefill_task(job, i, scratch[(size_t) w]); });
    for (size_t i = 0; i < out.size(); i++) {
        CHECK(close_to(out[i], e.out[i], 2e-5));
    }
    for (int32_t h = 0; h < c.Hkv; h++) {
        CHECK(close_to(seq.observed.layer(0).entropy[(size_t) h] - entropy_before[(size_t) h], e.entropy[(size_t) h], 1e-5));
        for (int32_t j = 0; j < pending; j++) {
            const auto at = (size_t) (h * seq.observed.layer(0).columns.capacity + j);
            CHECK(close_to(seq.observed.layer(0).columns.of[column::squares][at] - squares_before[at], e.squares[(size_t) (h * pending + j)], 2e-5));
            CHECK(close_to(seq.observed.layer(0).columns.sums()[at] - before[at], e.sums[(size_t) (h * pending + j)], 2e-5));
        }
    }

    check_decode(c, seq, job, e, THREADS);
    check_decode(c, seq, job, e, 1);
}

// Returns a plan that keeps half of a prompt. mass: merged rows get biases.
kvedge_plan half_plan(bool mass) {
    kvedge_plan plan  = full_plan();
    plan.budget_ratio = 0.5;
    plan.scorer       = find_scorer("cumulative");
    plan.reducer      = find_reducer("pivotal");
    plan.params[KVEDGE_STAGE_REDUCER][0] = mass ? 1 : 0;
    return plan;
}

// [head][token] bias of each row; 0 for tokens without a row.
using Biases = std::vector<std::vector<float>>;

Biases biases_of(const Store & rows) {
    Biases out;
    for (int32_t h = 0; h < rows.shapes()[0].n_heads_kv; h++) {
        const auto         tokens = rows.head_tokens(0, h);
        std::vector<float> bias(tokens.size()), by_token((size_t) rows.n_tokens(), 0.0f);
        read_biases(rows, 0, h, bias.data());
        for (size_t i = 0; i < tokens.size(); i++) {
            by_token[(size_t) tokens[i]] = bias[i];
        }
        out.push_back(by_token);
    }
    return out;
}

// Returns whether every row has the same bias as in `before`, and newer rows have none.
bool same_biases(const Store & rows, const Biases & before) {
    const Biases now = biases_of(rows);
    for (size_t h = 0; h < now.size(); h++) {
        for (int32_t token : rows.head_tokens(0, (int32_t) h)) {
            const auto at = (size_t) token;
            if (now[h][at] != (at < before[h].size() ? before[h][at] : 0.0f)) {
                return false;
            }
        }
    }
    return true;
}

void check_compressed(const Case & c, Sequence & seq, bool mass) {
    Compression  outcome;
    kvedge_error err{};
    CHECK(compress_pending(seq, half_plan(mass), 2, outcome, &err) == KVEDGE_OK);
    CHECK(biased(seq.rows) == mass && outcome.after_bytes == seq.rows.bytes());
    const auto drafted = seq.clone();
    append(*drafted, 9);
    check_step(c, *drafted, 9);
    const Biases given = biases_of(seq.rows);
    for (const auto & head : given) {
        double total = 0.0;  // with mass, the kept rows together stand for all 774 rows
        for (int32_t token : seq.rows.head_tokens(0, (int32_t) (&head - given.data()))) {
            total += std::exp((double) head[(size_t) token]);
        }
        CHECK(close_to((float) total, mass ? 774.0 : 387.0, 1e-2));
    }
    CHECK(outcome.reduced && seq.rows.head_length(0, 0) == 387 && seq.rows.pending_length() == 0);
    for (int32_t n : { 1, 1, 40 }) {  // single tokens, then the next prompt, behind the compressed block
        append(seq, n);
        check_step(c, seq, n);
    }
    for (int32_t n : { 4, 9, 32 }) {  // the last n tokens of the prompt, as if it were read in smaller parts
        check_step(c, seq, n);
    }
    for (int32_t h = 0; h < c.Hkv; h++) {  // drops rows as a decode policy does: three rows of the compressed block, which leaves
        for (int32_t row : { 2, 380, 200, 384, 384 }) {
            drop_row(seq.rows, 0, h, row);  // 384 rows there, then twice row 384, the oldest generated row
        }
    }
    CHECK(seq.rows.head_length(0, 0) == 424);
    check_step(c, seq, 40);
    seq.remove(760, 774);  // tokens of the compressed block
    seq.remove(775, 780);  // pending tokens
    CHECK(seq.rows.pending_length() == 37 && seq.rows.head_tokens(0, 0).size() == (size_t) seq.rows.head_length(0, 0));
    append(seq, 2);
    check_step(c, seq, 2);
    check_step(c, seq, 1);
    CHECK(same_biases(seq.rows, given));
    const auto copy = seq.clone();
    CHECK(copy && copy->rows.head_tokens(0, 0) == seq.rows.head_tokens(0, 0) && same_biases(copy->rows, given));
    check_step(c, *copy, 2);
    copy->close_pending();
    CHECK(seal_old(copy->rows, copy->rows.contents().blocks.size()));
    for (int32_t h = 0; h < c.Hkv; h++) {
        for (int32_t i = 0; i < 300; i++) {
            drop_row(copy->rows, 0, h, 40);
        }
    }
    pack_if_sparse(copy->rows);  // joins blocks with and without biases
    CHECK(c.storage.quantised() || copy->rows.contents().blocks.size() < seq.rows.contents().blocks.size());
    CHECK(same_biases(copy->rows, given));
    append(*copy, 1);
    check_step(c, *copy, 1);
}

void check_case(const Case & c) {
    const std::vector<LayerShape> shapes = { { 0, c.H, c.Hkv, c.d_k, c.d_v } };
    Sequence                      seq(shapes, c.storage);
    for (int32_t n : { 1, 70, 3, 642, 2, 5, 17, 33, 1 }) {
        append(seq, n);
        check_step(c, seq, n);
    }
    const auto other = seq.clone();
    CHECK(other != nullptr);
    check_compressed(c, seq, false);
    check_compressed(c, *other, true);
}

}  // namespace

// test_attention [N]: runs every Nth case only. On emulators all cases take a quarter of an hour.
int main(int argc, char ** argv) {
    const size_t every   = argc > 1 ? (size_t) std::max(1, std::atoi(argv[1])) : 1;
    std::vector<Case> cases = {
        { 4, 4, 64, 64, true, 0.0f, false, { Type::f16, Type::f16 } },    { 8, 2, 128, 128, true, 0.0f, false, { Type::f16, Type::f16 } },
        { 6, 1, 80, 80, true, 0.0f, false, { Type::bf16, Type::bf16 } },   { 24, 1, 96, 96, true, 0.0f, false, { Type::f32, Type::f32 } },
        { 4, 2, 128, 64, true, 30.0f, false, { Type::f16, Type::f16 } },  { 4, 4, 64, 64, false, 0.0f, false, { Type::f16, Type::f16 } },
        { 8, 4, 64, 64, true, 0.0f, true, { Type::f16, Type::f16 } },     { 2, 1, 256, 256, false, 20.0f, true, { Type::f32, Type::f32 } },
        { 12, 2, 128, 128, true, 0.0f, false, { Type::q8_0, Type::q8_0 } },
        { 8, 2, 128, 64, true, 0.0f, true, { Type::q4_0, Type::q4_0 } },
        { 4, 4, 128, 128, true, 0.0f, false, { of_keys(Type::kivi2), Type::kivi2 } },
        { 6, 2, 64, 96, true, 30.0f, false, { of_keys(Type::kivi4), Type::kivi4 } },
        { 4, 1, 64, 64, false, 0.0f, false, { of_keys(Type::kivi4), Type::bf16 } },
        { 2, 2, 32, 32, true, 0.0f, false, { Type::f32, Type::kivi2 } },
        { 4, 2, 64, 64, true, 0.0f, false, { Type::q8_0, Type::kivi4 } },
        { 8, 2, 128, 64, true, 0.0f, true, { rotated_keys(Type::q4_0), rotated_values(Type::q4_0) } },
        { 12, 2, 192, 128, true, 30.0f, false, { rotated_keys(Type::q8_0), rotated_values(Type::q8_0) } },
        { 4, 4, 64, 64, false, 0.0f, false, { rotated_keys(Type::q4_0), Type::kivi4 } },
        { 4, 1, 64, 128, true, 0.0f, false, { Type::f16, rotated_values(Type::q8_0) } },
        { 8, 2, 128, 64, true, 0.0f, true, { rotated_keys(Type::tq3), rotated_values(Type::tq3) } },
    };
    for (int32_t i = 0; FORMATS.of[i].name; i++) {
        cases.push_back({ 4, 4, 64, 64, true, 0.0f, false, { of_keys((Type) i), (Type) i } });
    }
    for (size_t i = 0; i < cases.size(); i += every) {
        check_case(cases[i]);
    }
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
