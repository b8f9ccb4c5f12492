#include "sequence/frame.h"

#include "system/structs.h"

#include <algorithm>
#include <cstring>

namespace kvedge {

static constexpr char MAGIC[8] = { 'k', 'v', 'e', 'd', 'g', 'e', '\x1a', '\n' };

kvedge_status read_frame(Reader & in, const char * path, Frame & frame, kvedge_error * err) {
    char     magic[8];
    uint32_t n_model, sum;
    if (!in.read(magic, sizeof(magic)) || memcmp(magic, MAGIC, sizeof(MAGIC)) != 0) {
        return fail(err, KVEDGE_E_FILE, "%s is not a session file of kvedge; give the name of a session file", path);
    }
    if (!in.value(frame.version)) {
        return damaged(path, err);
    }
    if (frame.version > KVEDGE_SESSION_VERSION) {
        return fail(err, KVEDGE_E_FILE, "%s is a session file of version %u, but this library reads versions up to %d; update kvedge",
                    path, frame.version, KVEDGE_SESSION_VERSION);
    }
    if (frame.version == 0 || !in.value(n_model) || !in.value(frame.note_bytes) || !in.value(frame.payload_bytes) || n_model > MAX_MODEL ||
        frame.note_bytes > MAX_NOTE) {
        return damaged(path, err);
    }
    // the lengths must add up to the file's size before anything is allocated
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

}  // namespace kvedge

using namespace kvedge;

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
    found.whole      = frame.version >= WHOLE_VERSION;
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
