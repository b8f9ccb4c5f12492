// Version, and compression of plain arrays.

#include "attention/attention.h"
#include "kernels/kernels.h"
#include "compress/compress.h"
#include "system/error.h"
#include "plan/profile.h"
#include "compress/projection.h"
#include "api/result.h"
#include "plan/storage.h"
#include "compress/stream.h"
#include "system/threads.h"
#include "compress/turning.h"
#include "kernels/widen.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <memory>
#include <numeric>

using namespace kvedge;

#ifndef KVEDGE_VERSION
#    define KVEDGE_VERSION "unknown"
#endif

extern "C" const char * kvedge_version(void) try { return KVEDGE_VERSION; } catch (...) { return nullptr; }
extern "C" int32_t      kvedge_abi_version(void) try { return KVEDGE_ABI_VERSION; } catch (...) { return 0; }
extern "C" const char * kvedge_simd(void) try { return kernels().name; } catch (...) { return nullptr; }

namespace {

kvedge_status check_arrays(const kvedge_arrays & in, kvedge_error * err) {
    if (!in.q || !in.k || !in.v) {
        return fail(err, KVEDGE_E_ARGUMENT, "q, k or v is NULL; pass all three arrays");
    }
    if (in.n_layers < 1 || in.n_heads < 1 || in.n_heads_kv < 1 || in.n_tokens < 1 || in.head_size < 1) {
        return fail(err, KVEDGE_E_ARGUMENT, "n_layers, n_heads, n_heads_kv, n_tokens and head_size must be at least 1");
    }
    if (in.n_heads % in.n_heads_kv != 0) {
        return fail(err, KVEDGE_E_ARGUMENT, "%d query heads cannot be divided evenly among %d KV heads; use a multiple of the number of KV "
                    "heads", in.n_heads, in.n_heads_kv);
    }
    if (in.head_size % 8 != 0 || in.head_size > MAX_HEAD_SIZE) {
        return fail(err, KVEDGE_E_ARGUMENT, "head size %d is invalid; use a multiple of 8 up to %d", in.head_size, MAX_HEAD_SIZE);
    }
    return KVEDGE_OK;
}

// Tokens that are read at a time.
struct Step {
    int32_t first, n;
};

void store_layer(const kvedge_arrays & in, Sequence & seq, int32_t l, Step step) {
    const auto   d = (size_t) in.head_size, T = (size_t) in.n_tokens;
    const size_t first = ((size_t) l * (size_t) in.n_heads_kv * T + (size_t) step.first) * d;
    store_task({ &seq.rows, l, step.n, in.k + first, d, T * d, in.v + first, d, T * d, nullptr }, 0, 1);
}

// What is read, and where each layer's attention is written.
struct Pass {
    const kvedge_arrays *             in;
    const ReplayScope *               replay;  // NULL: the prompt
    std::vector<std::vector<float>> * attention;
};

void attend_layer(
    const Pass & pass, const Observation & wanted, Sequence & seq, int32_t l, Step step, std::vector<Scratch> & scratch) {
    const kvedge_arrays & in = *pass.in;
    const auto            d = (size_t) in.head_size, T = (size_t) in.n_tokens;
    const size_t          first = (size_t) step.first * d;
    std::vector<float> &  out   = (*pass.attention)[(size_t) l];
    out.resize((size_t) in.n_heads * T * d);
    std::vector<SpinLock> locks((size_t) in.n_heads_kv);

    AttendJob job{};
    job.rows      = &seq.rows;
    job.layer     = l;
    job.n         = step.n;
    job.causal    = true;
    job.q         = in.q + (size_t) l * (size_t) in.n_heads * T * d + first;
    job.q_token   = d;
    job.q_head    = T * d;
    job.out       = out.data() + first;
    job.out_token = d;
    job.out_head  = T * d;
    job.scale     = 1.0f / std::sqrt((float) in.head_size);
    job.replay    = pass.replay;
    job.wanted    = wanted;
    job.seen      = &seq.observed;
    job.locks     = locks.data();
    if (wanted.window > 0) {
        record_window(job, seq.observed, 0, 1);
    }
    if (wanted.moments >= 0) {
        const auto                  workers = (int32_t) scratch.size();
        std::vector<MomentsScratch> turning((size_t) workers);
        for (auto & x : turning) {
            if (!x.reserve(in.head_size)) {
                throw std::bad_alloc();
            }
        }
        parallel_for(workers, workers, [&](int32_t part, int32_t) {
            record_moments(job, seq.observed, wanted.moments, part, workers, turning[(size_t) part]);
        });
    }
    parallel_for((int32_t) scratch.size(), prefill_tasks(job, scratch[0]),
                 [&](int32_t task, int32_t worker) { prefill_task(job, task, scratch[(size_t) worker]); });
}

void read_back(const kvedge_arrays & in, kvedge_result & r) {
    const auto d = (size_t) in.head_size;
    r.heads.resize((size_t) in.n_layers);
    for (int32_t l = 0; l < in.n_layers; l++) {
        r.heads[(size_t) l].resize((size_t) in.n_heads_kv);
        for (int32_t h = 0; h < in.n_heads_kv; h++) {
            auto & head = r.heads[(size_t) l][(size_t) h];
            head.kept   = r.seq->rows.head_tokens(l, h);
            head.k.resize(head.kept.size() * d);
            head.v.resize(head.kept.size() * d);
            const HeadView view  = r.seq->rows.view(l, h);
            const auto &   shape = r.shapes[(size_t) l];
            const size_t   n_old = widen_rows(view.old, shape, head.k.data(), head.v.data());
            widen_rows(view.pending, shape, head.k.data() + n_old * d, head.v.data() + n_old * d);
            head.biases.resize(biased(r.seq->rows) ? head.kept.size() : 0);
            if (!head.biases.empty()) {
                read_biases(r.seq->rows, l, h, head.biases.data());
            }
        }
    }
}

// How arrays are compressed. step: tokens that are read at a time; 0: all tokens, as one prompt.
struct How {
    Storage               storage;
    int32_t               step, n_threads;
    const kvedge_replay * replay;  // NULL: none
};

// Returns the requested threads; else one for each core, but no more than the products of queries and keys are worth: starting a thread for
// less takes longer than it saves, and far longer if the cores are busy.
size_t threads_for(const kvedge_arrays & in, int32_t n_threads) {
    constexpr double WORTH = 1 << 25;  // products of two numbers, for a thread
    const double     half = 0.5 * in.n_layers * in.n_heads * in.head_size * (double) in.n_tokens * (double) in.n_tokens;
    return n_threads > 0 ? (size_t) n_threads : (size_t) std::min((double) available_threads(), 1.0 + half / WORTH);
}

bool enter(Sequence & seq, const std::vector<int32_t> & pos, const std::vector<LayerShape> & shapes, std::vector<Scratch> & scratch) {
    bool fits = seq.rows.append((int32_t) pos.size(), pos.data(), false);
    for (auto & s : scratch) {
        fits = fits && s.reserve(shapes, seq.rows.head_length(0, 0));
    }
    return fits;
}

// Reads a chunk of a second pass over the prompt. Its rows follow the prompt's, and are removed again. Its values do not matter.
bool read_chunk(const kvedge_arrays & in, const ReplayScope & scope, Step step, std::vector<Scratch> & scratch, kvedge_result & r) {
    std::vector<std::vector<float>> unused(r.attention.size());
    std::vector<int32_t>            pos((size_t) step.n);
    std::iota(pos.begin(), pos.end(), scope.n_context);
    if (!enter(*r.seq, pos, r.shapes, scratch)) {
        return false;
    }
    Observation wanted;
    wanted.peaks = true;
    for (int32_t l = 0; l < in.n_layers; l++) {
        store_layer(in, *r.seq, l, step);
        attend_layer({ &in, &scope, &unused }, wanted, *r.seq, l, step, scratch);
        unused[(size_t) l] = {};
    }
    r.seq->remove(scope.n_context, INT_MAX);
    return true;
}

kvedge_status check_replay(const kvedge_replay & replay, int32_t n_tokens, kvedge_error * err) {
    int64_t total = 0;
    bool    fits  = replay.q && replay.k && replay.chunks && replay.n_chunks > 0;
    for (int32_t i = 0; fits && i < replay.n_chunks; i++) {
        const kvedge_replay_chunk & c = replay.chunks[i];
        fits = c.first >= 0 && c.first < c.last && c.last <= n_tokens && c.sinks >= 0 && c.sinks <= n_tokens && c.n_tokens >= 1;
        total += c.n_tokens;
    }
    return fits && total == replay.n_tokens ? ok(err) : fail(err, KVEDGE_E_ARGUMENT, "the replay is invalid for a prompt of %d tokens; "
                                                             "give q, k, and chunks within the prompt whose n_tokens add up to n_tokens of "
                                                             "the replay", n_tokens);
}

// Gathers what the queries of a second pass pay to the prompt. False: no memory.
bool read_replay(
    const kvedge_plan & plan, const kvedge_arrays & in, const kvedge_replay & replay, std::vector<Scratch> & scratch, kvedge_result & r) {
    const kvedge_arrays again = { in.n_layers, in.n_heads, in.n_heads_kv, replay.n_tokens, in.head_size, replay.q, replay.k, replay.k, nullptr };
    Step                step{ 0, 0 };
    const Observation   wanted = plan_observes(plan);
    if (!make_room(*r.seq, peaks_of(wanted), 0)) {
        return false;
    }
    for (int32_t i = 0; i < replay.n_chunks; i++, step.first += step.n) {
        const kvedge_replay_chunk & chunk = replay.chunks[i];
        const ReplayScope scope = { chunk.first, chunk.last, chunk.sinks, in.n_tokens, wanted.within };
        step.n                  = chunk.n_tokens;
        r.seq->observed.keep_first(chunk.sinks);
        if (!read_chunk(again, scope, step, scratch, r)) {
            return false;
        }
    }
    return true;
}

// Reads and compresses the arrays.
kvedge_status run_arrays(
    const kvedge_plan & plan, const kvedge_arrays & in, const How & how, std::vector<Scratch> & scratch, kvedge_result & r, kvedge_error * err) {
    const int32_t step   = how.step;
    Observation   wanted = plan_observes(plan);
    const bool    again  = how.replay && wanted.again;
    wanted.peaks         = wanted.any_peaks() && !again;
    for (int32_t at = 0; at < in.n_tokens; at += step > 0 ? step : in.n_tokens) {
        const Step           now{ at, step > 0 ? std::min(step, in.n_tokens - at) : in.n_tokens };
        std::vector<int32_t> pos((size_t) now.n);
        std::iota(pos.begin(), pos.end(), at);
        if (!make_room(*r.seq, wanted, now.n) || !enter(*r.seq, pos, r.shapes, scratch)) {
            return fail(err, KVEDGE_E_MEMORY, "no memory for %d tokens", now.n);
        }
        if (in.image_mask) {
            r.seq->rows.mark_images(now.n, in.image_mask + at);
        }
        r.seq->observe(now.n, true);
        for (int32_t l = 0; l < in.n_layers; l++) {
            store_layer(in, *r.seq, l, now);
            attend_layer({ &in, nullptr, &r.attention }, wanted, *r.seq, l, now, scratch);
        }
        if (again && !read_replay(plan, in, *how.replay, scratch, r)) {
            return fail(err, KVEDGE_E_MEMORY, "no memory for a second pass over %d tokens", now.n);
        }
        Compression outcome;
        outcome.want_scores = step == 0;
        const auto n_threads = (int32_t) scratch.size();
        const auto status    = step > 0 ? compress_stream(*r.seq, plan, n_threads, outcome, err)
                                        : compress_pending(*r.seq, plan, n_threads, outcome, err);
        if (status != KVEDGE_OK) {
            return status;
        }
        r.scores = std::move(outcome.scores);
    }
    read_back(in, r);
    return ok(err);
}

kvedge_status compress_arrays(
    const kvedge_plan * plan, const kvedge_arrays * in, const How & how, kvedge_result ** out, kvedge_error * err) {
    *out = nullptr;
    if (const auto status = check_arrays(*in, err); status != KVEDGE_OK) {
        return status;
    }
    if (const auto status = check_storage(how.storage, in->head_size, in->head_size, err); status != KVEDGE_OK) {
        return status;
    }
    if (const auto status = how.replay ? check_replay(*how.replay, in->n_tokens, err) : KVEDGE_OK; status != KVEDGE_OK) {
        return status;
    }
    auto r      = std::make_unique<kvedge_result>();
    r->d        = in->head_size;
    r->n_tokens = in->n_tokens;
    r->attention.resize((size_t) in->n_layers);
    for (int32_t l = 0; l < in->n_layers; l++) {
        r->shapes.push_back({ l, in->n_heads, in->n_heads_kv, in->head_size, in->head_size });
    }
    if (const auto status = check_profiles(*plan, r->shapes, in->n_layers, err); status != KVEDGE_OK) {
        return status;
    }
    const auto rotations = std::make_shared<Rotations>(r->shapes.size(), plan->rotation ? *plan->rotation : Rotation());
    if (const auto status = check_rotations(*plan, r->shapes, *rotations, err); status != KVEDGE_OK) {
        return status;
    }
    const auto projections = plan->projection ? std::make_shared<Projections>(plan->projection) : nullptr;
    if (const auto status = check_projections(*plan, r->shapes, projections.get(), err); status != KVEDGE_OK) {
        return status;
    }
    r->seq = std::make_unique<Sequence>(r->shapes, how.storage);
    r->seq->projections = projections;
    r->seq->observed.set_rotations(rotations);
    if (how.step > 0) {
        const auto can  = check_stream(*plan, err);
        const auto open = can == KVEDGE_OK ? open_stream(*r->seq, *plan, err) : can;
        if (open != KVEDGE_OK) {
            return open;
        }
    }
    std::vector<Scratch> scratch(threads_for(*in, how.n_threads));
    if (const auto status = run_arrays(*plan, *in, how, scratch, *r, err); status != KVEDGE_OK) {
        return status;
    }
    *out = r.release();
    return ok(err);
}

}  // namespace

extern "C" kvedge_status kvedge_compress_arrays(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type, int32_t n_threads, kvedge_result ** out,
    kvedge_error * err) try {
    return kvedge_compress_arrays_as(plan, in, type, type, n_threads, out, err);
} catch (...) {
    return caught(err, "compress the arrays");
}

extern "C" kvedge_status kvedge_compress_arrays_as(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type_k, kvedge_type type_v, int32_t n_threads,
    kvedge_result ** out, kvedge_error * err) try {
    Storage storage;
    if (!plan || !in || !out || !make_storage(type_k, type_v, storage)) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_compress_arrays: plan, arrays or result is NULL, or a type is unknown");
    }
    return compress_arrays(plan, in, { storage, 0, n_threads, nullptr }, out, err);
} catch (...) {
    return caught(err, "compress the arrays");
}

extern "C" kvedge_status kvedge_compress_arrays_by(
    const kvedge_plan * plan, const kvedge_arrays * in, const kvedge_options * options, kvedge_result ** out, kvedge_error * err) try {
    return kvedge_compress_arrays_replayed(plan, in, nullptr, options, out, err);
} catch (...) {
    return caught(err, "compress the arrays");
}

extern "C" kvedge_status kvedge_compress_arrays_replayed(
    const kvedge_plan * plan, const kvedge_arrays * in, const kvedge_replay * replay, const kvedge_options * options,
    kvedge_result ** out, kvedge_error * err) try {
    kvedge_options o = DEFAULT_OPTIONS;
    Storage        storage;
    if (!plan || !in || !out || !read_options(options, o) || !make_storage(o.type_k, o.type_v, storage)) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_compress_arrays_by: plan, arrays or result is NULL, or options are invalid; fill "
                    "options with kvedge_options_init() first");
    }
    const std::vector<LayerShape> shapes = { { 0, in->n_heads, in->n_heads_kv, in->head_size, in->head_size } };
    const auto status = rotate_storage(storage, o.rotate, shapes, err);
    return status == KVEDGE_OK ? compress_arrays(plan, in, { storage, 0, o.n_threads, replay }, out, err) : status;
} catch (...) {
    return caught(err, "compress the arrays");
}

extern "C" kvedge_status kvedge_stream_arrays(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type_k, kvedge_type type_v, int32_t step, int32_t n_threads,
    kvedge_result ** out, kvedge_error * err) try {
    Storage storage;
    if (!plan || !in || !out || step < 1 || !make_storage(type_k, type_v, storage)) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_stream_arrays: plan, arrays or result is NULL, a type is unknown, or step is below 1");
    }
    return compress_arrays(plan, in, { storage, step, n_threads, nullptr }, out, err);
} catch (...) {
    return caught(err, "compress the arrays");
}
