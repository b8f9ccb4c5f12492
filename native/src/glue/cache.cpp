#include "glue/cache.h"

#include "core/error.h"
#include "core/threads.h"
#include "ggml.h"

#include <algorithm>
#include <climits>

using namespace kvedge;

void SequenceState::note_compression(Answer && next_answer, const Compression & outcome, int32_t n_tokens) noexcept {
    armed = false;
    bound_answer(std::move(next_answer), n_tokens);
    n_compressions += 1;
    before_bytes = outcome.before_bytes;
    after_bytes  = outcome.after_bytes;
    compress_us  = outcome.us;
    peak_bytes   = std::max(peak_bytes, outcome.peak_bytes);
}

void SequenceState::note_peak() {
    peak_bytes = std::max(peak_bytes, row_bytes() + seq->rows.index_bytes() + score_bytes());
}

SequenceState & kvedge_cache::open(int32_t seq_id) {
    SequenceState & state = seqs[seq_id];
    state.id              = seq_id;
    if (!state.seq) {
        state.seq = std::make_unique<Sequence>(shapes, storage);
    }
    return state;
}

const kvedge_plan & kvedge_cache::plan_of(int32_t seq_id) const {
    const auto own = own_plans.find(seq_id);
    return own == own_plans.end() ? plan : own->second;
}

int32_t kvedge_cache::threads() const {
    const int32_t n = n_threads > 0 ? n_threads : ctx ? llama_n_threads_batch(ctx) : available_threads();
    return std::max(1, n);
}

int kvedge_cache::report(kvedge_status status, const char * what) {
    if (error.status == KVEDGE_OK) {
        fail(&error, status, "%s", what);
    }
    return -1;
}

kvedge_status kvedge::fail_busy(kvedge_error * err) {
    return fail(err, KVEDGE_E_STATE, "another thread is in a call with this cache; wait until it is back");
}

// ---------------------------------------------------------------------------------------------------------

static bool can_attend(const llama_attn_provider_layer & layer) {
    const ggml_tensor * q = layer.q;
    const ggml_tensor * k = layer.k;
    const ggml_tensor * v = layer.v;
    for (const ggml_tensor * t : { q, k, v }) {
        if (t->type != GGML_TYPE_F32 || t->nb[0] != sizeof(float) || t->ne[3] != 1) {
            return false;
        }
    }
    return !layer.kq_b && layer.max_alibi_bias == 0.0f && q->ne[0] == k->ne[0] && k->ne[1] == v->ne[1] &&
           q->ne[1] % k->ne[1] == 0 && k->ne[0] % 8 == 0 && v->ne[0] % 8 == 0 && k->ne[0] <= MAX_HEAD_SIZE &&
           v->ne[0] <= MAX_HEAD_SIZE && (!layer.sinks || layer.sinks->type == GGML_TYPE_F32);
}

ggml_tensor * kvedge_cache::build_attn(const llama_attn_provider_layer & layer) {
    intermediate.forget();
    if (!layer.k || !layer.v) {
        shares_kv = true;
        return nullptr;
    }
    if (!can_attend(layer)) {
        declined = true;
        return nullptr;
    }
    auto op = std::find_if(ops.begin(), ops.end(), [&](const auto & o) { return shapes[(size_t) o->layer].il == layer.il; });
    if (op == ops.end()) {
        if (!seqs.empty()) {
            declined = true;
            return nullptr;  // a layer that was not there when the store was laid out
        }
        shapes.push_back({ layer.il, (int32_t) layer.q->ne[1], (int32_t) layer.k->ne[1], (int32_t) layer.k->ne[0],
                           (int32_t) layer.v->ne[0], layer.softcap });
        places.push_back(place_of(layer));
        sinks.emplace_back();
        ops.push_back(std::make_unique<LayerOp>());
        op     = ops.end() - 1;
        **op   = { this, (int32_t) shapes.size() - 1, layer.scale };
        locks.reset();
    }
    const auto at = (size_t) (*op)->layer;
    if (places[at]) {
        if (ggml_tensor * out = build_on_device(layer, at)) {
            return out;
        }
    }
    ggml_tensor * kv_args[] = { layer.k, layer.v };
    ggml_tensor * stored    = ggml_custom_4d(layer.ctx, GGML_TYPE_F32, 1, 1, 1, 1, kv_args, 2, store_op, GGML_N_TASKS_MAX, op->get());
    ggml_tensor * q_args[]  = { layer.q, stored, layer.sinks };
    return ggml_custom_4d(layer.ctx, GGML_TYPE_F32, layer.v->ne[0] * layer.q->ne[1], layer.q->ne[2], 1, 1, q_args,
                          layer.sinks ? 3 : 2, attend_op, GGML_N_TASKS_MAX, op->get());
}

// ---------------------------------------------------------------------------------------------------------

bool kvedge_cache::collect_runs(const llama_attn_provider_ubatch & ubatch) {
    runs.clear();
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        if (ubatch.n_seq_id[i] != 1) {
            report(KVEDGE_E_UNSUPPORTED, "a token that belongs to several sequences at once cannot be stored; decode it once per sequence");
            return false;
        }
        SequenceState & state = open(ubatch.seq_id[i][0]);
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

// Whether a run's rows are so few that the decode path is the faster one.
bool kvedge_cache::decodes(const Run & run) const {
    const auto n     = (int32_t) run.index.size();
    int32_t    group = 1;
    for (const auto & s : shapes) {
        group = std::max(group, s.n_heads / s.n_heads_kv);
    }
    const Observation & w = run.wanted;
    if (n == 1 && run.state->streaming && !w.squares && !w.entropy) {
        return true;  // the answer of a stream is observed, too
    }
    return !w.attention() && (n == 1 || n * group <= DECODE_ROWS);
}

// Decides what a sequence's tokens are, prompt or generated, and ends what was before them.
bool kvedge_cache::prepare_run(const llama_attn_provider_ubatch & ubatch, Run & run) {
    SequenceState & state  = *run.state;
    const auto      n      = (int32_t) run.index.size();
    const bool      output = ubatch.output && ubatch.output[run.index.back()];
    if (!end_bounded(state)) {
        return false;
    }
    run.request = std::move(state.request);
    if (run.request && (n != (int32_t) run.request->image.size() || runs.size() != 1)) {
        report(KVEDGE_E_STATE, "a bounded prompt must come as announced: all its tokens in one batch of their own, within n_ubatch");
        return false;
    }
    const kvedge_plan & plan = plan_of(state.id);
    run.pays                 = run.request && BoundedPrompt::pays(*state.seq, plan, n);
    // A generated token comes alone, asks for logits, and follows one whose logits were asked for. A prompt that is not
    // compressed by itself lasts until somebody does it.
    run.prompt = run.pays || n > 1 || !output || state.seq->rows.n_tokens() == 0 ||
                 (state.armed && (!state.prev_output || !auto_compress));

    if (!run.prompt && state.armed && auto_compress) {
        kvedge_error err{};
        if (compress(state, &err) != KVEDGE_OK) {
            report(err.status, err.message);
            return false;
        }
    }
    if (run.prompt) {
        state.end_answer();
    } else {
        state.evict_generated();
        if (!state.device) {
            state.seq->rows.seal_generated();  // without the memory for it, rows stay as they are until the next time
        }
    }
    state.armed       = state.armed || run.prompt;
    state.prev_output = output;
    run.watched       = (run.prompt || state.streaming) && plan.budget_ratio != 1.0;
    run.wanted        = run.watched ? plan_observes(plan) : Observation{};
    run.score         = run.prompt ? run.wanted.sums && plan.decode->needs_scores : state.seq->rows.scored();
    return true;
}

// Makes room for a sequence's tokens, and for what is gathered of them.
bool kvedge_cache::store_run(const llama_attn_provider_ubatch & ubatch, Run & run) {
    SequenceState & state = *run.state;
    const auto      n     = (int32_t) run.index.size();
    const auto      pos   = positions(ubatch, run);
    if (on_devices && !reserve_on_device(run)) {
        return false;
    }
    if (!make_room(*state.seq, run.wanted, n) || !state.seq->rows.append(n, pos.data(), ubatch.token == nullptr)) {
        report(KVEDGE_E_MEMORY, "no memory for the keys and values of the next tokens; shorten the prompt or free memory");
        return false;
    }
    if (run.request) {
        state.seq->rows.mark_images(n, run.request->image.data());
    }
    if (run.device) {
        run.device->enter(n, ubatch.causal);
    }
    state.expected = run.prompt ? std::max(0, state.expected - n) : 0;
    run.decode          = decodes(run);
    run.watch           = watching && n == 1 && run.decode;
    state.weights.valid = run.watch;
    if ((run.watch || (run.decode && (run.score || run.wanted.sums))) && !state.weights.reserve(state.seq->rows, run.watch)) {
        state.weights = {};
        report(KVEDGE_E_MEMORY, "no memory for the attention weights of a token; free memory");
        return false;
    }
    if (run.wanted.attention()) {
        state.seq->observe(n, ubatch.causal);
    }
    if (run.prompt) {
        state.seq->observed.missing().count(run.wanted.sums, run.wanted.squares, run.wanted.entropy, run.watched, n);
    }
    if (!run.watched) {
        state.seq->observed.skip_windows(state.seq->rows.n_tokens());  // these queries are not in the window
    }
    state.note_peak();
    if (run.decode && !run.partials.reserve(shapes, n, std::max(llama_n_threads(ctx), llama_n_threads_batch(ctx)))) {
        report(KVEDGE_E_MEMORY, "no memory for partial attention results");
        return false;
    }
    return true;
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

int kvedge_cache::ubatch_begin(const llama_attn_provider_ubatch & ubatch) {
    settle();
    causal   = ubatch.causal;
    n_tokens = (int32_t) ubatch.n_tokens;
    if (entering) {
        runs.clear();  // nothing is stored, and nothing attended to
        on_devices = false;
        return finish_begin();
    }
    if (!collect_runs(ubatch) || !std::all_of(runs.begin(), runs.end(), [&](auto & run) { return prepare_run(ubatch, *run); }) ||
        !place_runs()) {
        return -1;
    }
    for (auto & run : runs) {
        if (!(run->pays ? enter_bounded(ubatch, *run, run->request->image) : store_run(ubatch, *run))) {
            return -1;
        }
    }
    if (!reserve_scratch()) {
        return report(KVEDGE_E_MEMORY, "no memory for the attention of the prompt");
    }
    return finish_begin();
}

// ---------------------------------------------------------------------------------------------------------

kvedge_status kvedge_cache::compress(SequenceState & state, kvedge_error * err) {
    settle();
    if (!state.streaming) {
        release_working_memory();
    }
    if (state.bounded && !state.bounded->done()) {
        return fail_bounded(state, err);
    }
    if (state.streaming) {
        return compress_stream(state, err);
    }
    // Of an answer that a decode policy bounds, heads hold different tokens already: there is no prompt to choose from.
    if (state.seq->rows.pending_length() == 0 || !state.kept.empty()) {
        return ok(err);
    }
    Compression   outcome;
    const int32_t n_tokens = state.seq->rows.pending_length();
    const auto &  plan   = plan_of(state.id);
    Answer        next(plan, shapes);
    const bool    all = kvedge_plan_budget(&plan, n_tokens) >= n_tokens && !plan.decode->needs_scores && !storage.quantised();
    if (!all && !to_host(state)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory on the host for the keys and values of %d tokens, which are compressed there", n_tokens);
    }
    const auto    status = compress_pending(*state.seq, compression_plan(*state.seq, plan, 0), threads(), outcome, err);
    if (status != KVEDGE_OK) {
        return status;
    }
    if (state.device) {  // where all of it stays
        outcome.before_bytes += state.device->bytes();
        outcome.after_bytes += state.device->bytes();
    }
    state.note_compression(std::move(next), outcome, n_tokens);
    return KVEDGE_OK;
}

void kvedge_cache::seq_rm(int32_t seq_id, int32_t p0, int32_t p1) {
    if (releasing) {
        return;
    }
    settle();
    p0 = std::max(p0, 0);
    p1 = p1 < 0 ? INT_MAX : p1;
    for (auto it = seqs.begin(); it != seqs.end();) {
        SequenceState & state  = it->second;
        const bool      wanted = seq_id < 0 || it->first == seq_id;
        const bool      any    = state.seq && state.seq->rows.holds(p0, p1);
        if (wanted && p0 == 0 && p1 == INT_MAX && (any || !state.request)) {
            it = seqs.erase(it);
            continue;
        }
        if (wanted && any) {
            state.drop_bounded();
            if (!to_host(state)) {
                report(KVEDGE_E_MEMORY, "no memory on the host to remove tokens of a sequence, which is gone now");
                it = seqs.erase(it);
                continue;
            }
            state.seq->remove(p0, p1);
            state.weights.valid = false;
            const auto n        = state.seq->rows.n_tokens();
            state.prompt        = std::min(state.prompt, n);
            state.released      = std::min(state.released, n);
        }
        ++it;
    }
}

bool kvedge_cache::seq_cp(int32_t from, int32_t to, int32_t p0, int32_t p1) {
    const auto it = seqs.find(from);
    if (from == to || it == seqs.end() || !it->second.seq) {
        return true;
    }
    settle();
    auto copy = to_host(it->second) ? it->second.seq->clone() : nullptr;
    if (!copy) {
        report(KVEDGE_E_MEMORY, "no memory to copy a sequence");
        return false;
    }
    if (p0 > 0) {
        copy->remove(0, p0);
    }
    if (p1 >= 0) {
        copy->remove(p1, INT_MAX);
    }
    SequenceState state;  // takes its place when nothing can fail any more
    state.id              = to;
    state.seq             = std::move(copy);
    (Course &) state      = it->second;
    state.note_peak();
    seqs[to] = std::move(state);
    return true;
}

void kvedge_cache::seq_keep(int32_t seq_id) {
    settle();
    for (auto it = seqs.begin(); it != seqs.end();) {
        it = it->first == seq_id ? std::next(it) : seqs.erase(it);
    }
}
