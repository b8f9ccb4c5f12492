// A sequence between the two checksums of a session file: what libkvedge holds of it, and what llama.cpp keeps.

#pragma once

#include "system/error.h"
#include "glue/cache.h"
#include "system/file.h"

namespace kvedge {

// A sequence at rest, for whoever has claimed the cache; it must not change while this is used.
struct Saving {
    const kvedge_cache *  kv      = nullptr;
    const SequenceState * state   = nullptr;
    int32_t               pos_max = -1;
    std::vector<uint8_t>  llama;  // its own layers

    void write(Sink & out) const;
};

// Errors: KVEDGE_E_STATE, KVEDGE_E_ARGUMENT, KVEDGE_E_UNSUPPORTED, KVEDGE_E_MEMORY, as kvedge_save has them.
kvedge_status prepare_saving(const kvedge_cache & kv, int32_t seq_id, Saving & out, kvedge_error * err);

// Reads what write() wrote, and its checksum, into an empty sequence. name: of the file, for messages.
// Errors: as kvedge_load has them.
kvedge_status read_saved(kvedge_cache & kv, int32_t seq_id, Reader & in, uint64_t n_bytes, const char * name, kvedge_error * err);

// Errors: those of both.
kvedge_status check_use(const kvedge_cache & kv, int32_t seq_id, kvedge_error * err);

}  // namespace kvedge
