// Saving and loading a sequence: a file, and the same bytes in memory.

#include "glue/calls.h"
#include "glue/saved.h"
#include "sequence/frame.h"

#include <cstring>

using namespace kvedge;

namespace {

constexpr uint32_t PLAIN_VERSION = 1, ROTATED_VERSION = 2;

// The oldest one that has all that the sequence needs, so that older libraries read what they can.
uint32_t version_of(const Saving & saving) {
    const Store & rows = saving.state->seq->rows;
    if (rows.biased()) {
        return KVEDGE_SESSION_VERSION;
    }
    return is_rotated(rows.storage().k) || is_rotated(rows.storage().v) ? ROTATED_VERSION : PLAIN_VERSION;
}

// Writes all of it to a file or to memory.
void write_framed(const Saving & saving, const char * model, const void * note, size_t n_note, SummedSink & out) {
    Sink nowhere;
    saving.write(nowhere);
    write_head(out, version_of(saving), model, note, n_note, nowhere.size());
    out.value<uint32_t>(out.take_checksum());
    (void) out.take_checksum();
    saving.write(out);
    out.value<uint32_t>(out.take_checksum());
}

// name: of the file, for messages
kvedge_status read_framed(kvedge_cache & kv, int32_t seq_id, Reader & in, const char * name, const char * model, kvedge_error * err) {
    Frame frame;
    if (const auto status = read_frame(in, name, frame, err); status != KVEDGE_OK) {
        return status;
    }
    if (frame.model != model) {
        return fail(err, KVEDGE_E_FILE, "%s was saved with another model", name);
    }
    return read_saved(kv, seq_id, in, frame.payload_bytes, name, err);
}

kvedge_status check_empty(kvedge_cache & kv, int32_t seq_id, kvedge_error * err) {
    if (const auto status = check_use(kv, seq_id, err); status != KVEDGE_OK) {
        return status;
    }
    const bool empty = !kv.sequences.all.count(seq_id) && llama_memory_seq_pos_max(llama_get_memory(kv.context.llama), seq_id) < 0;
    return empty ? ok(err) : fail(err, KVEDGE_E_STATE, "sequence %d holds tokens; remove them before another is loaded into it", seq_id);
}

constexpr char UNNAMED[] = "a session file needs a cache, a path, and a model name of at most 255 bytes";
constexpr char UNPLACED[] = "a packed sequence needs a cache, its bytes, and a model name of at most 255 bytes";
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
                   : fail(err, KVEDGE_E_ARGUMENT, "kvedge_pack: there is room for %zu bytes, and the sequence takes %zu", room, *n_data);
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
