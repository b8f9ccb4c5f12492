// The frame of a session file: head (magic, version, lengths, model, note), checksum of the head, payload, checksum of the payload.

#pragma once

#include "system/error.h"
#include "kvedge.h"
#include "system/file.h"

#include <string>
#include <vector>

namespace kvedge {

constexpr uint64_t MAX_NOTE  = 64ull << 20;
constexpr size_t   MAX_MODEL = sizeof(kvedge_saved::model) - 1;

constexpr uint32_t WHOLE_VERSION = 4;  // first version with the rows of all tokens; every file of this version or newer has them

struct Frame {
    uint32_t             version       = 0;
    std::string          model;
    std::vector<uint8_t> note;
    uint64_t             note_bytes    = 0;
    uint64_t             payload_bytes = 0;
};

// Reads the head and its checksum, and resets the checksum for the payload. path: for messages. Errors: KVEDGE_E_FILE.
kvedge_status read_frame(Reader & in, const char * path, Frame & frame, kvedge_error * err);

// Writes the head without its checksum. note [n_note] bytes. payload: number of bytes of the payload.
void write_head(Sink & out, uint32_t version, const char * model, const void * note, size_t n_note, uint64_t payload);

inline kvedge_status damaged(const char * name, kvedge_error * err) {
    return fail(err, KVEDGE_E_FILE, "%s is damaged or truncated; use another session file", name);
}

}  // namespace kvedge
