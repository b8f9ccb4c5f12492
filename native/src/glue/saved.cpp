// Saves and loads a sequence, as a file or as bytes in memory. Between the two checksums lie the state of automatic compression and decode
// policies, the rows, and the positions and layers that llama.cpp keeps.

#include "glue/calls.h"
#include "plan/storage.h"
#include "sequence/frame.h"
#include "sequence/serial.h"
#include "system/file.h"

#include <algorithm>
#include <cstring>

using namespace kvedge;

namespace {

constexpr int32_t ROTATED_IN_FILES = 1 << 8;  // a flag beside the number of a type

int32_t type_in_files(Type t) { return type_number(t) | (is_rotated(t) ? ROTATED_IN_FILES : 0); }

void write_state(const kvedge_cache & kv, const SequenceState & state, int32_t pos_max, Sink & out) {
    out.value<int32_t>(type_in_files(state.seq->rows.storage().k));
    out.value<int32_t>(type_in_files(state.seq->rows.storage().v));
    out.value<uint32_t>((uint32_t) kv.layers.shapes.size());
    for (const LayerShape & s : kv.layers.shapes) {
        for (int32_t n : { s.il, s.n_heads, s.n_heads_kv, s.d_k, s.d_v }) {
            out.value<int32_t>(n);
        }
    }
    out.value<int32_t>(pos_max);
    out.value<uint8_t>(state.has_uncompressed_prompt);
    out.value<uint8_t>(state.prev_output);
    out.value<int32_t>(state.n_compressions);
    out.value<uint64_t>(state.before_bytes);
    out.value<uint64_t>(state.after_bytes);
    out.value<uint64_t>(state.peak_bytes);
    out.value<int64_t>(state.compress_us);
    out.value<int32_t>(state.prompt);
    out.value<int32_t>(state.generated);
    out.value<uint8_t>(!state.kept.empty());
    if (!state.kept.empty()) {
        const char * policy = state.answer.decode->name;
        out.value<uint8_t>((uint8_t) strlen(policy));
        out.write(policy, strlen(policy));
    }
    for (const auto & heads : state.kept) {
        out.values(heads);
    }
}

// Reads the numbers of rows per head, and the name of the decode policy that uses them; both empty: no policy. False: damaged.
bool read_kept(Reader & in, const kvedge_cache & kv, SequenceState & state, std::vector<char> & policy) {
    uint8_t has_kept, n_policy = 0;
    if (!in.value(has_kept) || has_kept > 1 || (has_kept && !in.value(n_policy)) || !in.values(policy, n_policy)) {
        return false;
    }
    state.kept.resize(has_kept ? kv.layers.shapes.size() : 0);
    for (size_t l = 0; l < state.kept.size(); l++) {
        if (!in.values(state.kept[l], (uint64_t) kv.layers.shapes[l].n_heads_kv) ||
            std::any_of(state.kept[l].begin(), state.kept[l].end(), [](int32_t n) { return n < 0; })) {
            return false;
        }
    }
    return true;
}

// Reads a type. False: the number is unknown, or the type is rotated and cannot be.
bool read_type(Reader & in, int32_t & type, bool & rotated) {
    if (!in.value(type)) {
        return false;
    }
    rotated = (type & ROTATED_IN_FILES) != 0;
    type &= ~ROTATED_IN_FILES;
    return kvedge_type_name(type) && (!rotated || can_rotate((Type) type));
}

// Reads types and shapes. storage: output, the cache's types, rotated if the file's rows are. The sequence goes on with these types.
kvedge_status read_shapes(Reader & in, const kvedge_cache & kv, Storage & storage, const char * path, kvedge_error * err) {
    int32_t  type_k, type_v;
    uint32_t n_layers;
    bool     rotated_k, rotated_v;
    if (!read_type(in, type_k, rotated_k) || !read_type(in, type_v, rotated_v) || !in.value(n_layers)) {
        return damaged(path, err);
    }
    bool same = n_layers == kv.layers.shapes.size();
    for (uint32_t l = 0; same && l < n_layers; l++) {
        const LayerShape & s = kv.layers.shapes[l];
        for (int32_t expected : { s.il, s.n_heads, s.n_heads_kv, s.d_k, s.d_v }) {
            int32_t found;
            if (!in.value(found)) {
                return damaged(path, err);
            }
            same = same && found == expected;
        }
    }
    if (!same) {
        return fail(err, KVEDGE_E_FILE, "%s belongs to a model with other layers; use the model that the file was saved with", path);
    }
    const int32_t own_k = type_number(kv.sequences.storage.k), own_v = type_number(kv.sequences.storage.v);
    if (type_k != own_k || type_v != own_v) {
        return fail(err, KVEDGE_E_ARGUMENT, "%s holds keys and values as %s:%s, but this cache stores %s:%s; use the types of the file",
                    path, kvedge_type_name(type_k), kvedge_type_name(type_v), kvedge_type_name(own_k), kvedge_type_name(own_v));
    }
    const auto fits = [&](int32_t LayerShape::*size) {
        return std::all_of(kv.layers.shapes.begin(), kv.layers.shapes.end(), [&](const LayerShape & s) { return s.*size % ROTATION == 0; });
    };
    if ((rotated_k && !fits(&LayerShape::d_k)) || (rotated_v && !fits(&LayerShape::d_v))) {
        return damaged(path, err);
    }
    const Storage own = { unrotated(kv.sequences.storage.k), unrotated(kv.sequences.storage.v) };
    storage           = { rotated_k ? rotated_keys(own.k) : own.k, rotated_v ? rotated_values(own.v) : own.v };
    return ok(err);
}

// Reads all state except the layers that llama.cpp keeps. False: damaged.
bool read_state(Reader & in, const kvedge_cache & kv, const Storage & storage, SequenceState & state, int32_t & pos_max) {
    uint8_t           has_uncompressed_prompt, prev_output;
    std::vector<char> policy;
    if (!in.value(pos_max) || !in.value(has_uncompressed_prompt) || !in.value(prev_output) || !in.value(state.n_compressions) ||
        !in.value(state.before_bytes) || !in.value(state.after_bytes) || !in.value(state.peak_bytes) || !in.value(state.compress_us) ||
        !in.value(state.prompt) || !in.value(state.generated) || !read_kept(in, kv, state, policy)) {
        return false;
    }
    state.has_uncompressed_prompt = has_uncompressed_prompt != 0;
    state.prev_output             = prev_output != 0;
    state.seq                     = read_sequence(in, kv.layers.shapes, storage);
    if (!state.seq || state.seq->rows.evicting() == state.kept.empty() || pos_max < -1 || pos_max == INT32_MAX ||
        has_uncompressed_prompt > 1 || prev_output > 1) {
        return false;
    }
    // A bounded answer continues if the plan that is set now has the same policy; else the answer ends here.
    const kvedge_plan & plan = kv.sequences.plan_of(state.id);
    state.answer = plan;
    const DecodePolicy & now = *plan.decode;
    if (!now.evict || std::string(policy.begin(), policy.end()) != now.name || now.needs_scores != state.seq->rows.scored() ||
        plan.budget_ratio == 1.0) {
        state.end_answer();
    }
    const auto n = state.seq->rows.n_tokens();
    return state.n_compressions >= 0 && state.prompt >= 0 && state.prompt <= n && state.generated >= 0 && state.generated <= n;
}

// ---------------------------------------------------------------------------------------------------------
// Layers that llama.cpp keeps: the windowed layers of interleaved models, the recurrent layers of hybrid models.

bool llama_keeps_layers(const llama_context * ctx) {
    const llama_model * model = llama_get_model(ctx);
    return llama_model_is_hybrid(model) || llama_model_n_swa(model) > 0;
}

std::vector<uint8_t> llama_part(llama_context * ctx, int32_t seq_id) {
    std::vector<uint8_t> out;
    if (llama_keeps_layers(ctx)) {
        out.resize(llama_state_seq_get_size_ext(ctx, seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
        if (llama_state_seq_get_data_ext(ctx, out.data(), out.size(), seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != out.size()) {
            out.clear();
        }
    }
    return out;
}

kvedge_status enter(kvedge_cache & kv, int32_t seq_id, int32_t pos_max, const std::vector<uint8_t> & own, kvedge_error * err) {
    if (pos_max >= 0 && !kv.context.enter_position(seq_id, pos_max)) {
        return fail(err, KVEDGE_E_STATE, "llama.cpp could not store the last position of the saved sequence; remove other sequences or use "
                    "a larger n_ctx");
    }
    if (!own.empty() &&
        llama_state_seq_set_data_ext(kv.context.llama, own.data(), own.size(), seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != own.size()) {
        llama_memory_seq_rm(llama_get_memory(kv.context.llama), seq_id, -1, -1);
        return fail(err, KVEDGE_E_FILE, "llama.cpp cannot restore its own layers; use the llama.cpp version and the context settings of "
                    "the file");
    }
    return ok(err);
}

bool little_endian() {
    const uint16_t one = 1;
    uint8_t        first;
    memcpy(&first, &one, 1);
    return first == 1;
}

// ---------------------------------------------------------------------------------------------------------
// A sequence

// A sequence to save. The caller has claimed the cache; the sequence must not change while a Saving is used.
struct Saving {
    const kvedge_cache *  kv      = nullptr;
    const SequenceState * state   = nullptr;
    int32_t               pos_max = -1;
    std::vector<uint8_t>  llama;  // llama.cpp's own layers
    bool                  whole = false;  // with the whole rows

    void write(Sink & out) const;
};

kvedge_status check_use(const kvedge_cache & kv, int32_t seq_id, kvedge_error * err) {
    if (const auto status = check_sequence(kv, seq_id, err); status != KVEDGE_OK) {
        return status;
    }
    if (kv.layers.declined) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "kvedge does not store all full-attention layers of this model, so sequences cannot be "
                    "saved");
    }
    return little_endian() ? ok(err) : fail(err, KVEDGE_E_UNSUPPORTED, "session files are little-endian, but this machine is big-endian; "
                                            "use a little-endian machine");
}

// Fills `out` for kvedge_save. Errors: KVEDGE_E_STATE, KVEDGE_E_ARGUMENT, KVEDGE_E_UNSUPPORTED, KVEDGE_E_MEMORY.
kvedge_status prepare_saving(const kvedge_cache & kv, int32_t seq_id, Saving & out, kvedge_error * err) {
    if (const auto status = check_use(kv, seq_id, err); status != KVEDGE_OK) {
        return status;
    }
    const SequenceState * state = kv.sequences.find(seq_id);
    if (!state) {
        return fail(err, KVEDGE_E_STATE, "sequence %d is empty; there is nothing to save", seq_id);
    }
    if (state->streaming ? state->has_uncompressed_prompt : state->seq->observed.have().any()) {
        return fail(err, KVEDGE_E_STATE, "the prompt of the sequence is not compressed yet; compress the prompt before you save the "
                    "sequence");
    }
    if (state->verified) {
        return fail_verifying(err);
    }
    llama_synchronize(kv.context.llama);
    if (const auto status = kv.to_host(*state, err); status != KVEDGE_OK) {
        return status;
    }
    out = { &kv, state, llama_memory_seq_pos_max(llama_get_memory(kv.context.llama), seq_id), llama_part(kv.context.llama, seq_id), kv.keeping.saved() && state->whole.seq };
    return ok(err);
}

void Saving::write(Sink & out) const {
    write_state(*kv, *state, pos_max, out);
    write_sequence(*state->seq, out);
    out.value<uint64_t>(llama.size());
    out.values(llama);
    if (whole) {
        out.value<int32_t>(state->whole.n_read);
        write_whole(*state->whole.seq, out);
    }
}

// Reads whole rows if the cache keeps them; else reads their bytes for the checksum alone. False: damaged.
bool read_whole_rows(Reader & in, const kvedge_cache & kv, const Storage & storage, SequenceState & state) {
    if (!kv.keeping.on()) {
        return in.skip();
    }
    if (!in.value(state.whole.n_read)) {
        return false;
    }
    state.whole.seq = read_whole(in, kv.layers.shapes, storage);
    const int32_t n = state.whole.seq ? state.whole.seq->rows.n_tokens() : 0;
    return n > 0 && n <= state.seq->rows.n_tokens() && state.whole.n_read >= 0 && state.whole.n_read <= n;
}

// Reads what Saving::write() wrote, and its checksum, into an empty sequence. name: of the file, for messages.
// Errors: those of kvedge_load.
kvedge_status read_saved(kvedge_cache & kv, int32_t seq_id, Reader & in, const Frame & frame, const char * name, kvedge_error * err) {
    in.limit_to(frame.payload_bytes);
    Storage storage;
    if (const auto status = read_shapes(in, kv, storage, name, err); status != KVEDGE_OK) {
        return status;
    }
    SequenceState        state;
    state.id = seq_id;
    std::vector<uint8_t> own;
    int32_t              pos_max = -1;
    uint64_t             n_own   = 0;
    uint32_t             sum     = 0;
    if (!read_state(in, kv, storage, state, pos_max) || !in.value(n_own) || !in.values(own, n_own) ||
        (frame.version >= WHOLE_VERSION && !read_whole_rows(in, kv, storage, state)) || in.left() != 0) {
        return damaged(name, err);
    }
    const uint32_t expected = in.take_checksum();
    in.unlimit();
    if (!in.value(sum) || sum != expected || (n_own > 0 && !llama_keeps_layers(kv.context.llama))) {
        return damaged(name, err);
    }
    state.peak_bytes = 0;  // counts from here on, in this process
    state.note_peak();
    std::map<int32_t, SequenceState> loaded;
    loaded.emplace(seq_id, std::move(state));
    if (const auto status = enter(kv, seq_id, pos_max, own, err); status != KVEDGE_OK) {
        return status;
    }
    kv.sequences.all.merge(loaded);  // allocates nothing and cannot fail: llama.cpp has the sequence already
    if (SequenceState & there = *kv.sequences.find(seq_id); there.whole.seq) {
        kv.keeping.take_in(there);
    }
    return ok(err);
}

// ---------------------------------------------------------------------------------------------------------
// A file

constexpr uint32_t PLAIN_VERSION = 1, ROTATED_VERSION = 2, BIASED_VERSION = 3;
static_assert(WHOLE_VERSION == KVEDGE_SESSION_VERSION, "the newest one");

// Returns the oldest version that can hold the sequence, so that older libraries can read most files.
uint32_t version_of(const Saving & saving) {
    const Store & rows = saving.state->seq->rows;
    if (saving.whole) {
        return WHOLE_VERSION;
    }
    if (biased(rows)) {
        return BIASED_VERSION;
    }
    return is_rotated(rows.storage().k) || is_rotated(rows.storage().v) ? ROTATED_VERSION : PLAIN_VERSION;
}

// Writes header, sequence and checksums, to a file or to memory.
void write_framed(const Saving & saving, const char * model, const void * note, size_t n_note, SummedSink & out) {
    Sink nowhere;
    saving.write(nowhere);
    write_head(out, version_of(saving), model, note, n_note, nowhere.size());
    out.value<uint32_t>(out.take_checksum());
    (void) out.take_checksum();
    saving.write(out);
    out.value<uint32_t>(out.take_checksum());
}

// Reads header and sequence. name: of the file, for messages.
kvedge_status read_framed(kvedge_cache & kv, int32_t seq_id, Reader & in, const char * name, const char * model, kvedge_error * err) {
    Frame frame;
    if (const auto status = read_frame(in, name, frame, err); status != KVEDGE_OK) {
        return status;
    }
    if (frame.model != model) {
        return fail(err, KVEDGE_E_FILE, "%s was saved with another model; use the model that the file was saved with", name);
    }
    return read_saved(kv, seq_id, in, frame, name, err);
}

kvedge_status check_empty(kvedge_cache & kv, int32_t seq_id, kvedge_error * err) {
    if (const auto status = check_use(kv, seq_id, err); status != KVEDGE_OK) {
        return status;
    }
    const bool empty = !kv.sequences.all.count(seq_id) && llama_memory_seq_pos_max(llama_get_memory(kv.context.llama), seq_id) < 0;
    return empty ? ok(err) : fail(err, KVEDGE_E_STATE, "sequence %d holds tokens; remove these tokens before you load a saved sequence",
                                  seq_id);
}

constexpr char UNNAMED[] = "a session file needs a cache, a path, and a model name of at most 255 bytes";
constexpr char UNPLACED[] = "a packed sequence needs a cache, a buffer, and a model name of at most 255 bytes";
static_assert(MAX_MODEL == 255, "what they say");

bool named(const void * place, const char * model) { return place && model && strlen(model) <= MAX_MODEL; }

}  // namespace

extern "C" kvedge_status kvedge_save(
    kvedge_cache * kv, int32_t seq_id, const char * path, const char * model, const void * note, size_t n_note,
    kvedge_error * err) {
    return claimed(kv, named(path, model), UNNAMED, "save the sequence", err, [&] {
        if ((n_note > 0 && !note) || n_note > MAX_NOTE) {
            return fail(err, KVEDGE_E_ARGUMENT, "kvedge_save: the note is NULL or longer than 64 MiB");
        }
        Saving     saving;
        FileWriter file;
        if (const auto status = prepare_saving(*kv, seq_id, saving, err); status != KVEDGE_OK) {
            return status;
        }
        if (const auto status = file.open(path, err); status != KVEDGE_OK) {
            return status;
        }
        write_framed(saving, model, note, n_note, file);
        return file.commit(err);
    });
}

extern "C" kvedge_status kvedge_pack(
    kvedge_cache * kv, int32_t seq_id, const char * model, void * data, size_t * n_data, kvedge_error * err) {
    return claimed(kv, named(n_data, model) && (data || *n_data == 0), UNPLACED, "pack the sequence", err, [&] {
        Saving saving;
        if (const auto status = prepare_saving(*kv, seq_id, saving, err); status != KVEDGE_OK) {
            return status;
        }
        BytesWriter  out(data, *n_data);
        const size_t room = *n_data;
        write_framed(saving, model, nullptr, 0, out);
        *n_data = (size_t) out.size();
        return !data || out.size() <= room
                   ? ok(err)
                   : fail(err, KVEDGE_E_ARGUMENT, "kvedge_pack: the buffer has %zu bytes, but the sequence needs %zu; pass a larger "
                          "buffer", room, *n_data);
    });
}

extern "C" kvedge_status kvedge_load(kvedge_cache * kv, int32_t seq_id, const char * path, const char * model, kvedge_error * err) {
    return claimed(kv, named(path, model), UNNAMED, "load the sequence", err, [&] {
        if (const auto status = check_empty(*kv, seq_id, err); status != KVEDGE_OK) {
            return status;
        }
        FileReader file;
        const auto status = file.open(path, err);
        return status == KVEDGE_OK ? read_framed(*kv, seq_id, file, path, model, err) : status;
    });
}

extern "C" kvedge_status kvedge_unpack(
    kvedge_cache * kv, int32_t seq_id, const char * model, const void * data, size_t n_data, kvedge_error * err) {
    return claimed(kv, named(data, model), UNPLACED, "unpack the sequence", err, [&] {
        if (const auto status = check_empty(*kv, seq_id, err); status != KVEDGE_OK) {
            return status;
        }
        BytesReader in(data, n_data);
        return read_framed(*kv, seq_id, in, "the packed sequence", model, err);
    });
}
