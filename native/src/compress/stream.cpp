#include "compress/stream.h"

#include "system/error.h"
#include "compress/job.h"

#include <new>

namespace kvedge {

kvedge_status check_stream(const kvedge_plan & plan, kvedge_error * err) {
    const double *    params = plan.params[KVEDGE_STAGE_SCORER];
    const Observation wanted = plan_observes(plan);
    if (plan.budget_ratio > 0.0) {
        return fail(err, KVEDGE_E_UNSUPPORTED,
                    "a stream needs a budget in KV pairs per head, such as 2048; a ratio needs a complete prompt");
    }
    if (plan.allocator != find_allocator("uniform")) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "all KV heads of a stream must hold the same number of KV pairs; use allocator uniform "
                    "instead of '%s'", plan.allocator->name);
    }
    if (plan.decode->evict) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "the budget of a stream already limits the answer; use decode keep-all instead of '%s'",
                    plan.decode->name);
    }
    if (wanted.counts()) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "scorer '%s' needs the number of queries that saw each token, and a stream does not keep "
                    "this number; use another scorer", plan.scorer->name);
    }
    if (plan.scorer->joins_heads && plan.scorer->joins_heads(params)) {
        return fail(err, KVEDGE_E_UNSUPPORTED,
                    "scorer '%s' gives all KV heads of a layer one score, but the KV heads of a stream hold different tokens; use another "
                    "scorer", plan.scorer->name);
    }
    if (wanted.any_peaks()) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "scorer '%s' needs the largest attention of a complete prompt, but a stream has no complete "
                    "prompt; use another scorer", plan.scorer->name);
    }
    if (plan.reducer->queries) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "reducer '%s' needs all queries of a complete prompt, but a stream has no complete prompt; "
                    "use another reducer", plan.reducer->name);
    }
    if (plan.keep_all_text) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "text_overflow keep_all keeps text beyond the budget of a stream; use text_overflow budget"
                    );
    }
    if (wanted.moments > plan.budget_pairs) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "scorer '%s' keeps the first %d tokens, more than the budget of %d KV pairs; raise the "
                    "budget or lower scorer.n_sink", plan.scorer->name, wanted.moments, plan.budget_pairs);
    }
    if (!plan.scorer->custom && wanted.window > plan.budget_pairs) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "scorer '%s' keeps the last %d tokens, more than the budget of %d KV pairs; raise the "
                    "budget or lower scorer.window", plan.scorer->name, wanted.window, plan.budget_pairs);
    }
    return ok(err);
}

kvedge_status open_stream(Sequence & seq, const kvedge_plan & plan, kvedge_error * err) try {
    if (seq.rows.storage().quantised() || has_whole(seq.rows)) {
        return fail(err, KVEDGE_E_UNSUPPORTED,
                    "a stream is compressed many times, and each compression would round quantised rows again; store rows as f16, bf16 or "
                    "f32");
    }
    if (seq.rows.evicting() || !seq.open_stream(plan.sinks)) {
        return fail(err, KVEDGE_E_UNSUPPORTED,
                    "the KV heads of this sequence hold different numbers of KV pairs, so the sequence cannot become a stream; clear the "
                    "sequence first");
    }
    return ok(err);
} catch (const std::bad_alloc &) {
    return fail(err, KVEDGE_E_MEMORY, "no memory to make the sequence a stream");
}

// Returns whether every wanted quantity was observed for at least some tokens.
static bool observed_some(const Sequence & seq, const Observation & wanted) {
    return (!wanted.sums() || seq.observed.have().sums()) && (wanted.moments < 0 || seq.observed.have().moments >= 0) &&
           (wanted.window == 0 || (seq.observed.have().window > 0 && seq.rows.n_tokens() > seq.observed.window_from()));
}

static kvedge_status compress_rows(
    Sequence & seq, const kvedge_plan & plan, int32_t n_threads, Compression & outcome, kvedge_error * err) {
    const int32_t T      = seq.rows.pending_length();
    const int32_t budget = kvedge_plan_budget(&plan, T);
    if (const auto status = check_stream(plan, err); status != KVEDGE_OK) {
        return status;
    }
    const Observation wanted = plan_observes(plan);
    const auto        done   = [&] {
        set_sinks(seq.rows, plan.sinks);
        if (!wanted.sums()) {
            seq.observed.drop_sums();  // gathered for an earlier plan
        }
        return ok(err);
    };
    if (budget >= T) {
        return done();
    }
    if (!observed_some(seq, wanted) || observation_was_stopped(seq, wanted)) {
        return fail_unobserved(seq, plan, err);
    }
    if (!make_room(seq, { wanted.columns }, 0)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for the scores of %d tokens", T);
    }
    Job job = make_job(seq, plan, n_threads, false);
    select_all(job);
    job.scores = job.reserve = job.weights = {};
    const bool reduces = plan.reducer->reduce != nullptr;
    if (!open_layers(job, reduces)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for the compressed cache of %d tokens", budget);
    }
    fill_layers(job, reduces, outcome);
    for (size_t l = 0; seq.observed.have().sums() && l < job.kept.size(); l++) {
        for (size_t h = 0; h < job.kept[l].size(); h++) {
            seq.observed.remove_head_rows(l, h, 0, Observed::ALL, job.kept[l][h]);
        }
    }
    stream_last(seq.rows);
    seq.observed.missing = {};
    outcome.reduced      = true;
    return done();
}

kvedge_status compress_stream(
    Sequence & seq, const kvedge_plan & plan, int32_t n_threads, Compression & outcome, kvedge_error * err) {
    return measured(seq, outcome, err, [&] { return compress_rows(seq, plan, n_threads, outcome, err); });
}

}  // namespace kvedge
