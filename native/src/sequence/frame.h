// The frame of a session file: magic, version, lengths, model, note, checksum of all that; the payload; its checksum.

#pragma once

#include "system/error.h"
#include "kvedge.h"
#include "system/file.h"

#include <string>
#include <vector>

namespace kvedge {

constexpr uint64_t MAX_NOTE  = 64ull << 20;
constexpr size_t   MAX_MODEL = sizeof(kvedge_saved::model) - 1;

constexpr uint32_t WHOLE_VERSION = 4;  // the first one with whole rows, which all such files have

struct Frame {
    uint32_t             version       = 0;
    std::string          model;
    std::vector<uint8_t> note;
    uint64_t             note_bytes    = 0;
    uint64_t             payload_bytes = 0;
};

// Reads up to the payload, whose checksum begins anew. path: of the file, for messages. Errors: KVEDGE_E_FILE.
kvedge_status read_frame(Reader & in, const char * path, Frame & frame, kvedge_error * err);

// What stands before the first checksum; note [n_note] bytes. payload: bytes that will follow it.
void write_head(Sink & out, uint32_t version, const char * model, const void * note, size_t n_note, uint64_t payload);

inline kvedge_status damaged(const char * name, kvedge_error * err) {
    return fail(err, KVEDGE_E_FILE, "%s is damaged or truncated; it cannot be used", name);
}

}  // namespace kvedge
