#include "compress/compress.h"

#include "plan/custom.h"
#include "system/error.h"
#include "compress/job.h"
#include "system/threads.h"

#include <algorithm>
#include <chrono>
#include <new>

namespace kvedge {

bool open_layers(Job & job, bool reduces) {
    open_blocks(job);
    const auto n              = (int32_t) job.seq.rows.shapes().size();
    bool       all_on_devices = true, room = true;
    for (int32_t l = 0; l < n; l++) {
        all_on_devices = all_on_devices && on_device(job, (size_t) l);
    }
    if (all_on_devices) {  // layers on devices need no row memory here, so threads can open them at once
        parallel_for(job.n_threads, n, [&](int32_t l, int32_t) { open_layer(job, (size_t) l, reduces, job.n_threads); });
        return true;
    }
    for (int32_t l = 0; l < n && room; l++) {
        room = open_layer(job, (size_t) l, reduces, job.n_threads);
    }
    return room;
}

// Fills the new blocks layer by layer, and frees a layer's old rows as soon as its new rows are complete. With a reducer that may
// fail, the old rows stay until all layers are complete, so that a failure loses nothing.
void fill_layers(Job & job, bool reduces, Compression & outcome) {
    Sequence &    seq       = job.seq;
    uint64_t      bytes     = seq.rows.bytes();
    const bool    may_fail  = reduces && job.plan.reducer->custom != nullptr;
    const int32_t n_threads = reduces && own_thread_only(*job.plan.reducer) ? 1 : job.n_threads;
    for (size_t l = 0; l < seq.rows.shapes().size(); l++) {
        if (!on_device(job, l)) {
            fill_layer(job, l, reduces, n_threads);
        }
        bytes += job.out.main->layers[l].bytes() + job.out.tail->layers[l].bytes();
        outcome.peak_bytes = std::max(outcome.peak_bytes, bytes + index_bytes(seq.rows) + seq.score_bytes());
        if (!may_fail && !job.compressed_copy) {
            bytes -= give_back_pending(seq.rows, l);
        }
        if (job.plan.reducer->queries && !job.compressed_copy) {
            seq.observed.queries.give_back(l);
        }
    }
    replace_pending((job.compressed_copy ? *job.compressed_copy : seq).rows, std::move(*job.out.main), std::move(*job.out.tail));
}

const char * reads_rows(const kvedge_plan & plan) {
    if (plan.scorer->custom || plan_observes(plan).moments >= 0 || plan_observes(plan).apart) {
        return plan.scorer->name;
    }
    if (plan.critical != Critical::none) {
        return "critical";
    }
    if (plan_reach(plan) == Reach::rows) {
        return plan.allocator->name;
    }
    return plan.reducer->reduce && !plan.reducer->merges ? plan.reducer->name : nullptr;
}

bool observation_was_stopped(const Sequence & seq, const Observation & wanted) {
    const int32_t from   = seq.observed.extent.stopped;
    const int32_t window = std::min({ wanted.window, seq.rows.n_tokens() - from, seq.rows.pending_length() });
    return from >= 0 && (wanted.attention() || wanted.moments >= 0 || window_length(seq) < window);
}

kvedge_status fail_unobserved(const Sequence & seq, const kvedge_plan & plan, kvedge_error * err) {
    if (observation_was_stopped(seq, plan_observes(plan))) {
        return fail(err, KVEDGE_E_STATE, "a batch of the prompt was stopped before its end; clear the sequence and read the prompt again");
    }
    if (plan_observes(plan).again) {
        return fail(err, KVEDGE_E_STATE,
                    "scorer '%s' needs a complete second pass over the prompt before the compression; call kvedge_replay_begin, or "
                    "set scorer.source=prompt", plan.scorer->name);
    }
    return fail(err, KVEDGE_E_STATE,
                "the plan needs attention data that was not collected while the prompt was read; set the plan before the prompt");
}

// Returns whether the gathered peaks suit the plan. `apart` needs peaks per query head, which peaks per KV head do not contain.
static bool peaks_fit(const Sequence & seq, const Observation & wanted) {
    if (!wanted.apart || !seq.observed.have().peaks) {
        return true;
    }
    const LayerShape & shape = seq.rows.shapes()[0];
    const Peaks &      peaks = seq.observed.layer(0).peaks;
    return peaks.capacity == 0 || peaks.each == shape.n_heads / shape.n_heads_kv;
}

bool all_observed(const Sequence & seq, const Observation & wanted) {
    return !seq.observed.missing.lacks(wanted) && !observation_was_stopped(seq, wanted) && peaks_fit(seq, wanted);
}

kvedge_status score_pending(
    Sequence & seq, const kvedge_plan & plan, int32_t layer, Bulk<float> & scores, kvedge_error * err) try {
    const int32_t T = seq.rows.pending_length();
    if (T == 0 || seq.rows.evicting()) {
        return fail(err, KVEDGE_E_STATE, "no prompt was added since the last compression; there is nothing to score");
    }
    if (!all_observed(seq, plan_observes(plan)) || !seq.observed.have().has(plan_observes(plan))) {
        return fail_unobserved(seq, plan, err);
    }
    if (!make_room(seq, { plan_observes(plan).columns }, 0)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for the scores of %d tokens", T);
    }
    // scorers read plain rows, so quantised rows become plain in a copy
    std::unique_ptr<Sequence> plain;
    if (seq.rows.storage().quantised() && !((plain = seq.clone()) && unseal_pending(plain->rows))) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for a copy of the tokens to score");
    }
    scores = scores_of(plain ? *plain : seq, plan, (size_t) layer);
    return ok(err);
} catch (const StageFailure & failure) {
    return fail(err, KVEDGE_E_STAGE, "%s", failure.what());
}

static int64_t microseconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start).count();
}

kvedge_status measured(
    const Sequence & seq, Compression & outcome, kvedge_error * err, const std::function<kvedge_status()> & compress) try {
    const auto start     = std::chrono::steady_clock::now();
    outcome.before_bytes = plain_bytes(seq.rows);
    outcome.peak_bytes   = seq.rows.bytes() + index_bytes(seq.rows) + seq.score_bytes();
    const auto status    = compress();
    outcome.after_bytes  = (outcome.compressed_copy ? *outcome.compressed_copy : seq).rows.bytes();
    outcome.us           = microseconds_since(start);
    return status;
} catch (const StageFailure & failure) {
    return fail(err, KVEDGE_E_STAGE, "%s", failure.what());
} catch (const std::bad_alloc &) {
    return fail(err, KVEDGE_E_MEMORY, "no memory to compress the cache");
}

// Makes quantised pending rows plain for a compression. The destructor restores the quantised rows, unless forget() was called.
class Unsealed {
  public:
    explicit Unsealed(Store & rows) : rows_(rows), good_(unseal_pending(rows, &was_)) {}
    ~Unsealed() { seal_again(rows_, std::move(was_)); }
    Unsealed(const Unsealed &)             = delete;
    Unsealed & operator=(const Unsealed &) = delete;

    bool good() const { return good_; }
    void forget() { was_.clear(); }  // frees the quantised rows, when nothing can fail any more

  private:
    Store & rows_;
    Sealed  was_;
    bool    good_;
};

// Fills err with the device's problem. Sets outcome.lost if rows are lost; else nothing has changed.
static kvedge_status fail_device(DeviceRows::Outcome why, Compression & outcome, kvedge_error * err) {
    outcome.lost = why == DeviceRows::Outcome::failed;
    return fail(err, outcome.lost ? KVEDGE_E_STATE : KVEDGE_E_UNSUPPORTED, "%s", outcome.device_rows->problem().text());
}

// Replaces the pending rows by the chosen rows, or writes the chosen rows to job.compressed_copy (outcome.keep_original).
static kvedge_status replace_rows(Job & job, bool reduced, Unsealed & unsealed, Compression & outcome, kvedge_error * err) {
    const bool reduces = reduced && job.plan.reducer->reduce;
    if (outcome.keep_original) {
        job.compressed_copy = std::make_unique<Sequence>(job.seq.rows.empty_copy());
    }
    for (size_t l = 0; !reduced && l < job.kept.size(); l++) {
        keep_layer(job, l);
    }
    if (!open_layers(job, reduces)) {
        const int32_t budget = kvedge_plan_budget(&job.plan, job.pending.n);
        return fail(err, KVEDGE_E_MEMORY, "no memory for the compressed cache of %d tokens", budget);
    }
    if (job.device_rows) {
        const auto taken = compress_on_devices(job, reduces, plan_evicts(job.plan));
        if (taken != DeviceRows::Outcome::done) {
            return fail_device(taken, outcome, err);
        }
    }
    if (!reduces || !job.plan.reducer->custom) {
        unsealed.forget();  // frees the quantised rows before the new rows are written; nothing can fail from here on
    }
    fill_layers(job, reduces, outcome);
    outcome.reduced    = reduced;
    outcome.n_unfitted = job.fit.unfitted;
    outcome.n_scant    = job.fit.scant;
    return ok(err);
}

// Lets the first pending rows that are quantised already stay as they are. They are pending again after its lifetime.
class Staying {
  public:
    Staying(Store & rows, bool stay) : first_(rows.mutable_contents().pending_from), before_(first_) {
        first_ = stay ? first_plain(rows) : first_;
    }
    ~Staying() { first_ = before_; }
    Staying(const Staying &)             = delete;
    Staying & operator=(const Staying &) = delete;

  private:
    size_t &     first_;
    const size_t before_;
};

// Chooses the rows to keep, and writes them where that changes anything.
static kvedge_status write_kept(Job & job, bool reduced, Unsealed & unsealed, Compression & outcome, kvedge_error * err) {
    job.device_rows = outcome.device_rows;
    job.limits      = outcome.limits;
    if (reduced || outcome.want_scores) {
        if (!measure_on_devices(job)) {
            return fail_device(DeviceRows::Outcome::lacking, outcome, err);
        }
        const auto start = std::chrono::steady_clock::now();
        select_all(job);
        outcome.choose_us = microseconds_since(start);
        outcome.scores = outcome.want_scores ? std::move(job.scores) : Scores();
        job.scores = job.reserve = job.weights = {};
    }
    const bool limited = outcome.limits && !outcome.limits->empty();
    if (job.pending.n > 0 && (reduced || job.rounds() || limited || (outcome.keep_original && job.scored))) {
        return replace_rows(job, reduced, unsealed, outcome, err);
    }
    if (outcome.keep_original) {
        job.compressed_copy = std::make_unique<Sequence>(job.seq.rows.share());
    } else if (job.scored) {
        job.seq.sums_to_scores();
    }
    return ok(err);
}

static kvedge_status compress_tokens(
    Sequence & seq, const kvedge_plan & plan, int32_t n_threads, Compression & outcome, kvedge_error * err) {
    const int32_t T = seq.rows.pending_length();
    if (T == 0) {
        return ok(err);
    }
    if (pending_differs(seq.rows)) {
        return fail(err, KVEDGE_E_STATE, "the sequence is a stream, whose KV heads hold different tokens; compress the stream with "
                    "kvedge_compress_stream");
    }
    const bool scored   = plan.decode->needs_scores && plan.budget_ratio != 1.0;
    const bool reduced  = kvedge_plan_budget(&plan, T) < T;
    const bool quantise = seq.rows.storage().quantised();
    const Observation wanted = plan_observes(plan);
    if ((reduced || scored) && !all_observed(seq, wanted)) {
        return fail_unobserved(seq, plan, err);
    }
    if (!make_room(seq, { wanted.columns }, 0)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for the scores of %d tokens", T);
    }
    size_t first = 0;
    {
        const Staying staying(seq.rows, quantise && !reduced && !scored && !outcome.want_scores && !outcome.keep_original);
        first = seq.rows.contents().pending_from;
        Unsealed unsealed(seq.rows);
        if (!unsealed.good()) {
            return fail(err, KVEDGE_E_MEMORY, "no memory to convert quantised rows for the compression");
        }
        Job job = make_job(seq, plan, n_threads, scored);
        if (const auto status = write_kept(job, reduced, unsealed, outcome, err); status != KVEDGE_OK) {
            return status;
        }
        unsealed.forget();
        outcome.compressed_copy = std::move(job.compressed_copy);
    }
    Sequence & done = outcome.compressed_copy ? *outcome.compressed_copy : seq;
    done.close_pending();
    seal_old(done.rows, outcome.compressed_copy ? 0 : first);  // without memory, the rows stay plain, which is valid too
    return ok(err);
}

kvedge_plan compression_plan(const Sequence & seq, const kvedge_plan & plan, int32_t n_more) {
    const int32_t pending = seq.rows.pending_length();
    return plan_after(plan, seq.rows.n_tokens() - pending, pending + n_more);
}

kvedge_status compress_pending(
    Sequence & seq, const kvedge_plan & plan, int32_t n_threads, Compression & outcome, kvedge_error * err) {
    return measured(seq, outcome, err, [&] { return compress_tokens(seq, plan, n_threads, outcome, err); });
}

}  // namespace kvedge
