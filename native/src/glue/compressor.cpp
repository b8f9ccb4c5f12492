#include "glue/compressor.h"

#include "compress/stream.h"
#include "ggml.h"
#include "store/following.h"
#include "system/error.h"
#include "system/threads.h"

#include <algorithm>
#include <utility>

namespace kvedge {

kvedge_status fail_replaying(kvedge_error * err) {
    return fail(err, KVEDGE_E_STATE, "a chunk of a second pass over the prompt has begun; call kvedge_replay_end first");
}

kvedge_status fail_verifying(kvedge_error * err) {
    return fail(err, KVEDGE_E_STATE, "a verification of drafts has begun; call kvedge_verify_end first");
}

// Removes a bounded prompt that failed from the sequence.
static kvedge_status fail_bounded(SequenceState & state, kvedge_error * err) {
    state.drop_bounded();
    state.has_uncompressed_prompt = false;
    return fail(err, KVEDGE_E_STATE, "the bounded prefill failed, and the prompt was removed; clear the sequence and decode the prompt "
                "again");
}

kvedge_status Compressor::check(SequenceState & state, kvedge_error * err) {
    if (state.bounded && !state.bounded->done()) {
        return fail_bounded(state, err);
    }
    return state.replay ? fail_replaying(err) : ok(err);
}

// Releases working memory after a prompt. A prompt's intermediate results are many times those of a token, so that an answer needs few of
// these pages. Every graph writes its inputs anew, and its outputs have been copied.
void Compressor::release_memory() {
    working_.release();
    // A model with an encoder also builds graphs without asking for attention: the noted buffer may have moved.
    if (context_.llama && !llama_model_has_encoder(llama_get_model(context_.llama))) {
        context_.intermediate.release();
    }
}

// ---------------------------------------------------------------------------------------------------------
// Prompts

// Adds the bytes on devices to the outcome. before: bytes on devices before the compression.
static kvedge_status with_device(const SequenceState & state, uint64_t before, Compression & outcome, kvedge_status status) {
    outcome.before_bytes += before;
    outcome.after_bytes += state.device ? state.device->bytes() : 0;
    outcome.peak_bytes += before;
    return status;
}

// Returns the bytes of the sequence's keys and values on devices. All of them travel when rows are fetched.
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

DeviceRows * Compressor::device_of(SequenceState & state, const kvedge_plan & plan, bool keeps) const {
    const char * reads = reads_rows(plan);
    if (!state.device) {
        return nullptr;
    }
    if (!state.limits.empty()) {
        state.device_problem.set({ "limits of tokens are applied on the host" });
    } else if (keeps) {
        state.device_problem.set({ "whole rows are kept on the host" });
    } else if (reads) {
        state.device_problem.set({ "'", reads, "' has no graph for devices, so the host read the rows" });
    } else if (state.device->form().storage.quantised() || (sequences_.storage.quantised() && even_rows(state.seq->rows) != 0)) {
        state.device_problem.set({ "the rows are quantised already, and devices compress plain rows only" });
    }
    return state.device_problem.empty() ? state.device.get() : nullptr;
}

// Compresses on the devices that hold the rows if that can be done, else on the host.
kvedge_status Compressor::compress_rows(SequenceState & state, Compression & outcome, kvedge_error * err) {
    const int32_t     n_tokens = state.seq->rows.pending_length();
    const kvedge_plan plan     = compression_plan(*state.seq, sequences_.plan_of(state.id), 0);
    outcome.keep_original      = keeping_.wanted(state);
    outcome.limits             = &state.limits;
    const bool        all = !outcome.keep_original && state.limits.empty() && kvedge_plan_budget(&plan, n_tokens) >= n_tokens &&
                     !plan.decode->needs_scores && !sequences_.storage.quantised();
    const uint64_t    before = state.device ? state.device->bytes() : 0;
    state.device_work        = {};
    state.device_problem.clear();
    outcome.device_rows = all ? nullptr : device_of(state, plan, outcome.keep_original);
    if (outcome.device_rows) {
        outcome.device_rows->work = {};
        auto       empty   = std::make_unique<Sequence>(layers_.shapes, sequences_.storage);  // nothing may fail when rows are lost
        const auto status  = compress_pending(*state.seq, plan, context_.threads(), outcome, err);
        state.device_work  = outcome.device_rows->work;
        state.device_work.choose_us = outcome.choose_us;
        if (outcome.lost) {  // rows on devices are neither the old rows nor the kept rows
            state.device.reset();
            state.seq = std::move(empty);
            return status;
        }
        if (status != KVEDGE_E_UNSUPPORTED) {
            return with_device(state, before, outcome, status);
        }
        state.device_problem = outcome.device_rows->problem();
        outcome              = {};
    }
    const uint64_t fetched = all ? 0 : rows_away(state) + devices_.read_queries(state);
    if (!all && !devices_.to_host(state)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory on the host to compress the keys and values of %d tokens; free memory or shorten the "
                    "prompt", n_tokens);
    }
    state.device_work.to_host += fetched;
    return with_device(state, state.device ? before : 0, outcome, compress_pending(*state.seq, plan, context_.threads(), outcome, err));
}

kvedge_status Compressor::compress(SequenceState & state, kvedge_error * err) {
    devices_.wait();
    if (!state.streaming) {
        release_memory();
    }
    if (const auto status = check(state, err); status != KVEDGE_OK) {
        return status;
    }
    if (state.streaming) {
        return compress_stream(state, err);
    }
    const Crew    crew;
    const int64_t start = ggml_time_us();
    uint64_t      seen  = 0;
    if (layers_.has_sinks() || !state.device || !state.device->keeps_window(window_length(*state.seq))) {
        seen = devices_.read_queries(state);  // else the device measures with the queries, or to_host() reads them
    }
    seen += devices_.read_sums(state);
    const int64_t saw = ggml_time_us() - start;
    state.seq->projections = layers_.projections;  // also for a loaded sequence
    if (state.seq->rows.pending_length() == 0) {  // also if a prompt's tokens were removed: their observations go, too
        state.seq->close_pending();
        state.has_uncompressed_prompt = false;
        return ok(err);
    }
    if (state.whole.seq) {  // later tokens are the answer's: the next message is compressed with them
        state.has_uncompressed_prompt = false;
        return ok(err);
    }
    // In an answer that a decode policy bounds, heads hold different tokens already: there is no prompt to choose from.
    if (!state.kept.empty()) {
        return ok(err);
    }
    Compression   outcome;
    const int32_t n_tokens = state.seq->rows.pending_length();
    Answer        next(sequences_.plan_of(state.id), layers_.shapes);
    const auto    status = compress_rows(state, outcome, err);
    if (status != KVEDGE_OK) {
        return status;
    }
    if (state.device && state.device->queries.left()) {
        state.device->queries.forget();
    }
    if (outcome.compressed_copy) {
        keeping_.put_aside(state, std::move(outcome.compressed_copy));
    }
    state.device_work.to_host += seen;
    state.device_work.measure_us += saw;
    state.note_compression(std::move(next), outcome, n_tokens);
    return KVEDGE_OK;
}

kvedge_status Compressor::choose_again(SequenceState & state, kvedge_error * err) {
    keeping_.adopt_written_rows();
    if (const auto status = check(state, err); status != KVEDGE_OK) {
        return status;
    }
    if (!state.whole.seq || state.verified || state.whole.seq->rows.pending_length() == 0) {
        return fail(err, KVEDGE_E_STATE, "sequence %d has no whole rows to choose from; call kvedge_keep before the prompt, and end a "
                    "verification of drafts first", state.id);
    }
    if (!state.kept.empty()) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "the decode policy dropped rows of the answer; use decode policy keep-all");
    }
    devices_.wait();
    if (!devices_.to_host(state)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory on the host to copy the keys and values of the sequence from a device");
    }
    Sequence &    whole = *state.whole.seq;
    const int32_t n_new = state.seq->rows.n_tokens() - whole.rows.n_tokens();
    Compression   outcome;
    outcome.keep_original = true;
    outcome.limits        = &state.limits;
    whole.projections     = layers_.projections;
    const auto plan       = compression_plan(whole, sequences_.plan_of(state.id), 0);
    const auto status     = compress_pending(whole, plan, context_.threads(), outcome, err);
    if (status != KVEDGE_OK) {
        return status;
    }
    if (n_new > 0 && !append_last(outcome.compressed_copy->rows, state.seq->rows, n_new)) {
        return fail(err, KVEDGE_E_MEMORY, "no memory for the keys and values of %d tokens", n_new);
    }
    state.seq           = std::move(outcome.compressed_copy);
    state.weights.valid = false;
    state.after_bytes   = outcome.after_bytes;
    state.compress_us   = outcome.us;
    return ok(err);
}

// ---------------------------------------------------------------------------------------------------------
// Streams

kvedge_status Compressor::compress_stream(SequenceState & state, kvedge_error * err) {
    working_.release();
    state.seq->projections = layers_.projections;
    Compression   outcome;
    const int32_t n_tokens = state.seq->rows.pending_length();
    const auto &  plan     = sequences_.plan_of(state.id);
    Answer        next(plan, layers_.shapes);
    const auto    status   = kvedge::compress_stream(*state.seq, plan, context_.threads(), outcome, err);
    if (status != KVEDGE_OK) {
        return status;
    }
    if (outcome.reduced) {
        state.note_compression(std::move(next), outcome, n_tokens);
    }
    state.has_uncompressed_prompt = false;
    return ok(err);
}

void Compressor::release_cells(SequenceState & state) {
    const int32_t newest = llama_memory_seq_pos_max(llama_get_memory(context_.llama), state.id);
    if (!layers_.all_of_model() || newest <= 0) {
        return;
    }
    context_.release_cells(state.id, 0, newest);
    const auto & pos     = state.seq->rows.contents().pos;
    size_t       at_last = 0;  // the tokens of an image may share a position
    while (at_last < pos.size() && pos[pos.size() - 1 - at_last] == newest) {
        at_last++;
    }
    state.released = (int32_t) (pos.size() - at_last);
}

// ---------------------------------------------------------------------------------------------------------
// Bounded prompts

bool Compressor::end_bounded(SequenceState & state) {
    if (state.bounded && !state.bounded->done()) {
        kvedge_error err{};
        fail_bounded(state, &err);
        context_.report(err.status, err.message);
        return false;
    }
    if (state.bounded) {
        release_memory();
        state.bounded.reset();
    }
    return true;
}

void Compressor::finish_layer(SequenceState & state, int32_t layer) noexcept {
    BoundedPrompt & bounded = *state.bounded;
    kvedge_error    err{};
    if (bounded.finish_layer((size_t) layer, &err) != KVEDGE_OK) {
        context_.report(err.status, err.message);
    } else if (bounded.done()) {
        state.note_compression(std::move(state.next), bounded.outcome(), bounded.n_tokens());
    }
}

}  // namespace kvedge
