#include "attention/attention.h"

#include "attention/tile.h"
#include "kernels/kernels.h"
#include "store/store.h"
#include "kernels/softmax.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvedge {

namespace {

static_assert(sizeof(SoftmaxRow) == SEEN_BYTES, "the store makes room for it");

constexpr int32_t BLOCK     = 128;      // keys packed or widened at a time
constexpr size_t  TILE_SIZE = 1 << 18;  // floats of a tile's logits: 1 MiB, which fits one core's cache
constexpr int32_t MAX_ROWS  = 60;       // a multiple of the 4, 6 or 12 rows of a micro-kernel (not of NEON's 8)
constexpr int32_t MIN_ROWS  = 16;

int32_t tokens_per_tile(const AttendJob & job, const Scratch & scratch) {
    const LayerShape & shape = job.rows->shapes()[(size_t) job.layer];
    return std::max(1, scratch.rows / (shape.n_heads / shape.n_heads_kv));
}

size_t place(const AttendJob & job, int32_t t) { return (size_t) (job.index ? job.index[t] : t); }

void load_queries(const AttendJob & job, const Tile & tile, int32_t d_k, float * q) {
    for (int32_t r = 0; r < tile.rows; r++) {
        const int32_t t    = tile.t0 + r / tile.group;
        const int32_t head = tile.head * tile.group + r % tile.group;
        const float * from = job.q + place(job, t) * job.q_token + (size_t) head * job.q_head;
        float *       to   = q + (size_t) r * (size_t) d_k;
        for (int32_t i = 0; i < d_k; i++) {
            to[i] = from[i] * job.scale;
        }
    }
}

// Calls use(rows, n, at) for blocks of the keys or values that the tile sees: n rows from row `at` of the head on.
template <class F> void each_block(const AttendJob & job, const Tile & tile, Rows Segment::*side, const F & use) {
    int32_t at = 0;
    each_segment(*job.rows, job.layer, tile.head, [&](const Segment & seg) {
        for (int32_t c = 0; c < seg.n && at < tile.n_visible; c += BLOCK) {
            const int32_t n = std::min({ BLOCK, seg.n - c, tile.n_visible - at });
            use((seg.*side).from(c), n, at);
            at += n;
        }
    });
}

void logits(const AttendJob & job, const Tile & tile, int32_t d_k, Scratch & x) {
    each_block(job, tile, &Segment::k, [&](const Rows & k, int32_t n, int32_t at) {
        kernels().pack(k, n, d_k, x.panel);
        kernels().gemm_qk({ x.q, (size_t) d_k }, tile.rows, x.panel, n, d_k, { x.s + at, tile.stride });
    });
}

// Writes the biases of the rows that the tile sees to x.mean, which is free until add_sums. False: all are 0; nothing written.
bool load_biases(const AttendJob & job, const Tile & tile, Scratch & x) {
    bool    any = false;
    int32_t at  = 0;
    each_segment(*job.rows, job.layer, tile.head, [&](const Segment & seg) {
        if (seg.bias && !any) {
            any = true;
            std::fill(x.mean, x.mean + tile.n_visible, 0.0f);
        }
        if (seg.bias && at < tile.n_visible) {
            std::copy_n(seg.bias, std::min(seg.n, tile.n_visible - at), x.mean + at);
        }
        at += seg.n;
    });
    return any;
}

// Stores the attention of query row r to pending rows of the other modality (text or image) beside its kept query. s [n]: the row's
// logits. Overwrites x.sum, which is free until add_sums.
void keep_other(const AttendJob & job, const Tile & tile, int32_t r, const float * s, size_t n, float top, Scratch & x) {
    const auto &  modality = job.seen->modality();
    const int32_t token    = tile.t0 + r / tile.group, query_head = tile.head * tile.group + r % tile.group;
    const size_t  old      = (size_t) tile.n_keys - modality.size();  // rows that are not pending, which do not count here
    const uint8_t mine     = modality[modality.size() - (size_t) (job.n - token)];
    SoftmaxRow    other{ top };
    for (size_t at = old; at < n;) {
        const uint8_t * from = modality.data() + (at - old);
        const void *    turn = memchr(from, 1 - *from, n - at);
        const size_t    end  = turn ? at + (size_t) ((const uint8_t *) turn - from) : n;
        if (*from != mine) {
            float dot;
            std::copy(s + at, s + end, x.sum);
            other.sum += kernels().exp_dot(x.sum, end - at, top, &dot);
            other.dot += dot;
        }
        at = end;
    }
    const QuerySpan span = job.seen->queries.newest((size_t) job.layer);
    memcpy(span.row(job.rows->shapes()[(size_t) job.layer], token, query_head).seen, &other, sizeof(other));
}

// Replaces the logits s [n] of a row by e^(s - top), and returns their sums. The sum has the same bits as exp_sum's, so that the
// output does not depend on what is observed.
SoftmaxRow exp_row(const AttendJob & job, const Tile & tile, int32_t r, float * s, size_t n, float top, Scratch & x) {
    if (job.wanted.queries) {
        keep_other(job, tile, r, s, n, top, x);
    }
    SoftmaxRow all{ top };
    all.sum = kernels().exp_dot(s, n, top, &all.dot);
    return all;
}

// Stores the tile's scaled queries in half precision, for the compression at the end of the prompt.
void keep_queries(const AttendJob & job, const Tile & tile, int32_t d_k, const float * q) {
    const LayerShape & shape = job.rows->shapes()[(size_t) job.layer];
    const QuerySpan    span  = job.seen->queries.newest((size_t) job.layer);
    for (int32_t r = 0; r < tile.rows; r++) {
        const QueryRow to = span.row(shape, tile.t0 + r / tile.group, tile.head * tile.group + r % tile.group);
        kernels().from_f32(Type::f16, q + (size_t) r * (size_t) d_k, to.q, (size_t) d_k);
    }
}

void softmax(const AttendJob & job, const Tile & tile, Scratch & x) {
    const Kernels & kn      = kernels();
    const bool      biased  = load_biases(job, tile, x);
    double          entropy = 0.0;
    for (int32_t r = 0; r < tile.rows; r++) {
        float *      s = x.s + (size_t) r * tile.stride;
        const auto   n = (size_t) visible(job, tile, tile.t0 + r / tile.group);
        if (job.softcap != 0.0f) {
            kn.softcap(s, n, job.softcap);
        }
        if (biased) {
            kn.axpy(1.0f, x.mean, s, n);
        }
        float top  = kn.max(s, n);
        float sink = 0.0f;
        if (job.sinks) {
            const float logit = job.sinks[tile.head * tile.group + r % tile.group];
            top               = std::max(top, logit);
            sink              = std::exp(logit - top);
        }
        float sum;
        if (job.wanted.entropy) {
            const SoftmaxRow row = exp_row(job, tile, r, s, n, top, x);
            sum                  = row.sum;
            entropy += row.entropy(sink);
        } else {
            sum = kn.exp_sum(s, n, top);
        }
        x.len[r] = 1.0f / (sum + sink);
        std::fill(s + n, s + tile.n_visible, 0.0f);
    }
    if (job.wanted.entropy) {
        job.locks[tile.head].lock();
        job.seen->layer((size_t) job.layer).entropy[tile.head] += entropy;
        job.locks[tile.head].unlock();
    }
}

// Adds one token's attention to rows [first, last), as its mean over the group, to every column of x.columns.
void add_token(const Tile & tile, int32_t token, int32_t first, int32_t last, Scratch & x) {
    const Kernels & kn = kernels();
    const auto      n  = (size_t) (last - first);
    const auto      r  = (size_t) (token * tile.group);

    float * const sums = x.columns[column::sums] + first, * const squares = x.columns[column::squares] + first;
    if (tile.group == 1) {
        kn.add_moments(x.len[r], x.s + r * tile.stride + first, sums, squares, n);
        return;
    }
    std::fill(x.mean, x.mean + n, 0.0f);
    for (size_t g = 0; g < (size_t) tile.group; g++) {
        kn.axpy(x.len[r + g], x.s + (r + g) * tile.stride + first, x.mean, n);
    }
    kn.add_moments(1.0f / (float) tile.group, x.mean, sums, squares, n);
}

// Adds the attention of the tile's tokens (the mean over the group) to the columns of the pending rows, and with job.scored also to
// the scores of the rows before the pending ones.
void add_sums(const AttendJob & job, const Tile & tile, Scratch & x) {
    const int32_t pending = tile.n_keys - job.rows->pending_length();
    const int32_t first   = job.scored ? 0 : pending;
    const int32_t n       = tile.n_visible - pending;
    Columns &     seen    = job.seen->layer((size_t) job.layer).columns;
    const auto    summed  = [](const Bulk<double> & numbers) { return !numbers.empty(); };
    if (tile.n_visible <= first) {
        return;
    }
    for (float * numbers : x.columns) {
        std::fill(numbers + first, numbers + tile.n_visible, 0.0f);
    }
    if (std::any_of(seen.of.begin() + 1, seen.of.end(), summed)) {
        for (int32_t t = 0; t < tile.t1 - tile.t0; t++) {
            add_token(tile, t, first, tile.n_visible, x);
        }
    } else {
        for (int32_t r = 0; r < tile.rows; r++) {
            const float * s = x.s + (size_t) r * tile.stride + first;
            kernels().axpy(x.len[r] / (float) tile.group, s, x.sum + first, (size_t) (tile.n_visible - first));
        }
    }
    job.locks[tile.head].lock();
    for (size_t i = 0; i < column::count; i++) {
        double * to = summed(seen.of[i]) ? seen.of[i].data() + (size_t) tile.head * (size_t) seen.capacity : nullptr;
        for (int32_t c = 0; c < n && to; c++) {
            to[c] += (double) x.columns[i][pending + c];
        }
    }
    if (job.scored) {
        add_scores(*job.scored, job.layer, tile.head, pending, x.sum, 0, 1);
    }
    job.locks[tile.head].unlock();
}

void weigh_values(const AttendJob & job, const Tile & tile, int32_t d_v, Scratch & x) {
    const auto ld = (size_t) pad16(d_v);
    std::fill(x.o, x.o + (size_t) tile.rows * ld, 0.0f);
    each_block(job, tile, &Segment::v, [&](const Rows & v, int32_t n, int32_t at) {
        kernels().widen(v, n, d_v, x.vals, ld);
        for (int32_t i = 0; i < n; i++) {
            std::fill(x.vals + (size_t) i * ld + d_v, x.vals + (size_t) (i + 1) * ld, 0.0f);
        }
        kernels().gemm_pv({ x.s + at, tile.stride }, tile.rows, n, { x.vals, ld }, d_v, x.o);
    });
    for (int32_t r = 0; r < tile.rows; r++) {
        const int32_t t    = tile.t0 + r / tile.group;
        const int32_t head = tile.head * tile.group + r % tile.group;
        float *       to   = job.out + place(job, t) * job.out_token + (size_t) head * job.out_head;
        for (int32_t i = 0; i < d_v; i++) {
            to[i] = x.o[(size_t) r * ld + (size_t) i] * x.len[r];
        }
    }
}

}  // namespace

bool Scratch::reserve(const std::vector<LayerShape> & shapes, int32_t n_keys) {
    int32_t group = 1, d_k = 0, d_v = 0;
    for (const auto & s : shapes) {
        group = std::max(group, s.n_heads / s.n_heads_kv);
        d_k   = std::max(d_k, s.d_k);
        d_v   = std::max(d_v, pad16(s.d_v));
    }
    // gemm_qk writes whole panels, so it may write past the last key.
    s_row           = ((size_t) n_keys + 64 + 15) / 16 * 16;
    const auto fit  = (int32_t) (TILE_SIZE / s_row);
    const auto most = std::max(group, std::clamp(fit / 4 * 4, MIN_ROWS, MAX_ROWS));
    rows            = most;

    const size_t n_s = (size_t) most * s_row, n_panel = (size_t) (BLOCK + 64) * (size_t) d_k, n_vals = (size_t) BLOCK * (size_t) d_v;
    const size_t n_q = (size_t) most * (size_t) d_k, n_o = (size_t) most * (size_t) d_v, n_len = (size_t) (most + 15) / 16 * 16;
    const size_t need = (n_s + n_panel + n_vals + n_q + n_o + (column::count + 1) * s_row + n_len) * sizeof(float);
    if (memory_.size() < need) {
        memory_ = Pages();
        memory_ = Pages::take(need);
        if (!memory_) {
            return false;
        }
    }
    s     = (float *) memory_.data();
    panel = s + n_s;
    vals  = panel + n_panel;
    q     = vals + n_vals;
    o     = q + n_q;
    sum   = o + n_o;
    mean  = sum + column::count * s_row;
    len   = mean + s_row;
    for (size_t i = 0; i < column::count; i++) {
        columns[i] = sum + i * s_row;
    }
    return true;
}

void record_window(const AttendJob & job, Observed & observed, int32_t ith, int32_t nth) {
    const LayerShape & shape = job.rows->shapes()[(size_t) job.layer];
    const int32_t      next  = job.rows->n_tokens();  // token indices, because the pending rows of a stream shrink
    for (int32_t t = std::max(0, job.n - observed.have().window) + ith; t < job.n; t += nth) {
        float * to = observed.layer((size_t) job.layer).window.slot(next - job.n + t);
        for (int32_t h = 0; h < shape.n_heads; h++) {
            const float * from = job.q + place(job, t) * job.q_token + (size_t) h * job.q_head;
            for (int32_t i = 0; i < shape.d_k; i++) {
                *to++ = from[i] * job.scale;
            }
        }
    }
    if (ith == 0 && job.sinks) {
        observed.layer((size_t) job.layer).window.sinks.assign(job.sinks, job.sinks + shape.n_heads);
    }
}

int32_t prefill_tasks(const AttendJob & job, const Scratch & scratch) {
    const int32_t per_tile = tokens_per_tile(job, scratch);
    return (job.n + per_tile - 1) / per_tile * job.rows->shapes()[(size_t) job.layer].n_heads_kv;
}

void prefill_task(const AttendJob & job, int32_t task, Scratch & x) {
    const LayerShape & shape    = job.rows->shapes()[(size_t) job.layer];
    const int32_t      per_tile = tokens_per_tile(job, x);
    const int32_t      n_tiles  = (job.n + per_tile - 1) / per_tile;

    Tile tile;
    tile.head  = task % shape.n_heads_kv;
    tile.t0    = (n_tiles - 1 - task / shape.n_heads_kv) * per_tile;  // the longest tiles first
    tile.t1    = std::min(job.n, tile.t0 + per_tile);
    tile.group = shape.n_heads / shape.n_heads_kv;
    tile.rows  = (tile.t1 - tile.t0) * tile.group;

    tile.n_keys    = job.rows->head_length(job.layer, tile.head);
    tile.before    = tile.n_keys - job.n;
    tile.n_visible = visible(job, tile, tile.t1 - 1);
    tile.stride    = x.s_row;

    load_queries(job, tile, shape.d_k, x.q);
    logits(job, tile, shape.d_k, x);
    const bool within = job.wanted.peaks && job.replay && job.replay->within;
    if (within) {
        add_chunk_peaks(job, tile, x);
    }
    softmax(job, tile, x);
    if (job.wanted.queries) {
        keep_queries(job, tile, shape.d_k, x.q);
    }
    if (job.wanted.sums()) {
        add_sums(job, tile, x);
    }
    if (job.wanted.peaks && !within) {
        add_peaks(job, tile, x);
    }
    weigh_values(job, tile, shape.d_v, x);
}

}  // namespace kvedge
