// kvedge-sessions.h - a sequence in a file or in memory, to go on with it later without reading its prompt again. Included by
// kvedge.h, whose conventions hold.
//
// docs/sessions.md has the layout of the file. It holds the compressed rows, not the plan: what comes after is compressed by
// the plan then set, and an answer that a decode policy bounds goes on if that plan has the same policy.
//
//     kvedge_save(kv, 0, "talk.kvs", "my-model", "any bytes", 9, &err);
//     ... another process: the same model, a context with kvedge attached ...
//     kvedge_load(kv, 0, "talk.kvs", "my-model", &err);
//     llama_decode(ctx, ...) goes on at position llama_memory_seq_pos_max(mem, 0) + 1

#ifndef KVEDGE_SESSIONS_H
#define KVEDGE_SESSIONS_H

#include "kvedge.h"

#ifdef __cplusplus
extern "C" {
#endif

// 3 where rows have biases (kvedge_head_biases), 2 where they are rotated (kvedge_rotate), else files are of version 1
#define KVEDGE_SESSION_VERSION 3

// Writes sequence seq_id to `path` (UTF-8). The file appears whole: until everything is on the disk, what was there stays.
// Only its owner may read it. model: a name or hash of the model, at most 255 bytes, that kvedge_load compares.
// note: n_note bytes of the caller's own, at most 64 MiB (NULL if 0).
// Errors: KVEDGE_E_STATE (nothing to save, or a prompt that is not compressed yet: call kvedge_compress), KVEDGE_E_FILE,
// KVEDGE_E_UNSUPPORTED (some full-attention layers are not kvedge's), KVEDGE_E_MEMORY, KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_save(
    kvedge_cache * kv, int32_t seq_id, const char * path, const char * model, const void * note, size_t n_note,
    kvedge_error * err);

// Reads a file of kvedge_save into sequence seq_id, which must be empty. Runs one token through the model, whose outcome
// is thrown away: llama.cpp learns the last position that way. It knows of no other position of the sequence afterwards
// (llama_memory_seq_pos_min is the last one, too). A failure leaves the sequence empty.
// Errors: KVEDGE_E_FILE (damaged, truncated, of a newer version, another model or other layer shapes), KVEDGE_E_ARGUMENT
// (another storage type than the cache's; whether rows are rotated is the file's to say, and so the sequence goes on), KVEDGE_E_STATE (the sequence holds tokens), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_load(kvedge_cache * kv, int32_t seq_id, const char * path, const char * model, kvedge_error * err);

// The same bytes in memory, with no note: to put a conversation aside, to begin several with what they share, or to go on in
// another context of the same model. data [*n_data]; *n_data: the room there, and then the bytes that the sequence takes; NULL
// and 0: only how many. Nothing is changed. Errors: those of kvedge_save; KVEDGE_E_ARGUMENT too where the room is too small.
KVEDGE_API kvedge_status kvedge_pack(
    kvedge_cache * kv, int32_t seq_id, const char * model, void * data, size_t * n_data, kvedge_error * err);

// Reads bytes of kvedge_pack, or of a file of kvedge_save, as kvedge_load reads a file. Errors: those of kvedge_load.
KVEDGE_API kvedge_status kvedge_unpack(
    kvedge_cache * kv, int32_t seq_id, const char * model, const void * data, size_t n_data, kvedge_error * err);

typedef struct kvedge_saved {
    size_t   struct_size;  // set by the caller to sizeof(kvedge_saved) before the call
    uint64_t file_bytes;
    uint64_t note_bytes;
    char     model[256];   // as given to kvedge_save
} kvedge_saved;

// What a file of kvedge_save says at its beginning; the rows are not read, but the length of the file is checked.
// The note goes to note[0 .. min(note_bytes, n_note) - 1]; NULL and 0: only the figures.
// Errors: KVEDGE_E_FILE, KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_read_saved(const char * path, kvedge_saved * out, void * note, size_t n_note, kvedge_error * err);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_SESSIONS_H
