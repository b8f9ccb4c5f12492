// Saving and loading a sequence: the frame of a file, and of the same bytes in memory.

#include "core/structs.h"
#include "glue/calls.h"
#include "glue/saved.h"

#include <algorithm>
#include <cstring>

using namespace kvedge;

namespace {

constexpr char     MAGIC[8]  = { 'k', 'v', 'e', 'd', 'g', 'e', '\x1a', '\n' };
constexpr uint32_t UNROTATED_VERSION = 1;
constexpr uint64_t MAX_NOTE  = 64ull << 20;
constexpr size_t   MAX_MODEL = sizeof(kvedge_saved::model) - 1;

// ---------------------------------------------------------------------------------------------------------
// The frame: magic, version, lengths, model, note, checksum of all that; the payload; its checksum.

struct Frame {
    std::string          model;
    std::vector<uint8_t> note;
    uint64_t             note_bytes    = 0;
    uint64_t             payload_bytes = 0;
};

kvedge_status read_frame(Reader & in, const char * path, Frame & frame, kvedge_error * err) {
    char     magic[8];
    uint32_t version, n_model, sum;
    if (!in.read(magic, sizeof(magic)) || memcmp(magic, MAGIC, sizeof(MAGIC)) != 0) {
        return fail(err, KVEDGE_E_FILE, "%s is no session file of kvedge", path);
    }
    if (!in.value(version)) {
        return damaged(path, err);
    }
    if (version > KVEDGE_SESSION_VERSION) {
        return fail(err, KVEDGE_E_FILE, "%s is a session file of version %u, this library reads versions up to %d; update kvedge", path,
                    version, KVEDGE_SESSION_VERSION);
    }
    if (version == 0 || !in.value(n_model) || !in.value(frame.note_bytes) || !in.value(frame.payload_bytes) || n_model > MAX_MODEL ||
        frame.note_bytes > MAX_NOTE) {
        return damaged(path, err);
    }
    // the lengths must add up to the file's before anything is allocated
    const uint64_t head = n_model + frame.note_bytes + sizeof(sum), tail = sizeof(sum);
    if (in.left() < head + tail || in.left() - head - tail != frame.payload_bytes) {
        return damaged(path, err);
    }
    frame.model.resize(n_model);
    if (!in.read(&frame.model[0], n_model) || !in.values(frame.note, frame.note_bytes)) {
        return damaged(path, err);
    }
    const uint32_t expected = in.take_checksum();
    if (!in.value(sum) || sum != expected || frame.model.find('\0') != std::string::npos) {
        return damaged(path, err);
    }
    (void) in.take_checksum();
    return ok(err);
}

// Files without rotated rows are as older libraries read them.
uint32_t version_of(const Saving & saving) {
    const Storage & storage = saving.state->seq->rows.storage();
    return is_rotated(storage.k) || is_rotated(storage.v) ? KVEDGE_SESSION_VERSION : UNROTATED_VERSION;
}

void write_head(Sink & out, uint32_t version, const char * model, const void * note, size_t n_note, uint64_t payload) {
    out.write(MAGIC, sizeof(MAGIC));
    out.value<uint32_t>(version);
    out.value<uint32_t>((uint32_t) strlen(model));
    out.value<uint64_t>(n_note);
    out.value<uint64_t>(payload);
    out.write(model, strlen(model));
    if (n_note > 0) {
        out.write(note, n_note);
    }
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
    const bool empty = !kv.seqs.count(seq_id) && llama_memory_seq_pos_max(llama_get_memory(kv.ctx), seq_id) < 0;
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

extern "C" kvedge_status kvedge_read_saved(const char * path, kvedge_saved * out, void * note, size_t n_note, kvedge_error * err) try {
    if (!path || !out || (n_note > 0 && !note) || !write_struct(kvedge_saved{}, out, out->struct_size)) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_read_saved: path, out or note is NULL, or out->struct_size is not set");
    }
    FileReader file;
    Frame      frame;
    if (const auto status = file.open(path, err); status != KVEDGE_OK) {
        return status;
    }
    if (const auto status = read_frame(file, path, frame, err); status != KVEDGE_OK) {
        return status;
    }
    kvedge_saved found{};
    found.file_bytes = file.size();
    found.note_bytes = frame.note_bytes;
    memcpy(found.model, frame.model.c_str(), frame.model.size() + 1);
    write_struct(found, out, out->struct_size);
    const size_t n = std::min(n_note, frame.note.size());
    if (n > 0) {
        memcpy(note, frame.note.data(), n);
    }
    return ok(err);
} catch (...) {
    return caught(err, "read the session file");
}
