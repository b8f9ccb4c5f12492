// Compares the speed of draft attention with the limits of the CPU, and with ggml. Drafts are a few query tokens whose results equal
// those of single tokens; rows are f16.
//
//   bench_batch HEADS KV_HEADS HEAD_SIZE KEYS THREADS ROUNDS MIB [QUERIES ...]
//
// The layers hold MIB MiB of keys and values; 192 MiB fit no CPU cache. QUERIES: query tokens at a time; default 1 4 8 17 32.
// stdout: the table of kernels, the layers, bytes and fused multiply-adds of a thread in a second; then for each number of query
// tokens a line:
//   microseconds of a layer; the limit: bytes (keys and values, read once) or products (2 x 2 x queries x heads x keys x head size
//   operations); the share of that limit;
//   the time of ggml's flash attention, and of ggml's products K^T Q and V P alone, divided by kvedge's time.
// Times are CPU time divided by the threads, which other programs disturb less: the best of ROUNDS rounds, in which all take turns.

#include "attention/attention.h"
#include "bench.h"
#include "kernels/kernels.h"
#include "sequence/sequence.h"
#include "store/store.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>

#if defined(__x86_64__)
#    include <immintrin.h>
#elif defined(__aarch64__)
#    include <arm_neon.h>
#endif

using namespace kvedge;

namespace {

// ---------------------------------------------------------------------------------------------------------
// The limits of the CPU

// Computes multiply-adds in independent chains. It is a macro because a function would have to be compiled for the same instruction
// set as its callers.
constexpr int32_t CHAINS = 12, STEPS = 2000000;
#define KVEDGE_CHAINS(vector, set1, fma)        \
    vector       sums[CHAINS];                  \
    const vector a = set1(0.999f);              \
    for (int i = 0; i < CHAINS; i++) {          \
        sums[i] = set1(0.01f * (float) i);      \
    }                                           \
    for (int32_t k = 0; k < STEPS; k++) {       \
        _Pragma("GCC unroll 12")                \
        for (int i = 0; i < CHAINS; i++) {      \
            sums[i] = fma(sums[i], a, a);       \
        }                                       \
    }                                           \
    float out[CHAINS * sizeof(vector) / 4];     \
    memcpy(out, sums, sizeof(out));             \
    return std::accumulate(out, out + sizeof(out) / 4, 0.0f)

#if defined(__x86_64__)
__attribute__((target("avx512f"))) float chains_512() { KVEDGE_CHAINS(__m512, _mm512_set1_ps, _mm512_fmadd_ps); }
__attribute__((target("avx2,fma"))) float chains_256() { KVEDGE_CHAINS(__m256, _mm256_set1_ps, _mm256_fmadd_ps); }
#elif defined(__aarch64__)
float chains_128() { KVEDGE_CHAINS(float32x4_t, vdupq_n_f32, [](auto x, auto y, auto z) { return vfmaq_f32(z, x, y); }); }
#else
float chains_32() { KVEDGE_CHAINS(float, float, std::fma); }
#endif

struct Chains {
    float (*run)();
    int32_t lanes;
};

Chains widest_chains() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512f") ? Chains{ chains_512, 16 } : Chains{ chains_256, 8 };
#elif defined(__aarch64__)
    return { chains_128, 4 };
#else
    return { chains_32, 1 };
#endif
}

// Returns the sum of n bytes as 64-bit words. Prefetches AHEAD bytes ahead.
template <size_t AHEAD> uint64_t sum_ahead(const uint8_t * from, size_t n) {
    uint64_t part[32] = {};
    for (size_t i = 0; i + sizeof(part) <= n; i += sizeof(part)) {
        for (size_t line = 0; AHEAD > 0 && line < sizeof(part); line += 64) {
            __builtin_prefetch(from + i + AHEAD + line);
        }
        uint64_t x[32];
        memcpy(x, from + i, sizeof(x));
        for (int k = 0; k < 32; k++) {
            part[k] += x[k];
        }
    }
    uint64_t sum = 0;
    for (uint64_t p : part) {
        sum += p;
    }
    return sum;
}

// ---------------------------------------------------------------------------------------------------------

struct Bench {
    int32_t n_heads, n_heads_kv, size, keys, threads;

    std::vector<LayerShape>     shapes;
    std::unique_ptr<Sequence>   seq;
    std::vector<DecodePartials> partials;  // [layer]
    std::vector<Scratch>        scratch;   // [thread]
    std::vector<float>          q, out;    // [queries][H][d]
    std::atomic<uint64_t>       sum{ 0 };

    double bytes() const { return 4.0 * n_heads_kv * keys * size; }  // bytes of a layer
    double products(int32_t n) const { return 4.0 * n * n_heads * keys * size; }
};

bool fill(Bench & b, int32_t mib, int32_t most_queries) {
    for (int32_t l = 0; l * b.bytes() < (double) mib * 1048576; l++) {
        b.shapes.push_back({ l, b.n_heads, b.n_heads_kv, b.size, b.size });
    }
    b.seq = std::make_unique<Sequence>(b.shapes, Storage{ Type::f16, Type::f16 });
    std::vector<int32_t> pos((size_t) b.keys);
    if (!b.seq->rows.append(b.keys, pos.data(), false)) {
        return false;
    }
    uint32_t random = 1;
    for (int32_t l = 0; l < (int32_t) b.shapes.size(); l++) {
        fill_halves((uint16_t *) k_row(b.seq->rows.place_from_end(0, b.keys), l, 0), (size_t) b.bytes() / 2, random);
    }
    b.q.resize((size_t) (most_queries * b.n_heads * b.size));
    for (auto & x : b.q) {
        random = random * 1664525u + 1013904223u;
        x      = (float) (int32_t) random / 1e9f;
    }
    b.out.resize(b.q.size());
    b.partials = std::vector<DecodePartials>(b.shapes.size());
    b.scratch  = std::vector<Scratch>((size_t) b.threads);
    return std::all_of(b.partials.begin(), b.partials.end(), [&](auto & p) { return p.reserve(b.shapes, most_queries, b.threads); }) &&
           std::all_of(b.scratch.begin(), b.scratch.end(), [&](auto & s) { return s.reserve(b.shapes, b.keys); });
}

AttendJob job_of(Bench & b, int32_t layer, int32_t n) {
    AttendJob job{};
    job.rows      = &b.seq->rows;
    job.layer     = layer;
    job.n         = n;
    job.causal    = true;
    job.as_alone  = true;
    job.q         = b.q.data();
    job.q_token   = (size_t) (b.n_heads * b.size);
    job.q_head    = (size_t) b.size;
    job.out       = b.out.data();
    job.out_token = job.q_token;
    job.out_head  = job.q_head;
    job.scale     = 1.0f / std::sqrt((float) b.size);
    return job;
}

// Returns the time of attention of n query tokens over all layers. All layers write to the same results.
double time_attention(Bench & b, int32_t n) {
    const auto n_layers = (int32_t) b.shapes.size();
    if (n > 1 && n * (b.n_heads / b.n_heads_kv) > DECODE_ROWS) {
        std::atomic<int32_t> worker{ 0 };
        const int32_t        tasks = prefill_tasks(job_of(b, 0, n), b.scratch[0]);
        return timed(b.threads, tasks * n_layers, [&](int32_t i) {
            thread_local int32_t mine = worker.fetch_add(1);
            prefill_task(job_of(b, i / tasks, n), i % tasks, b.scratch[(size_t) (mine % b.threads)]);
        }).processor;
    }
    for (auto & p : b.partials) {
        p.start(b.n_heads_kv);
    }
    const int32_t splits = decode_splits(job_of(b, 0, n), b.threads);
    const int32_t tasks  = decode_tasks(job_of(b, 0, n), splits);
    return timed(b.threads, tasks * n_layers, [&](int32_t i) {
        decode_task(job_of(b, i / tasks, n), i % tasks, splits, b.partials[(size_t) (i / tasks)]);
    }).processor;
}

template <size_t AHEAD> double time_sum(Bench & b) {
    const auto n_layers = (int32_t) b.shapes.size();
    return timed(b.threads, n_layers * b.threads, [&](int32_t i) {
        const LayerRows & memory = b.seq->rows.contents().blocks[0].layers[(size_t) (i / b.threads)].rows;
        const size_t      part   = memory.bytes() / (size_t) b.threads;
        b.sum.fetch_add(sum_ahead<AHEAD>(memory.data() + (size_t) (i % b.threads) * part, part), std::memory_order_relaxed);
    }).processor;
}

// ---------------------------------------------------------------------------------------------------------
// ggml's attention, over its own rows

struct Ggml {
    ggml_context_ptr        rows;
    ggml_backend_ptr        backend;
    ggml_backend_buffer_ptr buffer;
    std::vector<ggml_tensor *> k, v, v_turned;  // [layer]
    ggml_tensor *              q = nullptr, * mask = nullptr;

    Ggml(const Bench & b, int32_t most_queries);
    double time(const Bench & b, int32_t n, bool flash);
};

Ggml::Ggml(const Bench & b, int32_t most_queries) : backend(ggml_backend_cpu_init()) {
    rows.reset(ggml_init({ (3 * b.shapes.size() + 2) * ggml_tensor_overhead(), nullptr, true }));
    ggml_context * c = rows.get();
    for (size_t l = 0; l < b.shapes.size(); l++) {
        k.push_back(ggml_new_tensor_3d(c, GGML_TYPE_F16, b.size, b.keys, b.n_heads_kv));
        v.push_back(ggml_new_tensor_3d(c, GGML_TYPE_F16, b.size, b.keys, b.n_heads_kv));
        v_turned.push_back(ggml_new_tensor_3d(c, GGML_TYPE_F16, b.keys, b.size, b.n_heads_kv));
    }
    q    = ggml_new_tensor_3d(c, GGML_TYPE_F32, b.size, most_queries, b.n_heads);
    mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, b.keys, most_queries);
    buffer.reset(ggml_backend_alloc_ctx_tensors(c, backend.get()));
    ggml_backend_buffer_clear(buffer.get(), 0);
    std::vector<uint16_t> halves((size_t) ggml_nelements(k[0]));
    uint32_t              random = 1;
    fill_halves(halves.data(), halves.size(), random);
    for (auto * all : { &k, &v, &v_turned }) {
        for (ggml_tensor * x : *all) {
            ggml_backend_tensor_set(x, halves.data(), 0, ggml_nbytes(x));
        }
    }
    ggml_backend_tensor_set(q, b.q.data(), 0, ggml_nbytes(q));
    ggml_backend_cpu_set_n_threads(backend.get(), b.threads);
}

double Ggml::time(const Bench & b, int32_t n, bool flash) {
    const size_t     nodes = 4 * k.size();
    ggml_context_ptr memory(ggml_init({ nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes, false), nullptr, true }));
    ggml_context *   c     = memory.get();
    ggml_cgraph *    graph = ggml_new_graph_custom(c, nodes, false);
    ggml_tensor *    now   = ggml_view_3d(c, q, b.size, n, b.n_heads, q->nb[1], q->nb[2], 0);
    ggml_tensor *    sees  = ggml_view_2d(c, mask, b.keys, n, mask->nb[1], 0);
    for (size_t l = 0; l < k.size(); l++) {
        if (flash) {
            ggml_build_forward_expand(graph, ggml_flash_attn_ext(c, now, k[l], v[l], sees, 0.1f, 0.0f, 0.0f));
        } else {
            ggml_build_forward_expand(graph, ggml_mul_mat(c, v_turned[l], ggml_mul_mat(c, k[l], now)));
        }
    }
    ggml_gallocr_ptr working(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend.get())));
    ggml_gallocr_alloc_graph(working.get(), graph);
    ggml_backend_graph_compute(backend.get(), graph);
    const std::clock_t clock = std::clock();
    ggml_backend_graph_compute(backend.get(), graph);
    return (double) (std::clock() - clock) / CLOCKS_PER_SEC / b.threads;
}

// ---------------------------------------------------------------------------------------------------------

struct Best {
    double bytes = 0.0, products = 0.0;  // of one thread in a second
    std::vector<double> ours, flash, plain;
};

void lower(double & best, double seconds) { best = std::min(best, seconds); }

Best measure(Bench & b, Ggml & ggml, const std::vector<int32_t> & queries, int rounds) {
    Best         best;
    double       read = 1e30, chains = 1e30;
    const Chains widest = widest_chains();
    for (auto * all : { &best.ours, &best.flash, &best.plain }) {
        all->assign(queries.size(), 1e30);
    }
    for (int r = -1; r < rounds; r++) {  // round -1 touches the memory pages
        for (double seconds : { time_sum<0>(b), time_sum<4096>(b), time_sum<8192>(b) }) {
            lower(read, seconds);
        }
        volatile float sink = 0.0f;
        lower(chains, timed(b.threads, b.threads, [&](int32_t) { sink = widest.run(); }).processor);
        for (size_t i = 0; i < queries.size(); i++) {
            lower(best.ours[i], time_attention(b, queries[i]));
            lower(best.flash[i], ggml.time(b, queries[i], true));
            lower(best.plain[i], ggml.time(b, queries[i], false));
            lower(best.ours[i], time_attention(b, queries[i]));
        }
    }
    best.bytes    = (double) b.shapes.size() * b.bytes() / read / b.threads;
    best.products = 2.0 * CHAINS * STEPS * widest.lanes / chains;
    return best;
}

}  // namespace

int main(int argc, char ** argv) {
    Bench                b{};
    std::vector<int32_t> queries;
    for (int i = 8; i < argc; i++) {
        queries.push_back(std::atoi(argv[i]));
    }
    if (queries.empty()) {
        queries = { 1, 4, 8, 17, 32 };
    }
    const auto number = [&](int i) { return i < argc ? std::atoi(argv[i]) : 0; };
    b.n_heads    = number(1);
    b.n_heads_kv = number(2);
    b.size       = number(3);
    b.keys       = number(4);
    b.threads    = number(5);
    if (std::min({ b.n_heads, b.n_heads_kv, b.size, b.threads, number(6), number(7), *std::min_element(queries.begin(), queries.end()) }) < 1 ||
        b.n_heads % b.n_heads_kv != 0 || b.size % 8 != 0 || b.size > MAX_HEAD_SIZE || b.keys < *std::max_element(queries.begin(), queries.end())) {
        std::fprintf(stderr, "usage: bench_batch HEADS KV_HEADS HEAD_SIZE KEYS THREADS ROUNDS MIB [QUERIES ...]\n");
        return 2;
    }
    const int32_t most = *std::max_element(queries.begin(), queries.end());
    if (!fill(b, number(7), most)) {
        std::fprintf(stderr, "bench_batch: no memory\n");
        return 1;
    }
    Ggml       ggml(b, most);
    const Best best     = measure(b, ggml, queries, number(6));
    const auto n_layers = (double) b.shapes.size();
    std::printf("%s, %d/%d heads of %d, %d keys, %d threads, %zu layers: a thread reads %.1f GB/s and does %.1f GFLOP/s\n", kernels().name,
                b.n_heads, b.n_heads_kv, b.size, b.keys, b.threads, b.shapes.size(), best.bytes / 1e9, best.products / 1e9);
    for (size_t i = 0; i < queries.size(); i++) {
        const double read = b.bytes() / best.bytes / b.threads, multiply = b.products(queries[i]) / best.products / b.threads;
        const double ours = best.ours[i] / n_layers;
        std::printf("%3d queries %9.1f us  %.2f of %-8s  flash %5.2f  products %5.2f\n", queries[i], ours * 1e6, std::max(read, multiply) / ours,
                    read > multiply ? "bytes" : "products", best.flash[i] / best.ours[i], best.plain[i] / best.ours[i]);
    }
    return b.sum == 0;  // uses the sums, so that the compiler keeps them
}
