#include "attention/attention.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

constexpr int32_t BLOCK      = 32;   // keys at a time: theirs, their values and the next keys fit a first-level cache
constexpr int32_t SPLIT_KEYS = 256;  // fewest keys worth a split of their own
constexpr int32_t MAX_SIZE   = MAX_HEAD_SIZE;

// A row's unnormalised output, its largest logit and its softmax denominator.
struct Partial {
    float * top;  // [rows]
    float * sum;  // [rows]
    float * o;    // [rows][ld]
};

size_t partial_floats(int32_t rows, int32_t d_v) { return (size_t) rows * (2 + (size_t) pad16(d_v)); }

Partial partial_at(DecodePartials & p, int32_t head, int32_t split, int32_t rows, int32_t d_v) {
    float * base = p.data.data() + ((size_t) head * (size_t) p.splits_max + (size_t) split) * partial_floats(rows, d_v);
    return { base, base + rows, base + 2 * (size_t) rows };
}

struct Piece {
    int32_t head, group, rows;
    int32_t n_keys;
    int32_t a, b;  // keys [a, b) of the head
};

// Up to DECODE_ROWS scaled query rows, the unit that reads the keys once.
struct Queries {
    int32_t first, n;
    float   q[DECODE_ROWS * MAX_SIZE];  // [n][d_k]
};

void load_queries(const AttendJob & job, const Piece & piece, int32_t d_k, Queries & x) {
    for (int32_t i = 0; i < x.n; i++) {
        const int32_t r    = x.first + i;
        const auto    t    = (size_t) (job.index ? job.index[r / piece.group] : r / piece.group);
        const float * from = job.q + t * job.q_token + (size_t) (piece.head * piece.group + r % piece.group) * job.q_head;
        for (int32_t c = 0; c < d_k; c++) {
            x.q[(size_t) i * (size_t) d_k + (size_t) c] = from[c] * job.scale;
        }
    }
}

float * weights_of(const AttendJob & job, const Piece & piece, int32_t r) {
    return job.weights + (size_t) (piece.head * piece.group + r) * job.weights_row;
}

// Turns a row of n logits into weights relative to the row's running maximum, rescaling what was summed before.
void online_softmax(float * row, int32_t n, size_t ld, float & top, float & sum, float * o) {
    if (n == 0) {
        return;
    }
    const float highest = std::max(top, kernels().max(row, (size_t) n));
    if (highest > top) {
        const float shrink = std::exp(top - highest);
        sum *= shrink;
        for (size_t i = 0; i < ld; i++) {
            o[i] *= shrink;
        }
        top = highest;
    }
    sum += kernels().exp_sum(row, (size_t) n, top);
}

// Adds the rows of seg, the head's rows from `at` on (at most BLOCK), to the partial result.
void attend_block(const AttendJob & job, const Piece & piece, const Segment & seg, int32_t at, const Queries & x, Partial & out) {
    const LayerShape & shape = job.seq->shapes()[(size_t) job.layer];
    const Kernels &    kn    = kernels();
    const auto         ld    = (size_t) pad16(shape.d_v);
    float              s[DECODE_ROWS * BLOCK];

    kn.rows_dot(x.q, (size_t) shape.d_k, x.n, seg.k, seg.n, shape.d_k, s, BLOCK, seg.v.data);
    for (int32_t i = 0; i < x.n; i++) {
        const int32_t r    = x.first + i;
        float *       row  = s + (size_t) i * BLOCK;
        const int32_t sees = job.causal ? piece.n_keys - job.n + r / piece.group + 1 : piece.n_keys;
        const int32_t n    = std::clamp(sees - at, 0, seg.n);
        if (job.softcap != 0.0f) {
            kn.softcap(row, (size_t) n, job.softcap);
        }
        if (job.weights) {
            std::copy_n(row, n, weights_of(job, piece, r) + at);
        }
        online_softmax(row, n, ld, out.top[r], out.sum[r], out.o + (size_t) r * ld);
        std::fill(row + n, row + seg.n, 0.0f);
    }
    kn.rows_axpy(s, BLOCK, x.n, seg.v, seg.n, shape.d_v, out.o + (size_t) x.first * ld, ld,
                 seg.k.from(seg.n).data);  // the next block, if the segment goes on
}

void write_out(const AttendJob & job, const Piece & piece, int32_t n_splits, DecodePartials & partials) {
    const LayerShape & shape = job.seq->shapes()[(size_t) job.layer];
    const auto         ld    = (size_t) pad16(shape.d_v);
    for (int32_t r = 0; r < piece.rows; r++) {
        const int32_t head  = piece.head * piece.group + r % piece.group;
        float         top   = job.sinks ? job.sinks[head] : -INFINITY;
        for (int32_t s = 0; s < n_splits; s++) {
            top = std::max(top, partial_at(partials, piece.head, s, piece.rows, shape.d_v).top[r]);
        }
        const auto t   = (size_t) (job.index ? job.index[r / piece.group] : r / piece.group);
        float *    out = job.out + t * job.out_token + (size_t) head * job.out_head;
        std::fill(out, out + shape.d_v, 0.0f);
        float total = job.sinks ? std::exp(job.sinks[head] - top) : 0.0f;
        for (int32_t s = 0; s < n_splits; s++) {
            const Partial p = partial_at(partials, piece.head, s, piece.rows, shape.d_v);
            const float   w = std::exp(p.top[r] - top);
            total += w * p.sum[r];
            kernels().axpy(w, p.o + (size_t) r * ld, out, (size_t) shape.d_v);
        }
        for (int32_t i = 0; i < shape.d_v; i++) {
            out[i] /= total;
        }
        if (job.weights) {  // so far the logits
            float * weights = weights_of(job, piece, r);
            kernels().exp_sum(weights, (size_t) piece.n_keys, top);
            std::transform(weights, weights + piece.n_keys, weights, [total](float x) { return x / total; });
        }
    }
    if (job.scored) {
        job.scored->add_scores(job.layer, piece.head, piece.n_keys, weights_of(job, piece, 0), job.weights_row, piece.group);
    }
}

}  // namespace

bool DecodePartials::reserve(const std::vector<LayerShape> & shapes, int32_t n_tokens, int32_t n_threads) try {
    size_t  need  = 0;
    int32_t heads = 1;
    splits_max    = std::max(1, 4 * n_threads);
    for (const auto & s : shapes) {
        const int32_t rows = n_tokens * (s.n_heads / s.n_heads_kv);
        need  = std::max(need, (size_t) s.n_heads_kv * (size_t) splits_max * partial_floats(rows, s.d_v));
        heads = std::max(heads, s.n_heads_kv);
    }
    if (data.size() < need) {
        data.resize(need);
    }
    if (n_done < heads) {
        done.reset(new std::atomic<int32_t>[(size_t) heads]);
        n_done = heads;
    }
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

void DecodePartials::start(int32_t n_heads_kv) {
    for (int32_t h = 0; h < n_heads_kv; h++) {
        done[(size_t) h].store(0, std::memory_order_relaxed);
    }
}

int32_t decode_splits(const AttendJob & job, int32_t n_threads) {
    const LayerShape & shape = job.seq->shapes()[(size_t) job.layer];
    if (n_threads <= 1 || shape.n_heads_kv % n_threads == 0) {
        return 1;
    }
    const int32_t keys = job.seq->head_length(job.layer, 0);
    const int32_t even = (4 * n_threads + shape.n_heads_kv - 1) / shape.n_heads_kv;
    return std::clamp(keys / SPLIT_KEYS, 1, even);
}

int32_t decode_tasks(const AttendJob & job, int32_t n_splits) {
    return job.seq->shapes()[(size_t) job.layer].n_heads_kv * n_splits;
}

void decode_task(const AttendJob & job, int32_t task, int32_t n_splits, DecodePartials & partials) {
    const LayerShape & shape = job.seq->shapes()[(size_t) job.layer];
    Piece              piece;
    piece.head          = task / n_splits;
    piece.group         = shape.n_heads / shape.n_heads_kv;
    piece.rows          = job.n * piece.group;
    piece.n_keys        = job.seq->head_length(job.layer, piece.head);
    const int32_t split = task % n_splits;
    piece.a             = (int32_t) ((int64_t) piece.n_keys * split / n_splits);
    piece.b             = (int32_t) ((int64_t) piece.n_keys * (split + 1) / n_splits);

    const auto ld  = (size_t) pad16(shape.d_v);
    Partial    out = partial_at(partials, piece.head, split, piece.rows, shape.d_v);
    std::fill(out.top, out.top + piece.rows, -INFINITY);
    std::fill(out.sum, out.sum + piece.rows, 0.0f);
    std::fill(out.o, out.o + (size_t) piece.rows * ld, 0.0f);

    Queries x;
    for (x.first = 0; x.first < piece.rows; x.first += DECODE_ROWS) {
        x.n = std::min(DECODE_ROWS, piece.rows - x.first);
        load_queries(job, piece, shape.d_k, x);
        int32_t at = 0;
        job.seq->each_segment(job.layer, piece.head, false, [&](const Segment & seg) {
            const int32_t first = std::max(piece.a - at, 0), last = std::min(piece.b - at, seg.n);
            for (int32_t c = first; c < last; c += BLOCK) {
                const Segment part{ seg.k.from(c), seg.v.from(c), std::min(BLOCK, last - c) };
                attend_block(job, piece, part, at + c, x, out);
            }
            at += seg.n;
        });
    }
    // Whoever finishes a head's last split adds them up, always in the same order.
    if (partials.done[(size_t) piece.head].fetch_add(1, std::memory_order_acq_rel) + 1 == n_splits) {
        write_out(job, piece, n_splits, partials);
    }
}

}  // namespace kvedge
