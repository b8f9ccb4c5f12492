#include "core/compress.h"

#include "core/custom.h"
#include "core/error.h"
#include "core/observe.h"
#include "core/select.h"
#include "core/threads.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <numeric>

namespace kvedge {

namespace {

struct Job {
    Sequence &           seq;
    const kvedge_plan &  plan;
    int32_t              n_threads;
    int32_t              n_tokens;  // T, pending
    bool                 scored;    // the decode policy goes on from the column sums
    std::vector<int32_t> tokens;    // [T] token index of each pending row
    std::vector<uint8_t> image;     // [T]

    // The ragged blocks that replace the pending ones: rows that are stored whole, and KIVI's newest with their residual.
    std::unique_ptr<Block>                         main, tail;
    std::vector<std::vector<int32_t>>              counts;  // [layer][head] KV pairs that the allocator grants
    std::vector<std::vector<std::vector<int32_t>>> kept;    // [layer][head] pending rows that stay
    std::vector<std::vector<float>>                rows;    // [worker] keys and values of one head, and the reducer's scratch
};

// The window's queries in the order of their tokens, [n][H][d_k].
std::vector<float> unroll(const Sequence & seq, size_t l, int32_t n) {
    const LayerShape & shape  = seq.shapes()[l];
    const size_t       row    = (size_t) shape.n_heads * (size_t) shape.d_k;
    const int32_t      length = seq.pending_length();
    std::vector<float> out((size_t) n * row);
    for (int32_t i = 0; i < n; i++) {
        const auto slot = (size_t) ((length - n + i) % seq.window_size);
        std::copy_n(seq.windows[l].q.begin() + (std::ptrdiff_t) (slot * row), row, out.begin() + (std::ptrdiff_t) ((size_t) i * row));
    }
    return out;
}

// [T] 1 for an image token. tokens: the indices of the pending ones.
std::vector<uint8_t> pending_image(const Sequence & seq, const std::vector<int32_t> & tokens) {
    std::vector<uint8_t> image;
    image.reserve(tokens.size());
    for (int32_t t : tokens) {
        image.push_back(seq.image[(size_t) t]);
    }
    return image;
}

using ScoreFunction = void (*)(const ScoreInput & in, float * out);

void score_layer(
    const Sequence & seq, const kvedge_plan & plan, const uint8_t * image, int32_t n_tokens, size_t l, ScoreFunction score,
    std::vector<float> & scores, Spectrum * spectrum) {
    ScoreInput in{};
    in.seq      = &seq;
    in.layer    = (int32_t) l;
    in.n_tokens = n_tokens;
    in.params   = plan.params[KVEDGE_STAGE_SCORER];
    in.image    = image;
    in.self     = plan.scorer;
    in.spectrum = spectrum;
    if (!seq.sums.empty()) {
        in.column_sums   = seq.sums[l].sums.data();
        in.sums_capacity = seq.sums[l].capacity;
        in.column_squares = seq.sums[l].squares.data();
        in.seen           = seq.seen.data();
    }
    std::vector<float> window;
    if (!seq.windows.empty()) {
        in.n_window = std::min(seq.window_size, n_tokens - seq.window_from);
        window      = unroll(seq, l, in.n_window);
        in.window_q = window.data();
        in.sinks    = seq.windows[l].sinks.empty() ? nullptr : seq.windows[l].sinks.data();
    }
    scores.resize((size_t) seq.shapes()[l].n_heads_kv * (size_t) n_tokens);
    score(in, scores.data());
}

using Scores = std::vector<std::vector<float>>;  // [layer][Hkv * T]

Scores score_all(const Job & job, ScoreFunction score, std::vector<Spectrum> * spectra = nullptr) {
    Scores        out(score ? job.seq.shapes().size() : 0);
    const int32_t n_threads = own_thread_only(*job.plan.scorer) ? 1 : job.n_threads;
    parallel_for(n_threads, (int32_t) out.size(), [&](int32_t l, int32_t) {
        score_layer(job.seq, job.plan, job.image.data(), job.n_tokens, (size_t) l, score, out[(size_t) l],
                    spectra ? &(*spectra)[(size_t) l] : nullptr);
    });
    return out;
}

// The allocator's budgets of every head.
void allocate(Job & job, int32_t budget, const Scores & scores, const std::vector<Spectrum> & spectra) {
    const kvedge_plan & plan      = job.plan;
    const double *      params    = plan.params[KVEDGE_STAGE_ALLOCATOR];
    const uint32_t      wants     = plan.allocator->wants ? plan.allocator->wants(params) : 0;
    const Scores        attention = score_all(job, wants & WANTS_ATTENTION ? plan.scorer->attention : nullptr);
    const int32_t       recent    = std::min(budget, plan_recent(plan, job.n_tokens, budget));
    AllocateInput       in{};
    in.n_tokens     = job.n_tokens;
    in.budget       = budget;
    in.recent       = recent;
    in.scores       = &scores;
    in.seq          = &job.seq;
    in.n_threads    = job.n_threads;
    in.params       = params;
    in.image        = job.image.data();
    in.self         = plan.allocator;
    in.profile      = plan.profiles[KVEDGE_STAGE_ALLOCATOR].get();
    in.spectra      = &spectra;
    in.fixed_recent = plan.recent_auto ? 0 : recent;
    in.attention    = attention.empty() ? nullptr : &attention;
    plan.allocator->allocate(in, job.counts);
}

// Scores of every layer, budgets of every head, and the rows that stay. No row is touched yet.
void select_all(Job & job, Compression & outcome) {
    const auto &  shapes = job.seq.shapes();
    const auto    T      = (size_t) job.n_tokens;
    const int32_t budget = kvedge_plan_budget(&job.plan, job.n_tokens);
    std::vector<Spectrum> spectra(shapes.size());
    outcome.scores       = score_all(job, job.plan.scorer->score, &spectra);
    const Scores reserve = score_all(job, job.plan.scorer->reserve);

    auto & counts = job.counts;
    counts.resize(shapes.size());
    for (size_t l = 0; l < shapes.size(); l++) {
        counts[l].assign((size_t) shapes[l].n_heads_kv, job.n_tokens);
    }
    if (budget < job.n_tokens) {
        allocate(job, budget, outcome.scores, spectra);
    }
    job.kept.resize(shapes.size());
    parallel_for(job.n_threads, (int32_t) shapes.size(), [&](int32_t l, int32_t) {
        for (size_t h = 0; h < counts[(size_t) l].size(); h++) {
            const float * scores = outcome.scores[(size_t) l].data() + h * T;
            const float * first  = reserve.empty() ? nullptr : reserve[(size_t) l].data() + h * T;
            job.kept[(size_t) l].push_back(
                select_tokens(job.plan, job.n_tokens, counts[(size_t) l][h], job.image.data(), scores, first));
        }
    });
    if (!outcome.want_scores) {
        outcome.scores = {};
    }
}

// Rows of a head of n that go to the main block: full groups of which all is stored.
int32_t main_rows(const Storage & storage, int32_t n) {
    const int32_t stored = std::min(stored_keys(storage, n), stored_values(storage, n));
    return stored == n ? n : stored - stored % GROUP;
}

// Of one of the two blocks, the rows [first, last) of a head.
void plan_head(const Job & job, size_t l, size_t h, int32_t first, int32_t last, BlockLayer & layer) {
    const LayerShape & shape   = job.seq.shapes()[l];
    const Storage &    storage = job.seq.storage();
    const auto &       kept    = job.kept[l][h];
    const auto         n       = (int32_t) kept.size();
    RaggedHead &       head    = layer.heads[h];
    head.length                = last - first;
    head.k = make_side(keys_of(shape, storage), head.length, std::min(last, stored_keys(storage, n)) - first);
    head.v = make_side(values_of(shape, storage), head.length, std::min(last, stored_values(storage, n)) - first);
    head.tokens.reserve((size_t) head.length);
    for (int32_t i = first; i < last; i++) {
        head.tokens.push_back(job.tokens[(size_t) kept[(size_t) i]]);
    }
    if (job.scored) {
        const double * sums = job.seq.sums[l].sums.data() + h * (size_t) job.seq.sums[l].capacity;
        head.scores.reserve((size_t) head.length + 1);
        for (int32_t i = first; i < last; i++) {
            head.scores.push_back(sums[kept[(size_t) i]]);
        }
    }
}

// Memory for one of the two blocks; an empty one goes. False: no memory.
bool take_memory(const Job & job, std::unique_ptr<Block> & block) {
    size_t total = 0;
    for (size_t l = 0; l < block->layers.size(); l++) {
        BlockLayer & layer = block->layers[l];
        const size_t bytes = lay_out(job.seq.shapes()[l], job.seq.storage(), layer.heads);
        layer.extent       = bytes;
        layer.memory       = Pages::take(bytes);
        if (bytes > 0 && !layer.memory) {
            return false;
        }
        total += bytes;
    }
    if (total == 0) {
        block.reset();
    }
    return true;
}

bool make_blocks(Job & job, bool reduces) {
    const auto & shapes = job.seq.shapes();
    for (auto * block : { &job.main, &job.tail }) {
        *block           = std::make_unique<Block>();
        (*block)->ragged = true;
        (*block)->layers.resize(shapes.size());
    }
    job.tail->open_k = job.tail->open_v = true;
    size_t widest = 0;
    for (size_t l = 0; l < shapes.size(); l++) {
        const auto width = (size_t) (shapes[l].d_k + shapes[l].d_v);
        job.main->layers[l].heads.resize((size_t) shapes[l].n_heads_kv);
        job.tail->layers[l].heads.resize((size_t) shapes[l].n_heads_kv);
        widest = std::max(widest, GROUP * width);
        for (size_t h = 0; h < (size_t) shapes[l].n_heads_kv; h++) {
            const auto    n     = (int32_t) job.kept[l][h].size();
            const int32_t split = main_rows(job.seq.storage(), n);
            plan_head(job, l, h, 0, split, job.main->layers[l]);
            plan_head(job, l, h, split, n, job.tail->layers[l]);
            if (reduces) {
                const size_t rows = (size_t) job.n_tokens + (size_t) n;
                widest            = std::max(widest, rows * width + job.plan.reducer->scratch(job.n_tokens, n, shapes[l].d_k));
            }
        }
    }
    if (!take_memory(job, job.main) || !take_memory(job, job.tail)) {
        return false;
    }
    if (reduces || job.seq.storage().quantised()) {
        job.rows.assign((size_t) job.n_threads, std::vector<float>(widest));
    }
    job.seq.blocks.reserve(job.seq.blocks.size() + 2);
    return true;
}

// The kept rows `first` and after, n <= GROUP of them, into the block that they belong to. first is a multiple of GROUP.
void store_rows(Job & job, int32_t l, int32_t h, int32_t first, int32_t n, const float * k, const float * v) {
    const LayerShape & shape   = job.seq.shapes()[(size_t) l];
    const Storage &    storage = job.seq.storage();
    const int32_t      split   = main_rows(storage, (int32_t) job.kept[(size_t) l][(size_t) h].size());
    BlockLayer &       layer   = (first < split ? job.main : job.tail)->layers[(size_t) l];
    const RaggedHead & head    = layer.heads[(size_t) h];
    const int32_t      at      = first < split ? first : first - split;
    write_rows(layer.memory.data(), head.k, keys_of(shape, storage), at, n, k);
    write_rows(layer.memory.data(), head.v, values_of(shape, storage), at, n, v);
}

// Plain types: rows stay as they are, bit for bit.
void gather_rows(Job & job, int32_t l, int32_t h) {
    const auto &       kept  = job.kept[(size_t) l][(size_t) h];
    BlockLayer &       layer = job.main->layers[(size_t) l];
    const RaggedHead & head  = layer.heads[(size_t) h];
    uint8_t * const    k     = layer.memory.data() + head.k[0].offset;
    uint8_t * const    v     = layer.memory.data() + head.v[0].offset;
    size_t             next  = 0;
    int32_t            at    = 0;
    job.seq.each_segment(l, h, true, [&](const Segment & seg) {
        for (; next < kept.size() && kept[next] < at + seg.n; next++) {
            const auto r = (size_t) (kept[next] - at);
            memcpy(k + next * seg.k.stride, seg.k.data + r * seg.k.stride, seg.k.stride);
            memcpy(v + next * seg.v.stride, seg.v.data + r * seg.v.stride, seg.v.stride);
        }
        at += seg.n;
    });
}

void quantise_rows(Job & job, int32_t l, int32_t h, int32_t worker) {
    const auto &  kept = job.kept[(size_t) l][(size_t) h];
    const auto    dk = (size_t) job.seq.shapes()[(size_t) l].d_k, dv = (size_t) job.seq.shapes()[(size_t) l].d_v;
    const auto    n    = (int32_t) kept.size();
    float * const k    = job.rows[(size_t) worker].data();
    float * const v    = k + GROUP * dk;
    int32_t       next = 0, at = 0;
    job.seq.each_segment(l, h, true, [&](const Segment & seg) {
        for (; next < n && kept[(size_t) next] < at + seg.n;) {
            const int32_t r = kept[(size_t) next] - at, slot = next % GROUP;
            kernels().widen(seg.k.from(r), 1, (int32_t) dk, k + (size_t) slot * dk, dk);
            kernels().widen(seg.v.from(r), 1, (int32_t) dv, v + (size_t) slot * dv, dv);
            if (++next == n || next % GROUP == 0) {
                store_rows(job, l, h, next - slot - 1, slot + 1, k, v);
            }
        }
        at += seg.n;
    });
}

void reduce_rows(Job & job, int32_t l, int32_t h, int32_t worker) {
    const LayerShape & shape = job.seq.shapes()[(size_t) l];
    const auto &       kept  = job.kept[(size_t) l][(size_t) h];
    const auto         dk = (size_t) shape.d_k, dv = (size_t) shape.d_v, n = (size_t) job.n_tokens;
    float *            rows = job.rows[(size_t) worker].data();
    float *            rk = rows, *rv = rk + n * dk, *ok = rv + n * dv, *ov = ok + kept.size() * dk;
    float *            scratch = ov + kept.size() * dv;

    size_t at = 0;
    job.seq.each_segment(l, h, true, [&](const Segment & seg) {
        kernels().widen(seg.k, seg.n, shape.d_k, rk + at * dk, dk);
        kernels().widen(seg.v, seg.n, shape.d_v, rv + at * dv, dv);
        at += (size_t) seg.n;
    });
    const Protection p     = fit_protection(job.plan, job.n_tokens, job.counts[(size_t) l][(size_t) h]);
    const Storage    plain = job.seq.storage().plain();
    job.plan.reducer->reduce({ job.n_tokens, shape.d_k, shape.d_v, rk, rv, kept.data(), (int32_t) kept.size(), p.sinks, p.recent,
                               job.plan.params[KVEDGE_STAGE_REDUCER], scratch, l, (int32_t) job.seq.shapes().size(), h,
                               plain.k == Type::f16 ? plain.k : plain.v, job.plan.reducer }, ok, ov);
    for (size_t r = 0; r < kept.size(); r += GROUP) {
        store_rows(job, l, h, (int32_t) r, (int32_t) std::min(kept.size() - r, (size_t) GROUP), ok + r * dk, ov + r * dv);
    }
}

// Fills the new blocks layer by layer; a layer's old rows are given back as soon as its new ones stand. A reducer that may
// fail fills all layers first: until then the old rows are all there is.
void fill_blocks(Job & job, bool reduces, Compression & outcome) {
    Sequence &    seq       = job.seq;
    uint64_t      bytes     = seq.bytes();
    const bool    may_fail  = reduces && job.plan.reducer->custom != nullptr;
    const int32_t n_threads = reduces && own_thread_only(*job.plan.reducer) ? 1 : job.n_threads;
    const auto    give_back = [&](size_t l) {
        for (size_t b = seq.pending_from; b < seq.blocks.size(); b++) {
            bytes -= seq.blocks[b]->layers[l].memory.size();
            seq.blocks[b]->layers[l].memory = Pages();
        }
    };
    for (size_t l = 0; l < seq.shapes().size(); l++) {
        parallel_for(n_threads, seq.shapes()[l].n_heads_kv, [&](int32_t h, int32_t worker) {
            if (reduces) {
                reduce_rows(job, (int32_t) l, h, worker);
            } else if (seq.storage().quantised()) {
                quantise_rows(job, (int32_t) l, h, worker);
            } else {
                gather_rows(job, (int32_t) l, h);
            }
        });
        for (const auto * block : { job.main.get(), job.tail.get() }) {
            bytes += block ? block->layers[l].memory.size() : 0;
        }
        outcome.peak_bytes = std::max(outcome.peak_bytes, bytes + seq.index_bytes() + seq.score_bytes());
        if (!may_fail) {
            give_back(l);
        }
    }
    for (size_t l = 0; may_fail && l < seq.shapes().size(); l++) {
        give_back(l);
    }
    seq.blocks.resize(seq.pending_from);
    for (auto * block : { &job.main, &job.tail }) {
        if (*block) {
            seq.blocks.push_back(std::move(*block));
        }
    }
}

void keep_all(Job & job) {
    std::vector<int32_t> all((size_t) job.n_tokens);
    std::iota(all.begin(), all.end(), 0);
    job.kept.clear();
    for (const auto & shape : job.seq.shapes()) {
        job.kept.emplace_back((size_t) shape.n_heads_kv, all);
    }
}

bool observed(const Sequence & seq, const kvedge_plan & plan) {
    const Missing & m = seq.missing;
    return (m.sums == 0 || !plan_sums(plan)) && (m.squares == 0 || !plan.scorer->needs_squares) &&
           (m.entropies == 0 || !plan_observes(plan).entropy) && (m.queries == 0 || plan_window(plan) == 0);
}

kvedge_status fail_unobserved(kvedge_error * err) {
    return fail(err, KVEDGE_E_STATE,
                "the prompt was processed under a plan that collects no attention scores; set the plan before the prompt");
}

}  // namespace

kvedge_status score_pending(
    const Sequence & seq, const kvedge_plan & plan, int32_t layer, std::vector<float> & scores, kvedge_error * err) try {
    const int32_t T = seq.pending_length();
    if (T == 0) {
        return fail(err, KVEDGE_E_STATE, "no token was added since the last compression; there is nothing to score");
    }
    if (!observed(seq, plan) || (plan.scorer->needs_column_sums && seq.sums.empty()) ||
        (plan.scorer->needs_squares && seq.seen.empty()) || (plan_window(plan) > 0 && seq.windows.empty())) {
        return fail_unobserved(err);
    }
    // scorers read plain rows: quantised ones become plain in a copy
    std::unique_ptr<Sequence> plain;
    if (seq.storage().quantised() && !((plain = seq.clone()) && plain->unseal_pending())) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for a copy of the tokens to score");
    }
    const auto image = pending_image(seq, seq.pending_tokens());
    score_layer(plain ? *plain : seq, plan, image.data(), T, (size_t) layer, plan.scorer->score, scores, nullptr);
    return ok(err);
} catch (const StageFailure & failure) {
    return fail(err, KVEDGE_E_STAGE, "%s", failure.what());
}

kvedge_status compress_pending(
    Sequence & seq, const kvedge_plan & plan, int32_t n_threads, Compression & outcome, kvedge_error * err) try {
    const auto    start  = std::chrono::steady_clock::now();
    const int32_t T      = seq.pending_length();
    const int32_t budget = kvedge_plan_budget(&plan, T);
    outcome.before_bytes = outcome.after_bytes = seq.bytes();
    outcome.peak_bytes   = outcome.before_bytes + seq.index_bytes() + seq.score_bytes();
    if (T == 0) {
        return ok(err);
    }
    const bool scored   = plan.decode->needs_scores && plan.budget_ratio != 1.0;
    const bool reduced  = budget < T;
    const bool quantise = seq.storage().quantised();
    if ((reduced || scored) && !observed(seq, plan)) {
        return fail_unobserved(err);
    }
    if (plan_sums(plan) && !seq.ensure_sums(0, plan.scorer->needs_squares)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for the scores of %d tokens", T);
    }
    if (quantise && !reduced && !scored && !outcome.want_scores) {
        seq.promote_sealed();  // what is quantised already stays as it is
    }
    if (!seq.unseal_pending()) {
        return fail(err, KVEDGE_E_MEMORY, "no memory to compress the last answer, which is quantised");
    }
    const int32_t n = seq.pending_length();
    Job job{ seq, plan, std::max(1, n_threads), n, scored, seq.pending_tokens(), {}, nullptr, nullptr, {}, {}, {} };
    job.image = pending_image(seq, job.tokens);
    if (reduced || outcome.want_scores) {
        select_all(job, outcome);
    }
    const size_t first = seq.pending_from;
    if (n > 0 && (reduced || quantise)) {
        const bool reduces = reduced && plan.reducer->reduce;
        if (!reduced) {
            keep_all(job);
        }
        if (!make_blocks(job, reduces)) {
            return fail(err, KVEDGE_E_MEMORY, "no memory for the compressed cache of %d tokens", budget);
        }
        fill_blocks(job, reduces, outcome);
        outcome.reduced = reduced;
    } else if (scored) {
        seq.sums_to_scores();
    }
    seq.close_pending();
    seq.seal_old(first);  // without the memory for it, they stay as large as they are
    outcome.after_bytes = seq.bytes();
    outcome.us = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start).count();
    return ok(err);
} catch (const StageFailure & failure) {
    return fail(err, KVEDGE_E_STAGE, "%s", failure.what());
} catch (const std::bad_alloc &) {
    return fail(err, KVEDGE_E_MEMORY, "no memory to compress the cache");
}

}  // namespace kvedge
