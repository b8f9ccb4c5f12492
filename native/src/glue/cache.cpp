#include "glue/cache.h"

#include "system/error.h"
#include "system/threads.h"
#include "ggml.h"
#include "glue/rotation.h"

#include <algorithm>
#include <climits>

using namespace kvedge;

void SequenceState::note_compression(Answer && next_answer, const Compression & outcome, int32_t n_tokens) noexcept {
    armed    = false;
    replayed = 0;
    bound_answer(std::move(next_answer), n_tokens);
    n_compressions += 1;
    before_bytes = outcome.before_bytes;
    after_bytes  = outcome.after_bytes;
    compress_us  = outcome.us;
    n_unfitted   = outcome.n_unfitted;
    n_scant      = outcome.n_scant;
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
    state.seq->observed.set_rotations(rotations);
    state.seq->projections = projections;
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

// All of it or, without memory, nothing: the layer is asked for again.
void kvedge_cache::add_layer(const llama_attn_provider_layer & layer) {
    auto         op    = std::make_unique<LayerOp>();
    const size_t n     = shapes.size() + 1;
    const auto   place = place_of(layer);
    auto         turns = rotation_of(layer);
    *op                = { this, (int32_t) shapes.size(), layer.scale };
    shapes.reserve(n);
    places.reserve(n);
    sinks.reserve(n);
    rotations->reserve(n);
    ops.reserve(n);
    shapes.push_back({ layer.il, (int32_t) layer.q->ne[1], (int32_t) layer.k->ne[1], (int32_t) layer.k->ne[0],
                       (int32_t) layer.v->ne[0], layer.softcap });
    places.push_back(place);
    sinks.emplace_back();
    rotations->push_back(std::move(turns));
    ops.push_back(std::move(op));
}

// Attention of a layer without keys and values of its own, over the rows of the one that has them.
ggml_tensor * kvedge_cache::build_reader(const llama_attn_provider_layer & layer) {
    const auto owner = std::find_if(ops.begin(), ops.end(), [&](const auto & o) { return shapes[(size_t) o->layer].il == layer.il_kv; });
    if (owner == ops.end()) {
        declined = true;
        return nullptr;  // llama.cpp has the rows
    }
    const auto          at    = (*owner)->layer;
    const LayerShape &  shape = shapes[(size_t) at];
    const ggml_tensor * q     = layer.q;
    auto op = std::find_if(readers.begin(), readers.end(), [&](const auto & o) { return o->reader == layer.il; });
    const bool same = q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && q->ne[3] == 1 && q->ne[0] == shape.d_k &&
                      q->ne[1] == shape.n_heads && layer.softcap == shape.softcap && !layer.kq_b && layer.max_alibi_bias == 0.0f &&
                      (!layer.sinks || layer.sinks->type == GGML_TYPE_F32);
    if (!same || places[(size_t) at] || (op == readers.end() && !seqs.empty())) {
        shares_kv = true;
        return nullptr;
    }
    if (op == readers.end()) {
        readers.push_back(std::make_unique<LayerOp>(LayerOp{ this, at, layer.scale, layer.il }));
        op = readers.end() - 1;
    }
    ggml_tensor * start_args[] = { layer.q };
    ggml_tensor * started      = ggml_custom_4d(layer.ctx, GGML_TYPE_F32, 1, 1, 1, 1, start_args, 1, start_op, 1, op->get());
    ggml_tensor * q_args[]     = { layer.q, started, layer.sinks };
    return ggml_custom_4d(layer.ctx, GGML_TYPE_F32, shape.d_v * layer.q->ne[1], layer.q->ne[2], 1, 1, q_args, layer.sinks ? 3 : 2,
                          attend_op, GGML_N_TASKS_MAX, op->get());
}

ggml_tensor * kvedge_cache::build_attn(const llama_attn_provider_layer & layer) {
    intermediate.forget();
    if (!layer.k || !layer.v) {
        return build_reader(layer);
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
        add_layer(layer);
        op = ops.end() - 1;
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
    return !w.attention() && !w.queries && (n == 1 || n * group <= DECODE_ROWS);
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
    if (state.replay && state.replay->spoiled) {
        report(KVEDGE_E_STATE, "tokens were removed during a second pass over the prompt; end it (kvedge_replay_end), and begin it again");
        return false;
    }
    if (state.replay) {
        run.pays = run.score = run.watched = false;
        run.prompt = true;
        run.output = output;
        run.wanted.peaks = true;
        run.replay       = &state.replay->scope;
        return true;
    }
    const kvedge_plan & plan = plan_of(state.id);
    run.pays                 = run.request && BoundedPrompt::pays(*state.seq, plan, n);
    // A generated token comes alone, asks for logits, and follows one whose logits were asked for. A prompt that is not
    // compressed by itself lasts until somebody does it.
    run.prompt = run.pays || n > 1 || !output || state.seq->rows.n_tokens() == 0 ||
                 (state.armed && (!state.prev_output || !auto_compress));

    if (!run.prompt) {
        wait();
    }
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
        if (!state.evicted) {  // once for a token, also where it was refused at first
            state.evict_generated();
            state.evicted = true;
        }
        if (!state.device) {
            state.seq->rows.seal_generated();  // without the memory for it, rows stay as they are until the next time
        }
    }
    run.output  = output;
    run.watched       = (run.prompt || state.streaming) && plan.budget_ratio != 1.0;
    run.wanted        = run.watched ? plan_observes(plan) : Observation{};
    run.score         = run.prompt ? run.wanted.sums && plan.decode->needs_scores : state.seq->rows.scored();
    return true;
}

// ---------------------------------------------------------------------------------------------------------

// What lies on devices counts as well. before: bytes there before the compression.
static kvedge_status with_device(const SequenceState & state, uint64_t before, Compression & outcome, kvedge_status status) {
    outcome.before_bytes += before;
    outcome.after_bytes += state.device ? state.device->bytes() : 0;
    outcome.peak_bytes += before;
    return status;
}

// Bytes of the sequence's keys and values on devices, which all travel where rows are fetched.
static uint64_t rows_away(const SequenceState & state) {
    uint64_t         n    = 0;
    const Store & rows = state.seq->rows;
    for (size_t l = 0; state.device && l < rows.shapes().size(); l++) {
        const LayerShape & shape = rows.shapes()[l];
        const Storage &    type  = state.device->form().storage;
        for (int32_t h = 0; state.device->holds(l) && h < shape.n_heads_kv; h++) {
            n += (uint64_t) rows.head_length((int32_t) l, h) * (row_k(shape, type.k) + row_v(shape, type.v));
        }
    }
    return n;
}

AwayRows * kvedge_cache::compressor(SequenceState & state, const kvedge_plan & plan) const {
    const char * reads = reads_rows(plan);
    if (!state.device) {
        return nullptr;
    }
    if (reads) {
        state.device_problem = std::string("stage '") + reads + "' has no graph: it reads rows on the host";
    } else if (state.device->form().storage.quantised() || (storage.quantised() && state.seq->rows.even_rows() != 0)) {
        state.device_problem = "rows are quantised already";
    }
    return state.device_problem.empty() ? state.device.get() : nullptr;
}

// Where the rows are if that can be done, else on the host.
kvedge_status kvedge_cache::compress_rows(SequenceState & state, Compression & outcome, kvedge_error * err) {
    const int32_t     n_tokens = state.seq->rows.pending_length();
    const kvedge_plan plan     = compression_plan(*state.seq, plan_of(state.id), 0);
    const bool        all = kvedge_plan_budget(&plan, n_tokens) >= n_tokens && !plan.decode->needs_scores && !storage.quantised();
    const uint64_t    before = state.device ? state.device->bytes() : 0;
    state.device_work        = {};
    state.device_problem.clear();
    outcome.away = all ? nullptr : compressor(state, plan);
    if (outcome.away) {
        outcome.away->work = {};
        const auto status  = compress_pending(*state.seq, plan, threads(), outcome, err);
        state.device_work  = outcome.away->work;
        state.device_work.choose_us = outcome.choose_us;
        if (outcome.lost) {  // its rows are neither those of before nor those that were to stay
            state.device.reset();
            state.seq = std::make_unique<Sequence>(shapes, storage);
            return status;
        }
        if (status != KVEDGE_E_UNSUPPORTED) {
            return with_device(state, before, outcome, status);
        }
        state.device_problem = outcome.away->problem();
        outcome              = {};
    }
    const uint64_t fetched = all ? 0 : rows_away(state) + read_queries(state);
    if (!all && !to_host(state)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory on the host for the keys and values of %d tokens, which are compressed there", n_tokens);
    }
    state.device_work.to_host += fetched;
    return with_device(state, state.device ? before : 0, outcome, compress_pending(*state.seq, plan, threads(), outcome, err));
}

kvedge_status kvedge_cache::compress(SequenceState & state, kvedge_error * err) {
    settle();
    if (!state.streaming) {
        release_working_memory();
    }
    if (state.bounded && !state.bounded->done()) {
        return fail_bounded(state, err);
    }
    if (state.replay) {
        return fail_replaying(err);
    }
    if (state.streaming) {
        return compress_stream(state, err);
    }
    const int64_t start = ggml_time_us();
    uint64_t      seen  = 0;
    const bool    sunk  = std::any_of(sinks.begin(), sinks.end(), [](const auto & s) { return !s.empty(); });
    if (sunk || !state.device || !state.device->keeps_window(window_length(*state.seq))) {
        seen = read_queries(state);  // else the device measures by them, or to_host() reads them
    }
    seen += read_sums(state);
    const int64_t saw = ggml_time_us() - start;
    state.seq->projections = projections;  // also of a sequence that was loaded
    if (state.seq->rows.pending_length() == 0) {  // also of a prompt whose tokens were removed: what was seen of them goes, too
        state.seq->close_pending();
        state.armed = false;
        return ok(err);
    }
    // Of an answer that a decode policy bounds, heads hold different tokens already: there is no prompt to choose from.
    if (!state.kept.empty()) {
        return ok(err);
    }
    Compression   outcome;
    const int32_t n_tokens = state.seq->rows.pending_length();
    Answer        next(plan_of(state.id), shapes);
    const auto    status = compress_rows(state, outcome, err);
    if (status != KVEDGE_OK) {
        return status;
    }
    if (state.device && state.device->left_queries()) {
        state.device->drop_queries();
    }
    state.device_work.to_host += seen;
    state.device_work.measure_us += saw;
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
            if (state.replay) {
                state.replay->spoiled = true;
            }
            state.replayed = 0;  // the rows that chunks were about have moved
            state.cut(state.seq->rows.n_tokens());
        }
        ++it;
    }
}

bool kvedge_cache::seq_cp(int32_t from, int32_t to, int32_t p0, int32_t p1) {
    const auto it = seqs.find(from);
    p0            = std::max(p0, 0);
    p1            = p1 < 0 ? INT_MAX : p1;
    if (from == to || it == seqs.end() || !it->second.seq || !it->second.seq->rows.holds(p0, p1)) {
        return true;
    }
    settle();
    auto copy = to_host(it->second) ? it->second.seq->clone() : nullptr;
    if (!copy) {
        report(KVEDGE_E_MEMORY, "no memory to copy a sequence");
        return false;
    }
    copy->remove(0, p0);
    copy->remove(p1, INT_MAX);
    SequenceState state;  // takes its place when nothing can fail any more
    state.id              = to;
    state.seq             = std::move(copy);
    (Course &) state      = it->second;
    state.cut(state.seq->rows.n_tokens());
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
