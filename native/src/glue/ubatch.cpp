// The beginning of a ubatch: memory for all that it brings is taken before the graph runs, or none of it is there.

#include "glue/cache.h"

#include <algorithm>

using namespace kvedge;

// Makes room for a sequence's tokens, and for what is gathered of them. What cannot be undone follows in go_on().
bool kvedge_cache::store_run(const llama_attn_provider_ubatch & ubatch, Run & run) {
    SequenceState & state = *run.state;
    const auto      n     = (int32_t) run.index.size();
    const auto      pos   = positions(ubatch, run);
    if (on_devices && !reserve_on_device(run)) {
        return false;
    }
    const Observation room = run.replay ? Observation{} : run.wanted;  // a second pass sees rows that have their scores
    if (!make_room(*state.seq, room, n) || !state.seq->rows.append(n, pos.data(), ubatch.token == nullptr)) {
        report(KVEDGE_E_MEMORY, "no memory for the keys and values of the next tokens; shorten the prompt or free memory");
        return false;
    }
    run.entered = true;
    if (run.request) {
        state.seq->rows.mark_images(n, run.request->image.data());
    }
    run.decode          = decodes(run);
    run.watch           = watching && n == 1 && run.decode;
    state.weights.valid = run.watch;
    if ((run.watch || (run.decode && (run.score || run.wanted.sums))) && !state.weights.reserve(state.seq->rows, run.watch)) {
        state.weights = {};
        report(KVEDGE_E_MEMORY, "no memory for the attention weights of a token; free memory");
        return false;
    }
    run.modality = state.seq->modality();
    most_threads = std::max({ most_threads, llama_n_threads(ctx), llama_n_threads_batch(ctx) });
    if (run.decode && !run.partials.reserve(shapes, n, most_threads)) {
        report(KVEDGE_E_MEMORY, "no memory for partial attention results");
        return false;
    }
    return true;
}

// All runs have what they need: the rest takes no memory of the host's.
void kvedge_cache::go_on(Run & run) {
    SequenceState & state = *run.state;
    const auto      n     = (int32_t) run.index.size();
    state.armed           = state.armed || run.prompt;
    state.prev_output     = run.output;
    state.evicted         = false;
    if (run.bounded) {
        return;
    }
    state.expected = run.prompt ? std::max(0, state.expected - n) : 0;
    if (run.replay) {
        state.note_peak();
        return;
    }
    if (run.wanted.attention()) {
        state.seq->observed.count(state.seq->rows.pending_length(), n, causal, std::move(run.modality));
    }
    if (run.prompt) {
        const Observation & w = run.wanted;
        state.seq->observed.missing().count(w.sums, w.squares, w.entropy, run.watched, w.moments >= 0, w.peaks, n);
    }
    if (!run.watched) {
        state.seq->observed.skip_windows(state.seq->rows.n_tokens());  // these queries are not in the window
    }
    state.note_peak();
}

// What store_run entered for a ubatch that is refused after all.
void kvedge_cache::take_back_runs() noexcept {
    for (auto & run : runs) {
        if (run->entered) {
            run->state->seq->rows.take_back((int32_t) run->index.size());
            run->entered = false;
        }
    }
}

bool kvedge_cache::store_runs(const llama_attn_provider_ubatch & ubatch) try {
    for (auto & run : runs) {
        if (!(run->pays ? enter_bounded(ubatch, *run, run->request->image) : store_run(ubatch, *run))) {
            take_back_runs();
            return false;
        }
    }
    if (!reserve_scratch() || !reserve_turning()) {
        take_back_runs();
        report(KVEDGE_E_MEMORY, "no memory for the attention of the prompt");
        return false;
    }
    for (auto & run : runs) {
        if (run->device) {
            run->device->enter((int32_t) run->index.size(), causal);
        }
    }
    return true;
} catch (...) {
    take_back_runs();
    throw;
}

bool kvedge_cache::reserve_turning() {
    if (std::none_of(runs.begin(), runs.end(), [](const auto & run) { return run->wanted.moments >= 0; })) {
        return true;
    }
    int32_t widest = 0;
    for (const auto & s : shapes) {
        widest = std::max(widest, s.d_k);
    }
    turning.resize((size_t) std::max({ 1, llama_n_threads(ctx), llama_n_threads_batch(ctx) }));
    return std::all_of(turning.begin(), turning.end(), [&](MomentsScratch & x) { return x.reserve(widest); });
}

bool kvedge_cache::reserve_scratch() {
    int32_t n_keys = 0;
    for (const auto & run : runs) {
        if (run->decode) {
            continue;
        }
        for (size_t l = 0; l < shapes.size(); l++) {
            for (int32_t h = 0; h < shapes[l].n_heads_kv && !(on_devices && places[l]); h++) {
                n_keys = std::max(n_keys, run->state->seq->rows.head_length((int32_t) l, h));
            }
        }
    }
    if (n_keys == 0) {
        return true;
    }
    scratch.resize((size_t) std::max({ 1, llama_n_threads(ctx), llama_n_threads_batch(ctx) }));
    if (!locks) {
        int32_t heads = 1;
        for (const auto & s : shapes) {
            heads = std::max(heads, s.n_heads_kv);
        }
        locks.reset(new SpinLock[(size_t) heads]);
    }
    return std::all_of(scratch.begin(), scratch.end(), [&](Scratch & s) { return s.reserve(shapes, n_keys); });
}

void kvedge_cache::release_scratch() {
    for (auto & s : scratch) {
        s.release();
    }
    turning = {};
}

// A prompt's intermediate results are many times those of a token: an answer gets by with a few of these pages. Every graph
// writes its inputs anew, and what it put out has been copied.
void kvedge_cache::release_working_memory() {
    release_scratch();
    // An encoder's graphs are built without asking for attention.
    if (ctx && !llama_model_has_encoder(llama_get_model(ctx))) {
        intermediate.release();
    }
}

// Models with several positions for a token have them one row after the other, as llama_ubatch has. Those of text are alike,
// but the last, which llama.cpp sets to 0.
void kvedge_cache::note_places(const llama_attn_provider_ubatch & ubatch, Run & run) const {
    const bool several = std::any_of(rotations->begin(), rotations->end(), [](const Rotation & r) { return !r.axes.empty(); });
    for (int32_t axis = 0; axis < PLACES && several && run.wanted.moments >= 0; axis++) {
        for (int32_t i : run.index) {
            const bool none = axis == LAST_PLACE && ubatch.token;
            run.places.push_back(none ? 0 : ubatch.pos[(size_t) axis * ubatch.n_tokens + (size_t) i]);
        }
    }
}

int kvedge_cache::ubatch_begin(const llama_attn_provider_ubatch & ubatch) {
    begin_another();
    causal   = ubatch.causal;
    n_tokens = (int32_t) ubatch.n_tokens;
    if (entering) {  // nothing is stored, and nothing attended to
        on_devices = false;
        return finish_begin();
    }
    if (!collect_runs(ubatch) || !std::all_of(runs.begin(), runs.end(), [&](auto & run) { return prepare_run(ubatch, *run); }) ||
        !place_runs()) {
        return -1;
    }
    for (auto & run : runs) {
        note_places(ubatch, *run);
    }
    if (!store_runs(ubatch)) {
        return -1;
    }
    for (auto & run : runs) {
        go_on(*run);
    }
    return finish_begin();
}
