#include "attention/attention.h"

#include "kernels/kernels.h"
#include "kernels/kernels_compiler.h"
#include "store/store.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

constexpr int32_t BLOCK      = 128;  // most keys per block
constexpr size_t  KEY_BYTES  = 8 << 10;  // bytes of the keys (or values) of a block: two blocks fit the first-level cache
constexpr size_t  Q8_BYTES   = 18 << 10;  // the same for 8-bit codes and several query rows, which are rounded again for each block
constexpr int32_t Q8_ROWS    = 16;        // most query rows with small blocks (KEY_BYTES, Q8_BYTES); more rows use BLOCK keys
constexpr int32_t ROWS       = 64;        // most query rows at a time
constexpr int32_t Q_SIZE     = 8 << 10;   // most numbers of these query rows
constexpr int32_t SPLIT_KEYS = 256;  // fewest keys of a split

// The result over some of the keys, for each query row.
struct Partial {
    float * top;  // [rows] largest logit
    float * sum;  // [rows] softmax denominator relative to `top`
    float * o;    // [rows][ld] unnormalised output
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

// Up to ROWS scaled query rows, for which the keys are read once from memory. For rotated keys, the queries are rotated, too. The
// sums of rotated values stay rotated until values of another rotation follow (rotate_sums).
struct Queries {
    alignas(64) float q[Q_SIZE];        // [n][d_k]
    alignas(64) float rotated[Q_SIZE];  // [n][d_k] rotated with stretch query_rotation
    int32_t           first, n;                      // rows [first, first + n) of the piece
    int32_t           query_rotation, sum_rotation;  // stretch of the rotation of `rotated` and of the sums (rows/types.h); 0: not rotated
    int32_t           rows_if_alone;  // query rows at a time if each token came alone (AttendJob::as_alone); 0: as_alone is false
    int32_t           part_first, rows;  // rows [part_first, part_first + rows) of the n rows, which are multiplied at once
};

void load_queries(const AttendJob & job, const Piece & piece, int32_t d_k, Queries & x) {
    x.query_rotation = x.sum_rotation = 0;
    for (int32_t i = 0; i < x.n; i++) {
        const int32_t r    = x.first + i;
        const auto    t    = (size_t) (job.index ? job.index[r / piece.group] : r / piece.group);
        const float * from = job.q + t * job.q_token + (size_t) (piece.head * piece.group + r % piece.group) * job.q_head;
        for (int32_t c = 0; c < d_k; c++) {
            x.q[(size_t) i * (size_t) d_k + (size_t) c] = from[c] * job.scale;
        }
    }
}

// Returns the queries [n][d_k] for keys of a type, rotated if the keys are.
const float * queries_for(Type keys, int32_t d_k, Queries & x) {
    const int32_t by = rotation(keys, d_k);
    if (by != 0 && by != x.query_rotation) {
        std::copy_n(x.q, (size_t) x.n * (size_t) d_k, x.rotated);
        kernels().rotate({ x.rotated, (size_t) d_k }, x.n, d_k, by);
        x.query_rotation = by;
    }
    return by != 0 ? x.rotated : x.q;
}

// Changes the rotation of the sums so far to the stretch `by`, so that values with this rotation can be added. o: first row.
void rotate_sums(int32_t by, int32_t d_v, Queries & x, FloatOut o) {
    if (by == x.sum_rotation) {
        return;
    }
    for (int32_t each : { x.sum_rotation, by }) {
        if (each != 0) {
            kernels().rotate(o, x.n, d_v, each);
        }
    }
    x.sum_rotation = by;
}

Rows as_stored(Rows rows) {
    rows.type = unrotated(rows.type);
    return rows;
}

float * weights_of(const AttendJob & job, const Piece & piece, int32_t r) {
    return job.weights + (size_t) (piece.head * piece.group + r) * job.weights_row;
}

// Returns how many of n query rows to load at a time: parts of about equal size, multiples of `whole` rows.
int32_t rows_at_a_time(int32_t n, int32_t d_k, int32_t whole) {
    const int32_t most = std::min(ROWS, Q_SIZE / d_k) / whole * whole, parts = (n + most - 1) / most;
    return ((n + parts - 1) / parts + whole - 1) / whole * whole;
}

// Returns how many query rows to multiply with a block at once. For as_alone, the bits must not depend on other tokens' rows: with
// plain keys and values they never do, with quantised ones the product must have the rows of one token only.
int32_t rows_of_product(const Segment & seg, const Queries & x) {
    return x.rows_if_alone > 0 && (is_quantised(seg.k.type) || is_quantised(seg.v.type)) ? x.rows_if_alone : x.n;
}

// Returns the number of keys per block, a multiple of GROUP.
int32_t block_of(const Segment & seg, int32_t n_rows) {
    if (n_rows > Q8_ROWS || (n_rows > kernels().few && !is_quantised(seg.k.type))) {
        return BLOCK;
    }
    const bool rounds = n_rows > 1 && format(seg.k.type).bits == 8 && format(seg.v.type).bits == 8;
    const auto fit    = (int32_t) ((rounds ? Q8_BYTES : KEY_BYTES) / std::max(seg.k.stride, seg.v.stride));
    return std::clamp(fit / GROUP * GROUP, GROUP, BLOCK);
}

// Completes the logits `row` of query row r over the first n keys of seg, which it sees: softcap, bias, and a copy to job.weights if
// wanted. at: index of seg's first key in the head. Sets the other keys of seg to 0.
void prepare_row(const AttendJob & job, const Piece & piece, int32_t r, int32_t at, int32_t n, const Segment & seg, float * row) {
    if (job.softcap != 0.0f) {
        kernels().softcap(row, (size_t) n, job.softcap);
    }
    if (seg.bias) {
        kernels().axpy(1.0f, seg.bias, row, (size_t) n);
    }
    if (job.weights) {
        std::copy_n(row, n, weights_of(job, piece, r) + at);
    }
    std::fill(row + n, row + seg.n, 0.0f);
}

// Prefetches the keys of a first block. Later blocks are prefetched by the block before them.
void fetch_keys(const Rows & k, int32_t n) {
    constexpr size_t LINE = 64;
    for (size_t at = 0; at < (size_t) n * k.stride; at += LINE) {
        KVEDGE_PREFETCH(k.data + at);
    }
}

// Returns how many keys of seg the token of query row r sees. at: index of seg's first key in the head.
int32_t seen_of(const AttendJob & job, const Piece & piece, int32_t r, int32_t at, const Segment & seg) {
    const int32_t sees = job.causal ? piece.n_keys - job.n + r / piece.group + 1 : piece.n_keys;
    return std::clamp(sees - at, 0, seg.n);
}

// Adds seg (at most BLOCK rows, from row `at` of the head on) to the partial results of the rows [part_first, part_first + rows) of x.
// next: keys of the next block, to prefetch; or NULL.
void attend_part(
    const AttendJob & job, const Piece & piece, const Segment & seg, int32_t at, Queries & x, const uint8_t * next, Partial & out) {
    const LayerShape & shape = job.rows->shapes()[(size_t) job.layer];
    const Kernels &    kn    = kernels();
    const auto         ld    = (size_t) pad16(shape.d_v);
    const int32_t      first = x.first + x.part_first;
    alignas(64) float  s[ROWS * BLOCK];

    const FloatIn q = { queries_for(seg.k.type, shape.d_k, x), (size_t) shape.d_k };
    kn.rows_dot(q.at(x.part_first), x.rows, as_stored(seg.k), seg.n, shape.d_k, { s, BLOCK }, x.part_first == 0 ? seg.v.data : nullptr);
    for (int32_t j = 0, alike; j < x.rows; j += alike) {  // groups of rows that see the same keys
        const int32_t r = first + j, sees = seen_of(job, piece, r, at, seg);
        for (alike = 0; j + alike < x.rows && seen_of(job, piece, r + alike, at, seg) == sees; alike++) {
            prepare_row(job, piece, r + alike, at, sees, seg, s + (size_t) (j + alike) * BLOCK);
        }
        kn.softmax_step(s + (size_t) j * BLOCK, BLOCK, alike, sees, { out.top + r, out.sum + r, out.o + (size_t) r * ld, ld });
    }
    const FloatOut o = { out.o + (size_t) first * ld, ld };
    kn.rows_axpy({ s, BLOCK }, x.rows, as_stored(seg.v), seg.n, shape.d_v, o, x.part_first == 0 ? next : nullptr);
}

// Adds seg to the partial results of all rows of x, part by part.
void attend_block(
    const AttendJob & job, const Piece & piece, const Segment & seg, int32_t at, Queries & x, const uint8_t * next, Partial & out) {
    const int32_t d_v = job.rows->shapes()[(size_t) job.layer].d_v, most = rows_of_product(seg, x);
    const auto    ld  = (size_t) pad16(d_v);
    rotate_sums(rotation(seg.v.type, d_v), d_v, x, { out.o + (size_t) x.first * ld, ld });
    for (x.part_first = 0; x.part_first < x.n; x.part_first += most) {
        x.rows             = std::min(most, x.n - x.part_first);
        const int32_t sees = seen_of(job, piece, x.first + x.part_first + x.rows - 1, at, seg);
        if (sees > 0) {
            attend_part(job, piece, seg.part(0, sees), at, x, next, out);
        }
    }
}

// Adds a single token's attention to the column sums of the pending rows. Without a lock: only one task calls write_out for a head.
void add_sums(const AttendJob & job, const Piece & piece) {
    const int32_t n     = job.rows->pending_length();
    Columns &     seen  = job.seen->layer((size_t) job.layer).columns;
    double *      sums  = seen.sums().data() + (size_t) piece.head * (size_t) seen.capacity;
    const float * paid  = weights_of(job, piece, 0) + (piece.n_keys - n);
    for (int32_t r = 0; r < n; r++) {
        double sum = 0.0;
        for (int32_t g = 0; g < piece.group; g++) {
            sum += (double) paid[(size_t) g * job.weights_row + (size_t) r];
        }
        sums[r] += sum / piece.group;
    }
}

void write_out(const AttendJob & job, const Piece & piece, int32_t n_splits, DecodePartials & partials) {
    const LayerShape & shape = job.rows->shapes()[(size_t) job.layer];
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
        if (job.weights) {  // they still hold logits
            float * weights = weights_of(job, piece, r);
            kernels().exp_sum(weights, (size_t) piece.n_keys, top);
            std::transform(weights, weights + piece.n_keys, weights, [total](float x) { return x / total; });
        }
    }
    if (job.wanted.sums() && job.weights && job.n == 1) {
        add_sums(job, piece);
    }
    if (job.scored) {
        add_scores(*job.scored, job.layer, piece.head, piece.n_keys, weights_of(job, piece, 0), job.weights_row, piece.group);
    }
}

// Returns the largest number of splits of a head; 1 if the heads alone occupy all threads.
int32_t most_splits(int32_t n_heads_kv, int32_t n_threads) {
    return n_threads <= 1 || n_heads_kv % n_threads == 0 ? 1 : (4 * n_threads + n_heads_kv - 1) / n_heads_kv;
}

}  // namespace

bool DecodePartials::reserve(const std::vector<LayerShape> & shapes, int32_t n_tokens, int32_t n_threads) try {
    size_t  need  = 0;
    int32_t heads = 1;
    splits_max    = 1;
    for (const auto & s : shapes) {
        splits_max = std::max(splits_max, most_splits(s.n_heads_kv, n_threads));
    }
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
    const LayerShape & shape = job.rows->shapes()[(size_t) job.layer];
    return std::clamp(job.rows->head_length(job.layer, 0) / SPLIT_KEYS, 1, most_splits(shape.n_heads_kv, n_threads));
}

int32_t decode_tasks(const AttendJob & job, int32_t n_splits) {
    return job.rows->shapes()[(size_t) job.layer].n_heads_kv * n_splits;
}

// Computes the partial results of a piece. Loads some query rows at a time, and adds all blocks of keys to them.
static void attend_piece(const AttendJob & job, const Piece & piece, Queries & x, Partial & out) {
    const LayerShape & shape = job.rows->shapes()[(size_t) job.layer];
    const auto         ld    = (size_t) pad16(shape.d_v);
    x.rows_if_alone          = job.as_alone ? rows_at_a_time(piece.group, shape.d_k, 1) : 0;
    const int32_t most       = rows_at_a_time(piece.rows, shape.d_k, std::max(x.rows_if_alone, 1));
    for (x.first = 0; x.first < piece.rows; x.first += most) {
        x.n = std::min(most, piece.rows - x.first);
        load_queries(job, piece, shape.d_k, x);
        int32_t at = 0;
        each_segment(*job.rows, job.layer, piece.head, [&](const Segment & seg) {
            const int32_t first = std::max(piece.a - at, 0), last = std::min(piece.b - at, seg.n);
            const int32_t block = block_of(seg, job.as_alone ? x.rows_if_alone : x.n);
            for (int32_t c = first; c < last; c += block) {
                const Segment part = seg.part(c, std::min(block, last - c));
                if (c == first) {
                    fetch_keys(part.k, part.n);
                }
                attend_block(job, piece, part, at + c, x, c + block < last ? seg.k.from(c + block).data : nullptr, out);
            }
            at += seg.n;
        });
        rotate_sums(0, shape.d_v, x, { out.o + (size_t) x.first * ld, ld });
    }
}

void decode_task(const AttendJob & job, int32_t task, int32_t n_splits, DecodePartials & partials) {
    const LayerShape & shape = job.rows->shapes()[(size_t) job.layer];
    Piece              piece;
    piece.head          = task / n_splits;
    piece.group         = shape.n_heads / shape.n_heads_kv;
    piece.rows          = job.n * piece.group;
    piece.n_keys        = job.rows->head_length(job.layer, piece.head);
    const int32_t split = task % n_splits;
    piece.a             = (int32_t) ((int64_t) piece.n_keys * split / n_splits);
    piece.b             = (int32_t) ((int64_t) piece.n_keys * (split + 1) / n_splits);

    const auto ld  = (size_t) pad16(shape.d_v);
    Partial    out = partial_at(partials, piece.head, split, piece.rows, shape.d_v);
    std::fill(out.top, out.top + piece.rows, -INFINITY);
    std::fill(out.sum, out.sum + piece.rows, 0.0f);
    std::fill(out.o, out.o + (size_t) piece.rows * ld, 0.0f);

    Queries x;
    attend_piece(job, piece, x, out);
    // The task that finishes a head's last split adds up all splits, always in the same order.
    if (partials.done[(size_t) piece.head].fetch_add(1, std::memory_order_acq_rel) + 1 == n_splits) {
        write_out(job, piece, n_splits, partials);
    }
}

}  // namespace kvedge
