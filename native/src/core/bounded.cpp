#include "core/bounded.h"

#include "core/custom.h"
#include "core/error.h"

#include <algorithm>
#include <chrono>
#include <new>

namespace kvedge {

kvedge_status check_bounded(const kvedge_plan & plan, kvedge_error * err) {
    const double * params = plan.params[KVEDGE_STAGE_ALLOCATOR];
    if (!plan.allocator->by_layer || !plan.allocator->by_layer(params)) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "allocator '%s' looks at all layers before it grants a budget to the first", plan.allocator->name);
    }
    if (own_thread_only(*plan.scorer) || own_thread_only(*plan.reducer)) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "%s '%s' must run on the thread that asked for the compression",
                    own_thread_only(*plan.scorer) ? "scorer" : "reducer",
                    own_thread_only(*plan.scorer) ? plan.scorer->name : plan.reducer->name);
    }
    return ok(err);
}

bool BoundedPrompt::pays(const Sequence & seq, const kvedge_plan & plan, int32_t n) {
    const int32_t total = seq.pending_length() + n;
    return kvedge_plan_budget(&plan, total) < total || seq.storage().quantised();
}

kvedge_status BoundedPrompt::enter(int32_t n, const int32_t * pos, const uint8_t * image, kvedge_error * err) {
    const bool scored = plan_.decode->needs_scores && plan_.budget_ratio != 1.0;
    if (!observed(seq_, plan_)) {
        return fail(err, KVEDGE_E_STATE, "the tokens before the prompt were processed under a plan that collects no attention scores");
    }
    if (!seq_.unseal_pending() || !make_layer_room(seq_, wanted_, 0, n) || !seq_.append_unallocated(n, pos, image)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for a prompt of %d tokens", n);
    }
    if (!seq_.take_layer(0)) {
        seq_.take_back(n);
        return fail(err, KVEDGE_E_MEMORY, "no memory for the first layer of a prompt of %d tokens", n);
    }
    n_         = n;
    n_pending_ = seq_.pending_length();
    reduced_   = kvedge_plan_budget(&plan_, n_pending_) < n_pending_;
    job_       = std::make_unique<Job>(make_job(seq_, plan_, 1, scored));
    open_blocks(*job_);
    outcome_.reduced      = reduced_;
    outcome_.before_bytes = seq_.bytes();
    for (size_t l = 1; l < seq_.shapes().size(); l++) {
        outcome_.before_bytes += seq_.blocks.back()->layers[l].extent;
    }
    return ok(err);
}

kvedge_status BoundedPrompt::compress_layer(size_t l, kvedge_error * err) {
    Job &      job     = *job_;
    const bool reduces = reduced_ && plan_.reducer->reduce;
    if (reduced_) {
        score_layer(job, l);
        allocate(job, (int32_t) l);
        select_layer(job, l);
        job.scores[l] = {};
        if (!job.reserve.empty()) {
            job.reserve[l] = {};
        }
    } else {
        keep_layer(job, l);
    }
    if (!open_layer(job, l, reduces, 1)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for the compressed rows of a layer");
    }
    fill_layer(job, l, reduces, 1);
    job.kept[l] = {};
    written_ += job.main->layers[l].memory.size() + job.tail->layers[l].memory.size();
    outcome_.peak_bytes = std::max(outcome_.peak_bytes, seq_.bytes() + written_ + seq_.index_bytes() + seq_.score_bytes());
    seq_.blocks.back()->layers[l].memory = Pages();
    seq_.drop_layer_observations(l);
    if (l + 1 < seq_.shapes().size() && (!seq_.take_layer(l + 1) || !make_layer_room(seq_, wanted_, l + 1, 0))) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for the next layer of the prompt");
    }
    return ok(err);
}

void BoundedPrompt::complete() {
    const size_t first = seq_.pending_from;
    replace_blocks(*job_);
    job_.reset();
    seq_.close_pending();
    seq_.seal_old(first);
    outcome_.after_bytes = seq_.bytes();
    done_                = true;
}

kvedge_status BoundedPrompt::finish_layer(size_t layer, kvedge_error * err) {
    const auto    start  = std::chrono::steady_clock::now();
    kvedge_status status = KVEDGE_OK;
    try {
        status = compress_layer(layer, err);
        if (status == KVEDGE_OK && layer + 1 == seq_.shapes().size()) {
            complete();
        }
    } catch (const StageFailure & failure) {
        status = fail(err, KVEDGE_E_STAGE, "%s", failure.what());
    } catch (const std::bad_alloc &) {
        status = fail(err, KVEDGE_E_MEMORY, "no memory to compress a layer of the prompt");
    }
    failed_ = status != KVEDGE_OK;
    layers_ = (int32_t) layer + 1;
    outcome_.us += std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start).count();
    return status;
}

void BoundedPrompt::abandon() {
    if (done_ || !job_) {
        return;
    }
    job_.reset();
    seq_.take_back(n_);
    seq_.drop_observations();  // of some layers they are gone already
    const int32_t left = seq_.pending_length();
    seq_.missing.count(false, false, false, false, left);
    failed_ = true;
}

}  // namespace kvedge
