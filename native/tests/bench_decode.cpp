// Compares the time in which decode attention reads keys and values with the time of a plain sum over the same bytes.
//
//   bench_decode HEADS KV_HEADS HEAD_SIZE TOKENS THREADS ROUNDS MIB TYPE
//
// The layers hold MIB MiB of keys and values: 192 MiB fit no CPU cache, 1 MiB shows the speed of the kernels with faster memory. TYPE:
// any storage type except f32; also rotated:q8_0 and rotated:q4_0. Sum and attention take turns, and divide layers and heads among the
// threads without barriers.
// stdout: the table of kernels, bytes and layers; then a line per round: wall seconds of the sum and of the attention, and
// their CPU seconds divided by the threads, which other programs disturb less.

#include "attention/attention.h"
#include "bench.h"
#include "kernels/kernels.h"
#include "store/store.h"
#include "compress/compress.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace kvedge;

namespace {

struct Bench {
    int32_t n_heads, n_heads_kv, size, tokens, threads, mib;
    Type    type;
    bool    rotated = false;

    std::vector<LayerShape>      shapes;
    std::unique_ptr<Sequence>    seq;
    std::vector<DecodePartials>  partials;  // [layer]
    std::vector<float>           q, out;    // [H][d], [layer][H][d]
    std::atomic<uint64_t>        sum{ 0 };
};

bool type_named(const char * name, Type & type, bool & rotated) {
    const char prefix[] = "rotated:";
    rotated             = strncmp(name, prefix, sizeof(prefix) - 1) == 0;
    name += rotated ? sizeof(prefix) - 1 : 0;
    for (int32_t i = 0; FORMATS.of[i].name; i++) {
        if (strcmp(FORMATS.of[i].name, name) == 0) {
            type = (Type) i;
            return type != Type::f32 && (!rotated || (is_quantised(type) && !format(type).residual));
        }
    }
    return false;
}

bool fill(Bench & b) {
    const auto   rows = 2 * (size_t) b.n_heads_kv * (size_t) b.tokens;
    const size_t layer = rows * row_bytes(b.type, b.size), plain = rows * (size_t) b.size;
    for (size_t l = 0; l * layer < (size_t) b.mib << 20; l++) {
        b.shapes.push_back({ (int32_t) l, b.n_heads, b.n_heads_kv, b.size, b.size });
    }
    const Storage plain_rows = { of_keys(b.type), b.type }, turned = { rotated_keys(b.type), rotated_values(b.type) };
    b.seq = std::make_unique<Sequence>(b.shapes, b.rotated ? turned : plain_rows);
    std::vector<int32_t> pos((size_t) b.tokens);
    if (!b.seq->rows.append(b.tokens, pos.data(), false)) {
        return false;
    }
    uint32_t random = 1;
    for (int32_t l = 0; l < (int32_t) b.shapes.size(); l++) {
        auto * x = (uint16_t *) k_row(b.seq->rows.place_from_end(0, b.tokens), l, 0);
        fill_halves(x, plain, random);
    }
    Compression outcome;  // the compression below quantises the rows and keeps all of them
    if (is_quantised(b.type) && compress_pending(*b.seq, full_plan(), b.threads, outcome, nullptr) != KVEDGE_OK) {
        return false;
    }
    b.q.assign((size_t) (b.n_heads * b.size), 0.25f);
    b.out.resize(b.shapes.size() * b.q.size());
    b.partials = std::vector<DecodePartials>(b.shapes.size());
    return std::all_of(b.partials.begin(), b.partials.end(), [&](auto & p) { return p.reserve(b.shapes, 1, b.threads); });
}

AttendJob job_of(Bench & b, int32_t layer) {
    AttendJob job{};
    job.rows     = &b.seq->rows;
    job.layer    = layer;
    job.n        = 1;
    job.causal   = true;
    job.q        = b.q.data();
    job.q_head   = (size_t) b.size;
    job.out      = b.out.data() + (size_t) layer * b.q.size();
    job.out_head = (size_t) b.size;
    job.scale    = 0.1f;
    return job;
}

uint64_t sum_bytes(const uint8_t * from, size_t n) {
    uint64_t part[16] = {};
    for (size_t i = 0; i + sizeof(part) <= n; i += sizeof(part)) {
        uint64_t x[16];
        memcpy(x, from + i, sizeof(x));
        for (int k = 0; k < 16; k++) {
            part[k] += x[k];
        }
    }
    uint64_t sum = 0;
    for (uint64_t p : part) {
        sum += p;
    }
    return sum;
}

Seconds time_sum(Bench & b) {
    const auto n_layers = (int32_t) b.shapes.size();
    return timed(b.threads, n_layers * b.threads, [&](int32_t i) {
        const LayerRows & memory = b.seq->rows.contents().blocks[0].layers[(size_t) (i / b.threads)].rows;
        const size_t      part   = memory.bytes() / (size_t) b.threads;
        b.sum.fetch_add(sum_bytes(memory.data() + (size_t) (i % b.threads) * part, part), std::memory_order_relaxed);
    });
}

Seconds time_attention(Bench & b) {
    for (auto & p : b.partials) {
        p.start(b.n_heads_kv);
    }
    const int32_t splits = decode_splits(job_of(b, 0), b.threads);
    const int32_t tasks  = decode_tasks(job_of(b, 0), splits);
    return timed(b.threads, tasks * (int32_t) b.shapes.size(), [&](int32_t i) {
        decode_task(job_of(b, i / tasks), i % tasks, splits, b.partials[(size_t) (i / tasks)]);
    });
}

}  // namespace

int main(int argc, char ** argv) {
    Bench b;
    if (argc != 9 || !type_named(argv[8], b.type, b.rotated) || (b.rotated && std::atoi(argv[3]) % ROTATION != 0)) {
        std::fprintf(stderr, "usage: bench_decode HEADS KV_HEADS HEAD_SIZE TOKENS THREADS ROUNDS MIB TYPE\n");
        return 2;
    }
    b.n_heads        = std::atoi(argv[1]);
    b.n_heads_kv     = std::atoi(argv[2]);
    b.size           = std::atoi(argv[3]);
    b.tokens         = std::atoi(argv[4]);
    b.threads        = std::atoi(argv[5]);
    b.mib            = std::atoi(argv[7]);
    const int rounds = std::atoi(argv[6]);
    if (std::min({ b.n_heads, b.n_heads_kv, b.size, b.tokens, b.threads, b.mib, rounds }) < 1 || b.n_heads % b.n_heads_kv != 0 ||
        b.size % (is_quantised(b.type) ? GROUP : 8) != 0 || b.size > MAX_HEAD_SIZE) {
        std::fprintf(stderr, "bench_decode: every number must be at least 1, KV heads divide heads, 8 the head size (32 of q8_0)\n");
        return 2;
    }
    if (!fill(b)) {
        std::fprintf(stderr, "bench_decode: no memory\n");
        return 1;
    }
    std::printf("%s %zu %zu\n", kernels().name, (size_t) b.seq->rows.bytes(), b.shapes.size());
    time_sum(b);
    time_attention(b);
    for (int r = 0; r < rounds; r++) {
        const Seconds sum = time_sum(b), attention = time_attention(b);
        std::printf("%.6e %.6e %.6e %.6e\n", sum.wall, attention.wall, sum.processor, attention.processor);
    }
    return b.sum == 0;  // uses the sums, so that the compiler keeps them
}
