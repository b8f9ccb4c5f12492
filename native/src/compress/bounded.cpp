#include "compress/bounded.h"

#include "plan/custom.h"
#include "system/error.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace kvedge {

kvedge_status check_bounded(const kvedge_plan & plan, const Storage & storage, kvedge_error * err) {
    if (plan_reach(plan) == Reach::rows) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "bounded prefill cannot use allocator '%s': the allocator reads rows or queries of all "
                    "layers before it sets a budget; use another allocator", plan.allocator->name);
    }
    if (plan.reducer->queries) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "bounded prefill cannot use reducer '%s': the reducer needs all queries of the prompt, "
                    "which bounded prefill does not keep; use another reducer", plan.reducer->name);
    }
    if (plan_reach(plan) == Reach::scores && plan.reducer->reduce) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "bounded prefill cannot use reducer '%s' with allocator '%s': the allocator sets budgets "
                    "after the last layer, and merged rows cannot be trimmed; use reducer evict or another allocator", plan.reducer->name,
                    plan.allocator->name);
    }
    if (plan_reach(plan) == Reach::scores && storage.quantised()) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "bounded prefill cannot use allocator '%s' with quantised rows: the allocator sets budgets "
                    "after the last layer, and quantised rows cannot be trimmed; use another allocator, or store rows as f16, bf16 or f32",
                    plan.allocator->name);
    }
    if (plan_reach(plan) == Reach::scores && plan.scorer->reserve) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "bounded prefill cannot use scorer '%s' with allocator '%s': the scorer chooses by two "
                    "scores, and the allocator sets budgets after the last layer; use another scorer or allocator", plan.scorer->name,
                    plan.allocator->name);
    }
    if (plan_reach(plan) == Reach::scores && plan.critical != Critical::none) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "bounded prefill cannot use critical with allocator '%s': critical chooses by two scores, "
                    "and the allocator sets budgets after the last layer; use critical none or another allocator", plan.allocator->name);
    }
    if (plan_observes(plan).again) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "bounded prefill cannot use scorer '%s': the scorer reads the complete prompt a second "
                    "time; set scorer.source=prompt", plan.scorer->name);
    }
    if (own_thread_only(*plan.scorer) || own_thread_only(*plan.reducer)) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "bounded prefill cannot use %s '%s', which must run on the calling thread; use a built-in "
                    "stage or a C stage with thread_safe", own_thread_only(*plan.scorer) ? "scorer" : "reducer",
                    own_thread_only(*plan.scorer) ? plan.scorer->name : plan.reducer->name);
    }
    return ok(err);
}

bool BoundedPrompt::pays(const Sequence & seq, const kvedge_plan & plan, int32_t n) {
    const int32_t     total = seq.rows.pending_length() + n;
    const kvedge_plan own   = compression_plan(seq, plan, n);
    return kvedge_plan_budget(&own, total) < total || seq.rows.storage().quantised();
}

bool BoundedPrompt::make_layer_room(size_t layer, int32_t n) {
    return seq_.observed.make_room(wanted_, layer, seq_.rows.n_tokens(), seq_.rows.pending_length() + n);
}

kvedge_status BoundedPrompt::enter(int32_t n, const int32_t * pos, const uint8_t * image, kvedge_error * err) {
    const bool scored = plan_.decode->needs_scores && plan_.budget_ratio != 1.0;
    if (!all_observed(seq_, plan_observes(plan_))) {
        return fail_unobserved(seq_, plan_, err);
    }
    if (!unseal_pending(seq_.rows) || !make_layer_room(0, n) || !seq_.rows.append_unallocated(n, pos, image)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for a prompt of %d tokens", n);
    }
    if (!take_layer(seq_.rows, 0)) {
        seq_.rows.take_back(n);
        return fail(err, KVEDGE_E_MEMORY, "no memory for the first layer of a prompt of %d tokens", n);
    }
    n_         = n;
    n_pending_ = seq_.rows.pending_length();
    reduced_   = kvedge_plan_budget(&plan_, n_pending_) < n_pending_;
    provisional_ = reduced_ && plan_reach(plan_) == Reach::scores;
    job_       = std::make_unique<Job>(make_job(seq_, plan_, 1, scored));
    job_->largest_budget = provisional_ ? std::min(n_pending_, PROVISIONAL * kvedge_plan_budget(&plan_, n_pending_)) : n_pending_;
    open_blocks(*job_);
    outcome_.reduced      = reduced_;
    outcome_.before_bytes = seq_.rows.bytes();
    for (size_t l = 1; l < seq_.rows.shapes().size(); l++) {
        outcome_.before_bytes += seq_.rows.contents().blocks.back().layers[l].rows.extent();
    }
    return ok(err);
}

kvedge_status BoundedPrompt::compress_layer(size_t l, kvedge_error * err) {
    Job &      job     = *job_;
    const bool reduces = reduced_ && plan_.reducer->reduce;
    if (reduced_) {
        score_layer(job, l);
        if (provisional_) {
            grant_layer(job, l, job.largest_budget);
        } else {
            allocate(job, (int32_t) l);
        }
        weigh_layer(job, l, 1);
        select_layer(job, l);
        if (!provisional_) {
            job.scores[l] = Bulk<float>();  // = {} would keep the memory
            if (!job.reserve.empty()) {
                job.reserve[l] = Bulk<float>();
            }
            if (!job.weights.empty()) {
                job.weights[l] = Bulk<float>();
            }
        }
    } else {
        keep_layer(job, l);
    }
    if (!open_layer(job, l, reduces, 1)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for the compressed rows of a layer");
    }
    fill_layer(job, l, reduces, 1);
    if (!provisional_) {
        job.kept[l] = std::vector<std::vector<int32_t>>();
    }
    written_ += job.out.main->layers[l].bytes() + job.out.tail->layers[l].bytes();
    note_peak();
    give_back_layer(seq_.rows, l);
    seq_.observed.drop_layer(l);
    if (l + 1 < seq_.rows.shapes().size() && (!take_layer(seq_.rows, l + 1) || !make_layer_room(l + 1, 0))) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for the next layer of the prompt");
    }
    return ok(err);
}

void BoundedPrompt::note_peak() {
    uint64_t scores = 0;  // bytes of scores that are kept until the budgets are known
    for (const auto & layer : job_->scores) {
        scores += layer.capacity() * sizeof(float);
    }
    outcome_.peak_bytes = std::max(outcome_.peak_bytes, seq_.rows.bytes() + written_ + index_bytes(seq_.rows) + seq_.score_bytes() + scores);
}

// Keeps the rows of a layer that its final budgets allow. from: the block of provisional rows; left [head]: indices of the
// provisional rows among the pending rows. False: no memory.
bool BoundedPrompt::trim_layer(const Block & from, size_t l, const std::vector<std::vector<int32_t>> & left) {
    Job &        job = *job_;
    const size_t T   = (size_t) n_pending_;
    for (size_t h = 0; h < left.size(); h++) {
        Bulk<float> scores(T, -HUGE_VALF), & all = job.scores[l];
        for (int32_t row : left[h]) {
            scores[(size_t) row] = all[h * T + (size_t) row];
        }
        std::copy(scores.begin(), scores.end(), all.begin() + (std::ptrdiff_t) (h * T));
    }
    select_layer(job, l);
    if (!open_layer(job, l, false, 1)) {
        return false;
    }
    for (size_t h = 0; h < left.size(); h++) {
        const auto &         kept = job.kept[l][h];
        std::vector<int32_t> places;  // indices of the kept rows among the provisional rows
        for (size_t i = 0, at = 0; i < kept.size(); i++) {
            at = (size_t) (std::lower_bound(left[h].begin() + (std::ptrdiff_t) at, left[h].end(), kept[i]) - left[h].begin());
            places.push_back((int32_t) at);
        }
        std::vector<Segment> rows;
        from.layers[l].rows.each_segment((int32_t) h, [&](const Segment & s) { rows.push_back(s); });
        gather_rows(job.out.main->layers[l].rows, (int32_t) h, places, rows);
    }
    return true;
}

bool BoundedPrompt::trim() {
    Job &                        job  = *job_;
    const auto                   left = std::move(job.kept);
    const std::unique_ptr<Block> from = std::move(job.out.main);
    job.kept.assign(left.size(), {});
    allocate(job, ALL_LAYERS);
    open_blocks(job);
    for (size_t l = 0; l < left.size(); l++) {
        if (!trim_layer(*from, l, left[l])) {
            return false;
        }
        written_ += job.out.main->layers[l].rows.bytes();
        note_peak();
        written_ -= from->layers[l].rows.bytes();
        from->layers[l].rows.memory() = SharedPages();
    }
    return true;
}

void BoundedPrompt::complete() {
    const size_t first = seq_.rows.contents().pending_from;
    replace_pending(seq_.rows, std::move(*job_->out.main), std::move(*job_->out.tail));
    job_.reset();
    seq_.close_pending();
    seal_old(seq_.rows, first);
    outcome_.after_bytes = seq_.rows.bytes();
    done_                = true;
}

kvedge_status BoundedPrompt::finish_layer(size_t layer, kvedge_error * err) noexcept {
    const auto    start  = std::chrono::steady_clock::now();
    kvedge_status status = KVEDGE_OK;
    try {
        status = compress_layer(layer, err);
        const bool last = status == KVEDGE_OK && layer + 1 == seq_.rows.shapes().size();
        if (last && provisional_ && !trim()) {
            status = fail(err, KVEDGE_E_MEMORY, "no memory for the compressed rows of a layer");
        } else if (last) {
            complete();
        }
    } catch (const StageFailure & failure) {
        status = fail(err, KVEDGE_E_STAGE, "%s", failure.what());
    } catch (...) {
        status = caught(err, "compress a layer of the prompt");
    }
    failed_  = status != KVEDGE_OK;
    *layers_ = (int32_t) layer + 1;
    outcome_.us += std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start).count();
    return status;
}

void BoundedPrompt::abandon() {
    if (done_ || !job_) {
        return;
    }
    job_.reset();
    seq_.take_back(n_);
    failed_ = true;
}

}  // namespace kvedge
