// Whole rows of compressed sequences, and their C interface.

#include "glue/keeping.h"

#include "compress/compress.h"
#include "glue/calls.h"
#include "plan/storage.h"
#include "store/following.h"
#include "system/unnamed_file.h"

#include <algorithm>
#include <set>

namespace kvedge {

namespace {

template <class F> void each_layer(const Sequence & seq, const F & visit) {
    for (const Block & block : seq.rows.contents().blocks) {
        for (const BlockLayer & layer : block.layers) {
            visit(layer.rows);
        }
    }
}

bool is_written(const SequenceState & state, const std::shared_ptr<const Pages> & memory) {
    return std::any_of(state.whole.jobs.begin(), state.whole.jobs.end(), [&](const auto & job) {
        return std::any_of(job->parts.begin(), job->parts.end(), [&](const Spilled & part) { return part.from == memory; });
    });
}

}  // namespace

uint64_t Whole::bytes() const { return seq ? seq->rows.bytes() + seq->score_bytes() : 0; }

uint64_t Whole::file_bytes() const {
    uint64_t n = 0;
    if (seq) {
        each_layer(*seq, [&](const LayerRows & rows) { n += rows.memory().pages() && rows.memory().pages()->mapped() ? rows.bytes() : 0; });
    }
    return n;
}

Whole & Whole::operator=(Whole && other) noexcept {
    std::swap(seq, other.seq);
    std::swap(jobs, other.jobs);
    std::swap(compression_number, other.compression_number);
    std::swap(n_read, other.n_read);
    std::swap(problem, other.problem);
    return *this;
}

Whole::~Whole() {
    for (const auto & job : jobs) {
        job->unwanted = job.use_count() <= 2;  // held by this object and by the writer alone
    }
}

kvedge_status Keeping::set(kvedge_keep_place place, const char * folder, uint64_t most, kvedge_type type, kvedge_error * err) {
    std::unique_ptr<Spill, EndSpill> spill;
    const Storage                    storage = { (Type) type, (Type) type };
    for (const LayerShape & s : layers_.shapes) {
        if (const auto status = check_storage(storage, s.d_k, s.d_v, err); status != KVEDGE_OK) {
            return status;
        }
    }
    if (place == KVEDGE_KEEP_FILE) {
        const std::string where = folder && *folder ? folder : ".";
        if (const auto status = check_folder(where, err); status != KVEDGE_OK) {
            return status;
        }
        spill.reset(new Spill(where));
    }
    place_   = place;
    storage_ = storage;
    most_    = most;
    spill_   = std::move(spill);
    return ok(err);
}

bool Keeping::wanted(SequenceState & state) const {
    if (place_ == KVEDGE_KEEP_NOT || state.streaming) {
        return false;
    }
    if (state.seq->rows.contents().pending_from > 0) {
        if (state.whole.problem.empty()) {
            state.whole.problem.set({ "the conversation was compressed before without keeping whole rows" });
        }
        return false;
    }
    return true;
}

void Keeping::give_up(SequenceState & state, const char * why, const char * what) noexcept {
    Reason problem;
    problem.set({ why, what });  // first: the sequence may own a text
    state.whole         = {};
    state.whole.problem = problem;
}

uint64_t Keeping::held() const {
    uint64_t                n = 0;
    std::set<const Pages *> counted;
    for (const auto & [id, state] : sequences_.all) {
        const Sequence * const whole = state.whole_in_use() ? state.seq.get() : state.whole.seq.get();
        if (whole) {
            n += whole->score_bytes();
            each_layer(*whole, [&](const LayerRows & rows) { n += counted.insert(rows.memory().pages().get()).second ? rows.bytes() : 0; });
        }
    }
    return n;
}

void Keeping::keep_within(SequenceState & state) {
    while (most_ > 0 && state.whole.seq && held() > most_) {
        SequenceState * oldest = &state;
        for (auto & [id, other] : sequences_.all) {
            const bool older = other.whole.compression_number < oldest->whole.compression_number;
            oldest           = other.whole.seq && !other.whole_in_use() && older ? &other : oldest;
        }
        give_up(*oldest, "the whole rows of all sequences exceeded the limit of ", (std::to_string(most_ >> 20) + " MiB").c_str());
    }
}

void Keeping::write(SequenceState & state) try {
    auto job = std::make_shared<SpillJob>();
    each_layer(*state.whole.seq, [&](const LayerRows & rows) {
        const auto memory = rows.memory().pages();
        if (memory && !memory->mapped() && !is_written(state, memory)) {
            job->parts.push_back({ memory, nullptr });
        }
    });
    if (!job->parts.empty()) {
        if (!spill_->usable()) {
            spill_.reset(new Spill(spill_->folder()));
        }
        state.whole.jobs.push_back(job);
        spill_->write(std::move(job));
    }
} catch (const std::system_error & error) {
    give_up(state, "no thread could be started to write whole rows: ", error.what());
} catch (const std::bad_alloc &) {
    give_up(state, "no memory to write whole rows");
}

void Keeping::put_aside(SequenceState & state, std::unique_ptr<Sequence> compressed) noexcept {
    state.whole.seq = std::move(state.seq);
    state.seq       = std::move(compressed);
    state.whole.n_read = state.seq->rows.n_tokens();
    take_in(state);
}

void Keeping::take_in(SequenceState & state) noexcept try {
    store_whole_rows(state);
} catch (const std::bad_alloc &) {
    give_up(state, "no memory to keep whole rows");
}

// Keeps whole rows as the settings say: quantised, within the limit, in the file.
void Keeping::store_whole_rows(SequenceState & state) {
    state.whole.compression_number = ++compression_number_;
    state.whole.problem.clear();
    if (storage_.quantised() && !seal_whole(state.whole.seq->rows, storage_, context_.threads())) {
        give_up(state, "no memory to store whole rows as ", format(storage_.k).name);
    }
    keep_within(state);
    if (state.whole.seq && spill_) {
        each_layer(*state.whole.seq, [](const LayerRows & rows) {
            if (const auto memory = rows.memory().pages()) {
                memory->cool();
            }
        });
        write(state);
    }
}

void Keeping::share(SequenceState & from, SequenceState & copy) const {
    if (from.whole.seq) {
        auto seq      = std::make_unique<Sequence>(from.whole.seq->rows.share());
        seq->observed = from.whole.seq->observed;
        copy.whole.jobs               = from.whole.jobs;
        copy.whole.compression_number = from.whole.compression_number;
        copy.whole.n_read             = from.whole.n_read;
        copy.whole.seq                = std::move(seq);
    }
    copy.whole.problem = from.whole.problem;
}

void Keeping::adopt_written_rows() {
    for (auto & [id, state] : sequences_.all) {
        if (!state.whole.jobs.empty() && !state.whole_in_use()) {
            adopt_written_rows(state);
        }
    }
}

void Keeping::adopt_written_rows(SequenceState & state) {
    auto & jobs = state.whole.jobs;
    for (size_t j = 0; j < jobs.size();) {
        const SpillJob & job = *jobs[j];
        switch (job.state) {
            case SpillJob::State::waiting: j++; continue;
            case SpillJob::State::failed:
                give_up(state, "kvedge ", job.problem.empty() ? "had no memory to write whole rows" : job.problem.c_str());
                return;
            case SpillJob::State::dropped: jobs.erase(jobs.begin() + (std::ptrdiff_t) j); continue;
            case SpillJob::State::written: break;
        }
        Sequence & seq = state.whole.seq ? *state.whole.seq : *state.seq;
        for (Block & block : seq.rows.mutable_contents().blocks) {
            for (BlockLayer & layer : block.layers) {
                const auto at = std::find_if(job.parts.begin(), job.parts.end(), [&](const Spilled & part) {
                    return part.from == layer.rows.memory().pages();
                });
                if (at != job.parts.end()) {
                    layer.rows.memory() = SharedPages(at->to);
                }
            }
        }
        jobs.erase(jobs.begin() + (std::ptrdiff_t) j);
    }
}

void Keeping::remove_whole(SequenceState & state, int32_t p0, int32_t p1) try {
    Sequence &    whole = *state.whole.seq;
    const auto &  pos   = whole.rows.contents().pos;
    const auto    there = pending_tokens(whole.rows);  // tokens at these positions may have been removed before
    const int32_t from  = whole.observed.window_from();
    const bool    read  = std::any_of(there.begin(), there.end(), [&](int32_t token) {
        return token < state.whole.n_read && pos[(size_t) token] >= p0 && pos[(size_t) token] < p1;
    });
    whole.remove(p0, p1);
    state.whole.n_read = std::min(state.whole.n_read, whole.rows.n_tokens());
    whole.observed.skip_windows(read ? state.whole.n_read : from);  // an answer's tokens are in no window
} catch (const std::bad_alloc &) {
    give_up(state, "no memory to remove tokens from whole rows");
}

bool Keeping::remove(SequenceState & state, int32_t p0, int32_t p1) {
    const bool verifying = state.whole_in_use();
    if (verifying) {
        state.seq->observed.skip_windows(state.verified->window_from);
        state.swap_whole();
        state.verified.reset();
    }
    if (!devices_.to_host(state)) {
        return false;
    }
    try {
        state.seq->remove(p0, p1);
        state.verified.reset();
        if (state.whole.seq) {
            remove_whole(state, p0, p1);
        }
        const int32_t came = state.whole.seq ? state.whole.seq->rows.n_tokens() - state.seq->rows.n_tokens() : -1;
        return !verifying || (came >= 0 && append_last(state.seq->rows, state.whole.seq->rows, came));
    } catch (const std::bad_alloc &) {
        if (!verifying) {
            throw;
        }
        return false;  // the compressed rows lack the tokens of the verification
    }
}

void Keeping::recall(SequenceState & state) {
    if (!state.whole.seq) {
        return;
    }
    Sequence &    whole = *state.whole.seq;
    const int32_t n     = state.seq->rows.n_tokens() - whole.rows.n_tokens();
    const kvedge_plan & plan = sequences_.plan_of(state.id);
    Observation wanted = plan.budget_ratio == 1.0 ? Observation{} : plan_observes(plan);  // a full budget chooses nothing
    if (wanted.again) {
        wanted.again = wanted.apart = false;  // a second pass covers all tokens
    }
    if (!all_observed(whole, wanted)) {
        return give_up(state, "the plan has changed, and the new plan needs attention data that was not collected while the prompt was "
                              "read");
    }
    devices_.wait();
    if (n > 0 && !devices_.to_host(state)) {
        return give_up(state, "no memory on the host to copy the answer's rows from a device");
    }
    if (!holds_last(state.seq->rows, n)) {
        return give_up(state, "some rows of the answer are missing: a decode policy dropped rows, or tokens were removed");
    }
    if (n > 0 && !append_last(whole.rows, state.seq->rows, n)) {
        return give_up(state, "no memory for the answer's rows");
    }
    if (whole.rows.n_tokens() > state.whole.n_read) {
        whole.observed.skip_windows(whole.rows.n_tokens());  // the answer's queries were not kept
    }
    state.seq = std::move(state.whole.seq);
    sequences_.open(state.id);  // sets the rotations, which a loaded sequence lacks
    state.device.reset();
    state.kept.clear();
    state.evicted       = false;
    state.weights.valid = false;
}

}  // namespace kvedge

using namespace kvedge;

extern "C" kvedge_status kvedge_keep(kvedge_cache * kv, kvedge_keep_place place, const char * folder, uint64_t most_bytes, kvedge_type type,
                                     kvedge_error * err) {
    const char * missing = "kvedge_keep: cache is NULL, place is unknown, or type is neither f16 nor q8_0";
    return claimed(kv, place >= KVEDGE_KEEP_NOT && place <= KVEDGE_KEEP_FILE && (type == KVEDGE_TYPE_F16 || type == KVEDGE_TYPE_Q8_0), missing,
                   "keep whole rows", err, [&] { return kv->keeping.set(place, folder, most_bytes, type, err); });
}

extern "C" kvedge_status kvedge_limit_tokens(
    kvedge_cache * kv, int32_t seq_id, int32_t first, int32_t last, int32_t most, kvedge_error * err) {
    const char * missing = "kvedge_limit_tokens: cache is NULL, first is negative, or last is not above first";
    return claimed(kv, first >= 0 && first < last, missing, "limit tokens", err, [&] {
        SequenceState * const state = kv->sequences.find(seq_id);
        if (!state || last > state->seq->rows.n_tokens()) {
            return fail(err, KVEDGE_E_ARGUMENT, "sequence %d has no tokens %d to %d", seq_id, first, last);
        }
        auto limits = state->limits;
        limits.erase(std::remove_if(limits.begin(), limits.end(), [&](const TokenLimit & o) { return o.first < last && first < o.last; }),
                     limits.end());
        if (most >= 0) {
            limits.push_back({ first, last, most });
        }
        state->limits = std::move(limits);
        return ok(err);
    });
}

extern "C" kvedge_status kvedge_keep_saved(kvedge_cache * kv, bool on, kvedge_error * err) {
    return claimed(kv, true, "kvedge_keep_saved: cache is NULL", "save whole rows", err, [&] {
        kv->keeping.set_saved(on);
        return ok(err);
    });
}

extern "C" kvedge_status kvedge_choose_again(kvedge_cache * kv, int32_t seq_id, kvedge_error * err) {
    return in_context(kv, true, "kvedge_choose_again: cache is NULL", "choose rows again", err, [&] {
        SequenceState * const state = kv->sequences.find(seq_id);
        if (!state) {
            return fail(err, KVEDGE_E_STATE, "sequence %d is empty; read a prompt first", seq_id);
        }
        kv->context.synchronize();
        kv->finish_graphs();
        return kv->compressor.choose_again(*state, err);
    });
}

extern "C" const char * kvedge_keep_problem(const kvedge_cache * kv, int32_t seq_id) {
    return asked(kv, (const char *) nullptr, [&] {
        const SequenceState * s = kv->sequences.find(seq_id);
        return s && !s->whole.problem.empty() ? s->whole.problem.text() : nullptr;
    });
}
