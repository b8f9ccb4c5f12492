#include "glue/ubatch.h"

#include "system/error.h"

#include <algorithm>

namespace kvedge {

namespace {

std::vector<int32_t> positions(const llama_attn_provider_ubatch & of, const Run & run) {
    std::vector<int32_t> pos;
    pos.reserve(run.index.size());
    for (int32_t i : run.index) {
        pos.push_back(of.pos[i]);
    }
    return pos;
}

// Appends tokens, `step` at a time. False: no memory, and no token was appended.
bool append_by(Store & rows, int32_t step, const std::vector<int32_t> & pos, bool is_image) {
    const auto n = (int32_t) pos.size();
    for (int32_t i = 0; i < n; i += step) {
        if (!rows.append(step, pos.data() + i, is_image)) {
            rows.take_back(i);
            return false;
        }
    }
    return true;
}

}  // namespace

bool Ubatch::no_memory(const char * what) {
    context_.report(KVEDGE_E_MEMORY, what);
    return false;
}

// ---------------------------------------------------------------------------------------------------------
// Kinds of runs

bool Ubatch::collect(const llama_attn_provider_ubatch & of) {
    runs.clear();
    for (uint32_t i = 0; i < of.n_tokens; i++) {
        if (of.n_seq_id[i] != 1) {
            context_.report(KVEDGE_E_UNSUPPORTED,
                            "a token that belongs to several sequences at once cannot be stored; decode the token once per sequence");
            return false;
        }
        SequenceState & state = sequences_.open(of.seq_id[i][0]);
        auto run = std::find_if(runs.begin(), runs.end(), [&](const auto & r) { return r->state == &state; });
        if (run == runs.end()) {
            runs.push_back(std::make_unique<Run>());
            run           = runs.end() - 1;
            (*run)->state = &state;
        }
        (*run)->index.push_back((int32_t) i);
    }
    return true;
}

Kind Ubatch::classify(const Run & run) const {
    const SequenceState & state = *run.state;
    if (state.replay) {
        return Kind::replayed;
    }
    if (state.verified) {
        return Kind::answer;
    }
    if (run.request && BoundedPrompt::pays(*state.seq, sequences_.plan_of(state.id), run.n())) {
        return Kind::bounded;
    }
    // A generated token comes alone, asks for logits, and follows a token whose logits were asked for. Without automatic compression a
    // prompt lasts until the caller compresses it.
    const bool lasts = state.has_uncompressed_prompt && (!state.prev_output || !sequences_.auto_compress);
    return run.n() > 1 || !run.output || state.seq->rows.n_tokens() == 0 || lasts ? Kind::prompt : Kind::answer;
}

// Returns whether tokens have the same position, so that they see each other in llama.cpp but not here. The rows of an M-RoPE model's image
// share a position, but see only the rows before them in llama.cpp, too.
bool Ubatch::repeats(const llama_attn_provider_ubatch & of, const Run & run) const {
    const auto type = llama_model_rope_type(llama_get_model(context_.llama));
    const bool grid = !of.token && (type == LLAMA_ROPE_TYPE_MROPE || type == LLAMA_ROPE_TYPE_IMROPE);
    const auto same = [&](int32_t a, int32_t b) { return of.pos[a] == of.pos[b]; };
    return of.causal && !grid && std::adjacent_find(run.index.begin(), run.index.end(), same) != run.index.end();
}

bool Ubatch::refused(const llama_attn_provider_ubatch & of, const Run & run) {
    const SequenceState & state = *run.state;
    const char *          why   = nullptr;
    if (repeats(of, run)) {
        context_.report(KVEDGE_E_UNSUPPORTED, "several tokens of a sequence have the same position; give each token a different position");
        return true;
    }
    if (run.request && (run.n() != (int32_t) run.request->image.size() || runs.size() != 1)) {
        why = "a bounded prompt must have the announced number of tokens, in one batch without other sequences, within n_ubatch";
    } else if (state.replay && state.replay->spoiled) {
        why = "tokens were removed during a second pass over the prompt; call kvedge_replay_end and begin the pass again";
    } else if (state.verified && state.seq->rows.n_tokens() + run.n() > state.verified->n_old + state.verified->announced) {
        why = "a verification of drafts received more tokens than announced; call kvedge_verify_end first";
    } else if (state.verified && state.has_uncompressed_prompt && plan_evicts(sequences_.plan_of(state.id))) {
        why = "a decode policy that drops rows was set during a verification of drafts; call kvedge_verify_end first";
    }
    return why && context_.report(KVEDGE_E_STATE, why) != 0;
}

// Prepares a token of an answer: compresses the prompt before it, and drops the rows that it displaces. False: reported.
bool Ubatch::begin_answer(SequenceState & state) {
    devices_.wait();
    kvedge_error err{};
    const bool   begun = state.verified && state.seq->rows.n_tokens() > state.verified->n_old;  // its tokens stay as they are
    if (state.has_uncompressed_prompt && sequences_.auto_compress && !begun && compressor_.compress(state, &err) != KVEDGE_OK) {
        context_.report(err.status, err.message);
        return false;
    }
    if (!state.evicted) {  // once for a token, even if the token was refused at first
        state.evict_generated();
        state.evicted = true;
    }
    if (!state.device && !state.whole_in_use()) {
        seal_generated(state.seq->rows);  // if memory is short, rows stay as they are until the next time
    }
    return true;
}

bool Ubatch::prepare(const llama_attn_provider_ubatch & of, Run & run) {
    SequenceState & state = *run.state;
    if (!compressor_.end_bounded(state)) {
        return false;
    }
    run.request = std::move(state.request);
    if (refused(of, run)) {
        return false;
    }
    run.output = of.output && of.output[run.index.back()];
    run.kind   = classify(run);
    switch (run.kind) {
        case Kind::replayed:
            run.wanted.peaks = true;
            run.replay       = &state.replay->scope;
            return true;
        case Kind::answer:
            if (!begin_answer(state)) {
                return false;
            }
            break;
        default: keeping_.recall(state); state.end_answer();
    }
    const kvedge_plan & plan = sequences_.plan_of(state.id);
    run.watched              = (run.is_prompt() || state.streaming) && plan.budget_ratio != 1.0;
    run.wanted               = run.watched ? plan_observes(plan) : Observation{};
    run.score                = run.is_prompt() ? run.wanted.sums() && plan.decode->needs_scores : state.seq->rows.scored();
    return true;
}

// Notes the positions of tokens that have several. llama_ubatch holds one row for each axis. The positions of a text token are alike,
// except the last, which llama.cpp sets to 0.
void Ubatch::note_places(const llama_attn_provider_ubatch & of, Run & run) const {
    const Rotations & rotations = *layers_.rotations;
    const bool several = std::any_of(rotations.begin(), rotations.end(), [](const Rotation & r) { return !r.axes.empty(); });
    for (int32_t axis = 0; axis < PLACES && several && run.wanted.moments >= 0; axis++) {
        for (int32_t i : run.index) {
            const bool none = axis == LAST_PLACE && of.token;
            run.rotation_positions.push_back(none ? 0 : of.pos[(size_t) axis * of.n_tokens + (size_t) i]);
        }
    }
}

// Returns whether a run has so few query rows that the decode path is faster. That path rounds differently: a prompt, which scorers may
// look at, never takes it, except a single token that is watched or follows a token with logits.
bool Ubatch::decodes(const Run & run) const {
    const int32_t n     = run.n();
    int32_t       group = 1;
    for (const auto & s : layers_.shapes) {
        group = std::max(group, s.n_heads / s.n_heads_kv);
    }
    const Observation & w = run.wanted;
    if (n == 1 && run.state->streaming && !w.counts() && !w.entropy) {
        return true;  // the answer of a stream is observed, too
    }
    if (w.attention() || w.queries) {
        return false;
    }
    if (run.is_prompt()) {
        return n == 1 && (sequences_.watching || (run.output && run.state->prev_output));
    }
    return n == 1 || n * group <= DECODE_ROWS;
}

// ---------------------------------------------------------------------------------------------------------
// Room for the tokens

// Makes room for a run and enters its tokens. go_on() does what cannot be undone.
bool Ubatch::store(const llama_attn_provider_ubatch & of, Run & run) {
    SequenceState & state = *run.state;
    const int32_t   n     = run.n();
    const auto      pos   = positions(of, run);
    if (devices_.active() && !devices_.reserve(run, runs.size())) {
        return false;
    }
    const Observation room = run.replay ? Observation{} : run.wanted;  // a second pass sees rows that have their scores already
    const int32_t     step = run.is_prompt() ? n : 1;  // an answer's tokens have blocks that grow
    if (!make_room(*state.seq, room, n) || !append_by(state.seq->rows, step, pos, of.token == nullptr)) {
        return no_memory("no memory for the keys and values of the next tokens; shorten the prompt or free memory");
    }
    run.entered = true;
    if (run.request) {
        state.seq->rows.mark_images(n, run.request->image.data());
    }
    run.decode          = decodes(run);
    run.watch           = sequences_.watching && n == 1 && run.decode;
    state.weights.valid = run.watch;
    if ((run.watch || (run.decode && (run.score || run.wanted.sums()))) && !state.weights.reserve(state.seq->rows, run.watch)) {
        state.weights = {};
        return no_memory("no memory for the attention weights of a token; free memory");
    }
    run.modality = state.seq->modality();
    most_threads = std::max(most_threads, context_.graph_threads());
    return !run.decode || run.partials.reserve(layers_.shapes, n, most_threads) || no_memory("no memory for partial attention results");
}

bool Ubatch::enter_bounded(const llama_attn_provider_ubatch & of, Run & run) {
    SequenceState &     state     = *run.state;
    const int32_t       n         = run.n();
    const auto          pos       = positions(of, run);
    const kvedge_plan & plan      = sequences_.plan_of(state.id);
    state.has_uncompressed_prompt = true;
    state.weights.valid           = false;
    state.next                    = Answer(plan, layers_.shapes);
    auto bounded                  = std::make_unique<BoundedPrompt>(*state.seq, compression_plan(*state.seq, plan, n));
    sequences_.progress.follow(state.id, bounded->progress());
    kvedge_error err{};
    if (bounded->enter(n, pos.data(), run.request->image.data(), &err) != KVEDGE_OK) {
        context_.report(err.status, err.message);
        return false;
    }
    run.wanted  = bounded->wanted();
    run.score   = run.wanted.sums() && plan.decode->needs_scores;
    run.bounded = bounded.get();
    if (run.wanted.attention()) {
        state.seq->observe(n, causal);
    }
    state.bounded = std::move(bounded);
    state.note_peak();
    return true;
}

// Updates the sequence, when all runs have what they need. Takes no memory of the host.
void Ubatch::go_on(Run & run) {
    SequenceState & state         = *run.state;
    const int32_t   n             = run.n();
    run.before                    = state;
    state.has_uncompressed_prompt = state.has_uncompressed_prompt || run.is_prompt();
    state.prev_output             = run.output;
    state.evicted                 = false;
    if (run.bounded) {
        return;
    }
    state.expected = run.is_prompt() ? std::max(0, state.expected - n) : 0;
    if (run.replay) {
        state.note_peak();
        return;
    }
    if (run.wanted.any()) {
        int32_t & first = state.seq->observed.extent.first;
        first           = first < 0 ? state.seq->rows.n_tokens() - n : first;
    }
    if (run.wanted.attention()) {
        state.seq->observed.count(state.seq->rows.pending_length(), n, causal, std::move(run.modality));
    }
    if (run.is_prompt()) {
        state.seq->observed.missing.count(n, run.wanted, run.watched);
    }
    if (!run.watched) {
        state.seq->observed.skip_windows(state.seq->rows.n_tokens());  // these queries are not in the window
    }
    state.note_peak();
}

// Undoes a run that was not computed. A bounded prompt that is not done is lost as a whole, and a second pass begins anew.
void Ubatch::undo(Run & run) noexcept {
    SequenceState & state = *run.state;
    if (run.bounded && run.bounded->done()) {
        return;
    }
    (UbatchState &) state = run.before;
    if (run.score) {
        put_back_scores(state.seq->rows, state.weights.before);
    }
    if (run.wanted.any() && !run.bounded && !run.replay) {
        state.seq->observed.stop();
    }
}

void Ubatch::end(bool computed) noexcept {
    for (auto & run : runs) {
        if (running_ && !computed) {
            undo(*run);
        }
    }
    running_ = false;
}

// Removes the tokens that store() entered, if the ubatch is refused later.
void Ubatch::take_back() noexcept {
    for (auto & run : runs) {
        if (run->entered) {
            run->state->seq->rows.take_back(run->n());
            run->entered = false;
        }
    }
}

bool Ubatch::store_all(const llama_attn_provider_ubatch & of) try {
    for (auto & run : runs) {
        if (!(run->kind == Kind::bounded ? enter_bounded(of, *run) : store(of, *run))) {
            take_back();
            return false;
        }
    }
    if (!reserve_working()) {
        take_back();
        return no_memory("no memory for the attention of the prompt");
    }
    for (auto & run : runs) {
        if (run->score) {
            copy_scores(run->state->seq->rows, run->state->weights.before);
        }
    }
    for (auto & run : runs) {
        if (run->device) {
            run->device->enter(run->n(), causal);
        }
    }
    return true;
} catch (...) {
    take_back();
    throw;
}

bool Ubatch::reserve_working() {
    int32_t n_keys  = 0;
    bool    turning = false;
    for (const auto & run : runs) {
        turning = turning || run->wanted.moments >= 0;
        for (size_t l = 0; l < layers_.shapes.size() && !run->decode; l++) {
            for (int32_t h = 0; h < layers_.shapes[l].n_heads_kv && !(devices_.active() && layers_.devices[l]); h++) {
                n_keys = std::max(n_keys, run->state->seq->rows.head_length((int32_t) l, h));
            }
        }
    }
    const int32_t n_threads = context_.graph_threads();
    return (n_keys == 0 || working_.reserve(layers_, n_keys, n_threads)) && (!turning || working_.reserve_turning(layers_, n_threads));
}

// ---------------------------------------------------------------------------------------------------------

int Ubatch::begin(const llama_attn_provider_ubatch & of) {
    leave();
    causal   = of.causal;
    n_tokens = (int32_t) of.n_tokens;
    if (context_.entering) {  // the placeholder token is stored nowhere and attends to nothing
        devices_.leave();
        return devices_.begin_graph(runs);
    }
    keeping_.adopt_written_rows();
    if (context_.denied || !collect(of) || !std::all_of(runs.begin(), runs.end(), [&](auto & run) { return prepare(of, *run); }) || !devices_.place(runs)) {
        return -1;
    }
    for (auto & run : runs) {
        note_places(of, *run);
    }
    if (!store_all(of)) {
        return -1;
    }
    for (auto & run : runs) {
        go_on(*run);
    }
    running_ = true;
    return devices_.begin_graph(runs);
}

void Ubatch::leave() {
    devices_.run_on(runs);
    runs.clear();
}

void Ubatch::start_layer(const LayerShape & shape) {
    next_task.store(0, std::memory_order_relaxed);
    finished.store(0, std::memory_order_relaxed);
    for (auto & run : runs) {
        if (run->decode) {
            run->partials.start(shape.n_heads_kv);
        }
    }
}

}  // namespace kvedge
