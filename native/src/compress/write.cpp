// Writes the kept rows to the blocks that replace the pending blocks.

#include "kernels/kernels.h"
#include "compress/job.h"
#include "compress/select.h"
#include "system/threads.h"
#include "primitives/merge.h"
#include "kernels/widen.h"

#include <algorithm>
#include <functional>
#include <iterator>

namespace kvedge {

namespace {

// Returns how many of a head's n kept rows go to the main block; the others go to the tail block. The main block gets all rows, or
// with KIVI only full groups whose keys and values are all quantised.
int32_t main_rows(const Storage & storage, int32_t n) {
    const int32_t stored = std::min(stored_keys(storage, n), stored_values(storage, n));
    return stored == n ? n : stored - stored % GROUP;
}

bool gives_biases(const kvedge_plan & plan) {
    return plan.reducer->biases && plan.reducer->biases(plan.params[KVEDGE_STAGE_REDUCER]);
}

// Writes the biases of all rows of the segments to out; 0 for rows without a bias.
void read_biases(const std::vector<Segment> & rows, float * out) {
    for (const Segment & seg : rows) {
        if (seg.bias) {
            std::copy_n(seg.bias, seg.n, out);
        } else {
            std::fill_n(out, seg.n, 0.0f);
        }
        out += seg.n;
    }
}

// Returns the biases [n_kept] of a head's kept rows. Empty: the rows have no biases, and the reducer gives none.
std::vector<float> kept_biases(const Job & job, size_t l, size_t h, bool reduces) {
    const auto &       rows = job.out.sources[l][h];
    const auto &       kept = job.kept[l][h];
    std::vector<float> out;
    if (std::any_of(rows.begin(), rows.end(), [](const Segment & seg) { return seg.bias != nullptr; })) {
        std::vector<float> all((size_t) job.pending.n);
        read_biases(rows, all.data());
        std::transform(kept.begin(), kept.end(), std::back_inserter(out), [&](int32_t row) { return all[(size_t) row]; });
    } else if (reduces && gives_biases(job.plan)) {
        out.resize(kept.size());
    }
    return out;
}

// Fills the list of a head in one block (main or tail) with its kept rows [first, last), and returns the numbers of its rows.
// biases: the result of kept_biases.
StoredRows plan_head(
    const Job & job, size_t l, size_t h, int32_t first, int32_t last, const std::vector<float> & biases, HeadList & head) {
    const Storage & storage = job.seq.rows.storage();
    const auto &    kept    = job.kept[l][h];
    const auto      n       = (int32_t) kept.size();
    head.tokens.reserve((size_t) (last - first));
    for (int32_t i = first; i < last; i++) {
        head.tokens.push_back(job.pending.tokens_of(l, h)[kept[(size_t) i]]);
    }
    if (job.scored) {
        const Columns &    cs   = job.seq.observed.layer(l).columns;
        const double *     sums = cs.sums().data() + h * (size_t) cs.capacity;
        head.scores.reserve((size_t) (last - first) + 1);
        for (int32_t i = first; i < last; i++) {
            head.scores.push_back(sums[kept[(size_t) i]]);
        }
    }
    if (!biases.empty()) {
        head.biases.assign(biases.begin() + first, biases.begin() + last);
    }
    return { last - first, std::min(last, stored_keys(storage, n)) - first, std::min(last, stored_values(storage, n)) - first };
}

// Writes the kept rows [first, first + n) of a head to the main or the tail block. n <= GROUP; first is a multiple of GROUP.
void store_rows(Job & job, int32_t l, int32_t h, int32_t first, int32_t n, const float * k, const float * v) {
    const int32_t split = main_rows(job.seq.rows.storage(), (int32_t) job.kept[(size_t) l][(size_t) h].size());
    Block &       to    = first < split ? *job.out.main : *job.out.tail;
    write_rows(to.layers[(size_t) l].rows, h, first < split ? first : first - split, n, k, v);
}

void quantise_rows(Job & job, int32_t l, int32_t h, int32_t worker) {
    const auto &  kept = job.kept[(size_t) l][(size_t) h];
    const auto    dk = (size_t) job.seq.rows.shapes()[(size_t) l].d_k, dv = (size_t) job.seq.rows.shapes()[(size_t) l].d_v;
    const auto    n    = (int32_t) kept.size();
    float * const k    = job.out.rows[(size_t) worker].data();
    float * const v    = k + GROUP * dk;
    int32_t       next = 0, at = 0;
    for (const Segment & seg : job.out.sources[(size_t) l][(size_t) h]) {
        for (; next < n && kept[(size_t) next] < at + seg.n;) {
            const int32_t r = kept[(size_t) next] - at, slot = next % GROUP;
            kernels().widen(seg.k.from(r), 1, (int32_t) dk, k + (size_t) slot * dk, dk);
            kernels().widen(seg.v.from(r), 1, (int32_t) dv, v + (size_t) slot * dv, dv);
            if (++next == n || next % GROUP == 0) {
                store_rows(job, l, h, next - slot - 1, slot + 1, k, v);
            }
        }
        at += seg.n;
    }
}

// Returns the number of kept rows of a head that are not protected.
int32_t free_rows(const Job & job, size_t l, size_t h) {
    const Protection p    = fit_protection(job.plan, job.pending.n, job.counts[l][h]);
    const auto &     kept = job.kept[l][h];
    return (int32_t) std::count_if(kept.begin(), kept.end(), [&](int32_t row) { return row >= p.sinks && row < job.pending.n - p.recent; });
}

// Returns how many tokens give queries to a head's reducer. Each token gives one query per query head of the group.
int32_t query_tokens(const Job & job, size_t l, size_t h) {
    if (!job.plan.reducer->queries || job.fit.places.empty()) {
        return 0;
    }
    const LayerShape & shape = job.seq.rows.shapes()[l];
    const int32_t      group = shape.n_heads / shape.n_heads_kv;
    const int32_t      asked = job.plan.reducer->queries(job.plan.params[KVEDGE_STAGE_REDUCER], free_rows(job, l, h));
    return std::min((int32_t) job.fit.places.size(), (asked + group - 1) / group);
}

// Returns the number of threads for each KV head of a layer; more than 1 if there are more threads than heads.
int32_t threads_of_head(const Job & job, size_t l) { return std::max(1, job.n_threads / job.seq.rows.shapes()[l].n_heads_kv); }

// Returns the sizes for a head's reducer. Counts the heads with too few queries in job.fit.
ReduceSize size_up(Job & job, size_t l, size_t h) {
    const LayerShape & shape = job.seq.rows.shapes()[l];
    const auto         n     = (int32_t) job.kept[l][h].size();
    const int32_t      n_q   = query_tokens(job, l, h) * (shape.n_heads / shape.n_heads_kv);
    if (const int32_t n_free = free_rows(job, l, h); job.plan.reducer->queries && n < job.pending.n) {
        job.fit.unfitted += n_q < n_free ? 1 : 0;
        job.fit.scant += n_q >= n_free && n_q / 2 < n_free ? 1 : 0;
    }
    return { job.pending.n, n, shape.d_k, shape.d_v, n_q, threads_of_head(job, l) };
}

// Returns the floats of working memory that reduce_rows needs, without the reducer's scratch.
size_t reduce_floats(const ReduceSize & size, bool biased) {
    return (size_t) (size.n_tokens + size.n_kept) * (size_t) (size.d_k + size.d_v + (biased ? 1 : 0)) +
           (size_t) size.n_queries * (size_t) size.d_k;
}

// Writes the queries of n tokens to out [n * group][d_k]. Half are of the last tokens, because an answer's queries are similar to
// them; the others are of evenly spaced tokens before.
void read_queries(const Job & job, size_t l, int32_t head, int32_t n, float * out) {
    const LayerShape & shape = job.seq.rows.shapes()[l];
    const int32_t      group = shape.n_heads / shape.n_heads_kv;
    const auto    all  = (int64_t) job.fit.places.size();
    const int64_t last = n / 2, spread = n - last;
    for (int64_t i = 0; i < n; i++) {
        const auto         at    = (size_t) (i < spread ? (2 * i + 1) * (all - last) / (2 * spread) : all - n + i);
        const QueryPlace & place = job.fit.places[at];
        for (int32_t g = 0; g < group; g++, out += shape.d_k) {
            const QueryRow row = job.fit.spans[l][place.span].row(shape, place.at, head * group + g);
            kernels().to_f32(Type::f16, row.q, out, (size_t) shape.d_k);
        }
    }
}

// Copies the biases of a head's kept rows to its lists in the main and tail blocks, if the lists have biases.
void store_biases(Job & job, int32_t l, int32_t h, const float * from) {
    for (Block * block : { job.out.main.get(), job.out.tail.get() }) {
        auto & to = block->layers[(size_t) l].heads[(size_t) h].biases;
        std::copy_n(from, to.size(), to.begin());
        from += to.size();
    }
}

void reduce_rows(Job & job, int32_t l, int32_t h, int32_t worker) {
    const LayerShape & shape = job.seq.rows.shapes()[(size_t) l];
    const auto &       kept  = job.kept[(size_t) l][(size_t) h];
    const auto         dk = (size_t) shape.d_k, dv = (size_t) shape.d_v, n = (size_t) job.pending.n;
    float *            rows = job.out.rows[(size_t) worker].data();
    float *            rk = rows, *rv = rk + n * dk, *ok = rv + n * dv, *ov = ok + kept.size() * dk;
    const auto &       from    = job.out.sources[(size_t) l][(size_t) h];
    const bool         biased  = job.out.main->layers[(size_t) l].biases(h) || job.out.tail->layers[(size_t) l].biases(h);
    float *            bias    = ov + kept.size() * dv, *ob = bias + (biased ? n : 0);
    float *            q       = ob + (biased ? kept.size() : 0);
    const int32_t      n_asked = query_tokens(job, (size_t) l, (size_t) h), n_q = n_asked * (shape.n_heads / shape.n_heads_kv);
    float *            scratch = q + (size_t) n_q * dk;

    if (biased) {
        read_biases(from, bias);
        std::transform(kept.begin(), kept.end(), ob, [bias](int32_t row) { return bias[row]; });
    }
    widen_rows(from, shape, rk, rv);
    read_queries(job, (size_t) l, h, n_asked, q);
    const Protection p     = fit_protection(job.plan, job.pending.n, job.counts[(size_t) l][(size_t) h]);
    const Storage    plain = job.seq.rows.storage().plain();
    job.plan.reducer->reduce({ job.pending.n, shape.d_k, shape.d_v, rk, rv, kept.data(), (int32_t) kept.size(), p.sinks, p.recent,
                               job.plan.params[KVEDGE_STAGE_REDUCER], scratch, l, (int32_t) job.seq.rows.shapes().size(), h,
                               plain.k == Type::f16 ? plain.k : plain.v, job.plan.reducer, biased ? bias : nullptr, n_q > 0 ? q : nullptr, n_q,
                               shape.softcap, threads_of_head(job, (size_t) l) },
                             { ok, ov, biased ? ob : nullptr });
    store_biases(job, l, h, ob);
    for (size_t r = 0; r < kept.size(); r += GROUP) {
        store_rows(job, l, h, (int32_t) r, (int32_t) std::min(kept.size() - r, (size_t) GROUP), ok + r * dk, ov + r * dv);
    }
}

}  // namespace

void open_blocks(Job & job) {
    for (auto * block : { &job.out.main, &job.out.tail }) {
        *block         = std::make_unique<Block>();
        (*block)->kind = BlockKind::ragged;
        (*block)->layers.resize(job.seq.rows.shapes().size());
    }
    job.out.tail->kind = BlockKind::open;
    reserve_blocks(job.seq.rows);
}

bool open_layer(Job & job, size_t l, bool reduces, int32_t n_workers) {
    const LayerShape & shape  = job.seq.rows.shapes()[l];
    size_t             widest = GROUP * (size_t) (shape.d_k + shape.d_v);
    job.out.main->layers[l].heads.resize((size_t) shape.n_heads_kv);
    job.out.tail->layers[l].heads.resize((size_t) shape.n_heads_kv);
    job.out.sources[l].clear();
    job.fit.spans[l] = job.fit.places.empty() ? std::vector<QuerySpan>() : job.seq.observed.queries.of(l);
    std::vector<StoredRows> stored[2];
    for (size_t h = 0; h < (size_t) shape.n_heads_kv; h++) {
        const auto    n     = (int32_t) job.kept[l][h].size();
        const int32_t split = main_rows(job.seq.rows.storage(), n);
        job.out.sources[l].push_back(job.seq.rows.view((int32_t) l, (int32_t) h).pending);  // for rows on a device, only biases are valid
        const auto biases = kept_biases(job, l, h, reduces);
        stored[0].push_back(plan_head(job, l, h, 0, split, biases, job.out.main->layers[l].heads[h]));
        stored[1].push_back(plan_head(job, l, h, split, n, biases, job.out.tail->layers[l].heads[h]));
        if (reduces && !on_device(job, l)) {
            const ReduceSize size = size_up(job, l, h);
            widest                = std::max(widest, reduce_floats(size, !biases.empty()) + job.plan.reducer->scratch(size));
        }
    }
    for (auto * block : { job.out.main.get(), job.out.tail.get() }) {
        BlockLayer & layer = block->layers[l];
        layer.rows = LayerRows(shape, job.seq.rows.storage(), stored[block == job.out.tail.get()]);
        if (!on_device(job, l) && !layer.rows.take()) {
            return false;
        }
    }
    if (!on_device(job, l) && (reduces || job.rounds())) {
        job.out.rows.resize(std::max(job.out.rows.size(), (size_t) n_workers));
        for (auto & rows : job.out.rows) {
            if (rows.size() < widest) {
                rows = {};  // frees the old memory before it takes the new
                rows.resize(widest);
            }
        }
    }
    return true;
}

DeviceRows::Outcome compress_on_devices(Job & job, bool reduces, bool dropping) {
    const auto &                                 shapes = job.seq.rows.shapes();
    std::vector<std::vector<std::vector<float>>> before(shapes.size()), after(shapes.size());
    CompressJob                                  request{ job.kept, job.pending.n };
    request.storage  = job.seq.rows.storage();
    request.dropping = dropping;
    const MergeRule rule = reduces ? job.plan.reducer->merges(job.plan.params[KVEDGE_STAGE_REDUCER]) : MergeRule();
    request.rule         = reduces ? &rule : nullptr;
    for (size_t l = 0; l < shapes.size(); l++) {
        for (size_t h = 0; on_device(job, l) && h < job.out.sources[l].size(); h++) {
            const auto & rows   = job.out.sources[l][h];
            const bool   biased = std::any_of(rows.begin(), rows.end(), [](const Segment & seg) { return seg.bias != nullptr; });
            before[l].emplace_back(biased ? (size_t) job.pending.n : 0);
            if (biased) {
                read_biases(rows, before[l].back().data());
            }
        }
        after[l].resize(before[l].size());
    }
    request.biases     = &before;
    request.out        = &after;
    const auto outcome = job.device_rows->compress(request);
    for (size_t l = 0; outcome == DeviceRows::Outcome::done && l < after.size(); l++) {
        for (size_t h = 0; h < after[l].size(); h++) {
            if (!after[l][h].empty()) {
                store_biases(job, (int32_t) l, (int32_t) h, after[l][h].data());
            }
        }
    }
    return outcome;
}

void fill_layer(Job & job, size_t l, bool reduces, int32_t n_threads) {
    const bool rounds = job.rounds();
    const auto fill   = [&](int32_t h, int32_t worker) {
        if (reduces) {
            reduce_rows(job, (int32_t) l, h, worker);
        } else if (rounds) {
            quantise_rows(job, (int32_t) l, h, worker);
        } else {
            gather_rows(job.out.main->layers[l].rows, h, job.kept[l][(size_t) h], job.out.sources[l][(size_t) h]);
        }
    };
    parallel_for(n_threads, job.seq.rows.shapes()[l].n_heads_kv, std::ref(fill));  // std::function allocates nothing for a reference
}

}  // namespace kvedge
