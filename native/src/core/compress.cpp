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

namespace kvedge {

namespace {

struct Job {
    Sequence &           seq;
    const kvedge_plan &  plan;
    int32_t              n_threads;
    int32_t              n_tokens;  // T, pending
    std::vector<int32_t> tokens;    // [T] token index of each pending row
    std::vector<uint8_t> image;     // [T]

    std::unique_ptr<Block>                         block;   // the ragged block that replaces the pending ones
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

bool make_block(Job & job) {
    const auto & shapes = job.seq.shapes();
    job.block           = std::make_unique<Block>();
    job.block->ragged   = true;
    job.block->layers.resize(shapes.size());
    size_t widest = 0;
    for (size_t l = 0; l < shapes.size(); l++) {
        BlockLayer & layer = job.block->layers[l];
        layer.heads.resize((size_t) shapes[l].n_heads_kv);
        for (size_t h = 0; h < layer.heads.size(); h++) {
            layer.heads[h].length = (int32_t) job.kept[l][h].size();
            layer.heads[h].tokens.reserve(job.kept[l][h].size());
            for (int32_t row : job.kept[l][h]) {
                layer.heads[h].tokens.push_back(job.tokens[(size_t) row]);
            }
            if (job.plan.decode->needs_scores) {
                const double * sums = job.seq.sums[l].sums.data() + h * (size_t) job.seq.sums[l].capacity;
                layer.heads[h].scores.reserve(job.kept[l][h].size() + 1);
                for (int32_t row : job.kept[l][h]) {
                    layer.heads[h].scores.push_back(sums[row]);
                }
            }
            if (job.plan.reducer->reduce) {
                const size_t rows = (size_t) job.n_tokens + job.kept[l][h].size();
                widest            = std::max(widest, rows * (size_t) (shapes[l].d_k + shapes[l].d_v) +
                                                         job.plan.reducer->scratch(job.n_tokens, layer.heads[h].length, shapes[l].d_k));
            }
        }
        layer.extent = lay_out_ragged(shapes[l], job.seq.type(), layer.heads);
        layer.memory = Pages::take(layer.extent);
        if (!layer.memory) {
            return false;
        }
    }
    if (job.plan.reducer->reduce) {
        job.rows.assign((size_t) job.n_threads, std::vector<float>(widest));
    }
    job.seq.blocks.reserve(job.seq.blocks.size() + 1);
    return true;
}

void gather_rows(const Job & job, int32_t l, int32_t h, uint8_t * k, uint8_t * v) {
    const auto & kept = job.kept[(size_t) l][(size_t) h];
    size_t       next = 0;
    int32_t      at   = 0;
    job.seq.each_segment(l, h, true, [&](const Segment & seg) {
        for (; next < kept.size() && kept[next] < at + seg.n; next++) {
            const auto r = (size_t) (kept[next] - at);
            memcpy(k + next * seg.k.stride, seg.k.data + r * seg.k.stride, seg.k.stride);
            memcpy(v + next * seg.v.stride, seg.v.data + r * seg.v.stride, seg.v.stride);
        }
        at += seg.n;
    });
}

void reduce_rows(Job & job, int32_t l, int32_t h, int32_t worker, uint8_t * k, uint8_t * v) {
    const LayerShape & shape = job.seq.shapes()[(size_t) l];
    const auto &       kept  = job.kept[(size_t) l][(size_t) h];
    const auto         dk = (size_t) shape.d_k, dv = (size_t) shape.d_v, n = (size_t) job.n_tokens;
    const Kernels &    kn   = kernels();
    float *            rows = job.rows[(size_t) worker].data();
    float *            rk = rows, *rv = rk + n * dk, *ok = rv + n * dv, *ov = ok + kept.size() * dk;
    float *            scratch = ov + kept.size() * dv;

    size_t at = 0;
    job.seq.each_segment(l, h, true, [&](const Segment & seg) {
        kn.to_f32(seg.k.type, seg.k.data, rk + at * dk, (size_t) seg.n * dk);
        kn.to_f32(seg.v.type, seg.v.data, rv + at * dv, (size_t) seg.n * dv);
        at += (size_t) seg.n;
    });
    const Protection p = fit_protection(job.plan, job.n_tokens, job.counts[(size_t) l][(size_t) h]);
    job.plan.reducer->reduce({ job.n_tokens, shape.d_k, shape.d_v, rk, rv, kept.data(), (int32_t) kept.size(), p.sinks, p.recent,
                               job.plan.params[KVEDGE_STAGE_REDUCER], scratch, l, (int32_t) job.seq.shapes().size(), h,
                               job.seq.type(), job.plan.reducer }, ok, ov);
    kn.from_f32(job.seq.type(), ok, k, kept.size() * dk);
    kn.from_f32(job.seq.type(), ov, v, kept.size() * dv);
}

// Fills the new block layer by layer; a layer's old rows are given back as soon as its new ones stand. A reducer that may
// fail fills all layers first: until then the old rows are all there is.
void fill_block(Job & job, Compression & outcome) {
    Sequence &    seq       = job.seq;
    uint64_t      bytes     = outcome.before_bytes;
    const bool    may_fail  = job.plan.reducer->custom != nullptr;
    const int32_t n_threads = own_thread_only(*job.plan.reducer) ? 1 : job.n_threads;
    const auto    give_back = [&](size_t l) {
        for (size_t b = seq.pending_from; b < seq.blocks.size(); b++) {
            bytes -= seq.blocks[b]->layers[l].memory.size();
            seq.blocks[b]->layers[l].memory = Pages();
        }
    };
    for (size_t l = 0; l < seq.shapes().size(); l++) {
        BlockLayer & layer = job.block->layers[l];
        parallel_for(n_threads, (int32_t) layer.heads.size(), [&](int32_t h, int32_t worker) {
            const RaggedHead & head = layer.heads[(size_t) h];
            uint8_t * const    k    = layer.memory.data() + head.k_offset;
            uint8_t * const    v    = layer.memory.data() + head.v_offset;
            if (job.plan.reducer->reduce) {
                reduce_rows(job, (int32_t) l, h, worker, k, v);
            } else {
                gather_rows(job, (int32_t) l, h, k, v);
            }
        });
        bytes += layer.memory.size();
        outcome.peak_bytes = std::max(outcome.peak_bytes, bytes + seq.index_bytes() + seq.score_bytes());
        if (!may_fail) {
            give_back(l);
        }
    }
    for (size_t l = 0; may_fail && l < seq.shapes().size(); l++) {
        give_back(l);
    }
    seq.blocks.resize(seq.pending_from);
    seq.blocks.push_back(std::move(job.block));
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
    const auto image = pending_image(seq, seq.pending_tokens());
    score_layer(seq, plan, image.data(), T, (size_t) layer, plan.scorer->score, scores, nullptr);
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
    const bool scored = plan.decode->needs_scores && plan.budget_ratio != 1.0;
    if ((budget < T || scored) && !observed(seq, plan)) {
        return fail_unobserved(err);
    }
    if (plan_sums(plan) && !seq.ensure_sums(0, plan.scorer->needs_squares)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for the scores of %d tokens", T);
    }

    Job job{ seq, plan, std::max(1, n_threads), T, seq.pending_tokens(), {}, nullptr, {}, {}, {} };
    job.image = pending_image(seq, job.tokens);
    if (budget < T || outcome.want_scores) {
        select_all(job, outcome);
    }
    if (budget < T) {
        if (!make_block(job)) {
            return fail(err, KVEDGE_E_MEMORY, "no memory for the compressed cache of %d tokens", budget);
        }
        fill_block(job, outcome);
        outcome.reduced = true;
    }
    if (budget >= T && scored) {
        seq.sums_to_scores();
    }
    seq.close_pending();
    outcome.after_bytes = seq.bytes();
    outcome.us = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start).count();
    return ok(err);
} catch (const StageFailure & failure) {
    return fail(err, KVEDGE_E_STAGE, "%s", failure.what());
} catch (const std::bad_alloc &) {
    return fail(err, KVEDGE_E_MEMORY, "no memory to compress the cache");
}

}  // namespace kvedge
