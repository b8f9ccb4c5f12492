
#ifndef KVEDGE_H
#define KVEDGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#    if defined(KVEDGE_BUILD)
#        define KVEDGE_API __declspec(dllexport)
#    else
#        define KVEDGE_API __declspec(dllimport)
#    endif
#else
#    define KVEDGE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KVEDGE_ABI_VERSION 1

struct llama_context;

typedef struct kvedge_plan   kvedge_plan;    // what to keep: a composition of four stages, and a budget
typedef struct kvedge_cache  kvedge_cache;   // the KV memory of one llama_context
typedef struct kvedge_result kvedge_result;  // outcome of kvedge_compress_arrays

typedef enum kvedge_status {
    KVEDGE_OK            = 0,
    KVEDGE_E_ARGUMENT    = 1,  // a pointer, shape, key or value that cannot be used
    KVEDGE_E_UNKNOWN     = 2,  // no stage or setting of that name
    KVEDGE_E_BUDGET      = 3,  // a budget that cannot be met (0, above 1 as a ratio, below the protected tokens)
    KVEDGE_E_MEMORY      = 4,  // the operating system refused memory
    KVEDGE_E_NOTHING     = 5,  // the model has no attention layer that kvedge can take over; it runs as it is
    KVEDGE_E_STATE       = 6,  // the call does not fit the cache's state (context freed, prompt unfinished, ...)
    KVEDGE_E_UNSUPPORTED = 7,  // the model or batch asks for something this version cannot do
    KVEDGE_E_STAGE       = 8,  // a stage of the program's own failed; the message is its
    KVEDGE_E_FILE        = 9,  // a file that cannot be read or written, is damaged, too new, or of another model
} kvedge_status;

typedef struct kvedge_error {
    kvedge_status status;
    char          message[500];  // UTF-8, NUL-terminated, one line
} kvedge_error;

// Version of the library, for example "0.1.0". Static storage.
KVEDGE_API const char * kvedge_version(void);

// KVEDGE_ABI_VERSION of the library that was loaded; differs from the header's when the two do not fit.
KVEDGE_API int32_t kvedge_abi_version(void);

// Instruction set chosen at run time for the kernels: "avx512vnni", "avx512", "avx2", "neoni8mm",
KVEDGE_API const char * kvedge_simd(void);

// Name of table i of the kernels that this processor can run, the chosen one first; NULL past the end. Static storage.
KVEDGE_API const char * kvedge_kernels(int32_t i);

// Runs every kernel of the table of that name on made-up rows of every storage type and compares with plain loops in double
KVEDGE_API kvedge_status kvedge_check_kernels(const char * name, kvedge_error * err);

// Makes llama.cpp ready to compute where its CPU code comes as one library per generation of processors (builds with
KVEDGE_API kvedge_status kvedge_load_backends(kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------

typedef enum kvedge_stage {
    KVEDGE_STAGE_SCORER    = 0,  // how much does a KV pair matter?
    KVEDGE_STAGE_ALLOCATOR = 1,  // how many does each layer and KV head keep?
    KVEDGE_STAGE_REDUCER   = 2,  // what becomes of the others?
    KVEDGE_STAGE_DECODE    = 3,  // what happens as tokens are generated?
} kvedge_stage;

// Number of members of a stage (0 for a stage that does not exist), and the name of member i (NULL past the end).
KVEDGE_API int32_t      kvedge_stage_count(kvedge_stage stage);
KVEDGE_API const char * kvedge_stage_name(kvedge_stage stage, int32_t i);

// ---------------------------------------------------------------------------------------------------------

// A new plan keeps everything: scorer "position", allocator "uniform", reducer "evict", decode "keep-all", budget 1.0.
KVEDGE_API kvedge_status kvedge_plan_create(kvedge_plan ** out, kvedge_error * err);
KVEDGE_API void          kvedge_plan_free(kvedge_plan * plan);  // NULL is allowed

// Sets one field from text. Keys:
KVEDGE_API kvedge_status kvedge_plan_set(kvedge_plan * plan, const char * key, const char * value, kvedge_error * err);

// Gives a stage the calibrated numbers of a model that its member works with; choosing another member drops them.
KVEDGE_API kvedge_status kvedge_plan_set_profile(
    kvedge_plan * plan, kvedge_stage stage, const float * values, const float * budgets, int32_t n_layers, int32_t n_columns,
    kvedge_error * err);

// Checks that the fields fit together (for example that the budget in pairs is not below recent + sinks in pairs).
KVEDGE_API kvedge_status kvedge_plan_check(const kvedge_plan * plan, kvedge_error * err);

// KV pairs per layer and KV head that the plan keeps of a prompt of n_tokens: floor(n_tokens * ratio + 1e-9), at least 1,
KVEDGE_API int32_t kvedge_plan_budget(const kvedge_plan * plan, int32_t n_tokens);

// ---------------------------------------------------------------------------------------------------------

typedef enum kvedge_type {
    KVEDGE_TYPE_F16   = 0,  // IEEE half precision, llama.cpp's default
    KVEDGE_TYPE_BF16  = 1,
    KVEDGE_TYPE_F32   = 2,
    KVEDGE_TYPE_Q8_0  = 3,  // llama.cpp's blocks: 32 channels of a token share a scale; 8.5 bits a number
    KVEDGE_TYPE_Q4_0  = 4,  // 4.5 bits a number
    KVEDGE_TYPE_KIVI4 = 5,  // 4 bits, 5 with scales
    KVEDGE_TYPE_KIVI2 = 6,  // 2 bits, 3 with scales
    KVEDGE_TYPE_SAME  = -1, // in kvedge_options: as `type`
} kvedge_type;

typedef struct kvedge_options {
    size_t      struct_size;    // sizeof(kvedge_options)
    kvedge_type type;           // storage type of keys and values
    int32_t     n_threads;      // threads of the compression; 0: the context's n_threads_batch
    bool        auto_compress;  // compress by itself when the first token after a prompt is decoded
    kvedge_type type_k;         // storage type of keys, where it is not `type`
    kvedge_type type_v;         // and of values
} kvedge_options;

// Defaults: f16, 0, true, KVEDGE_TYPE_SAME twice.
KVEDGE_API kvedge_options kvedge_options_default(void);

// Takes over the KV memory of `ctx`. The context must hold no tokens. From now on llama_decode stores and attends
KVEDGE_API kvedge_status kvedge_attach(
    struct llama_context * ctx, const kvedge_plan * plan, const kvedge_options * options, kvedge_cache ** out,
    kvedge_error * err);

// Gives the context back to llama.cpp (its memory is cleared: the tokens are gone) and frees the cache.
KVEDGE_API void kvedge_detach(kvedge_cache * kv);

// Replaces the plan; the prompts that complete from now on are compressed by it, and their answers follow its decode policy.
KVEDGE_API kvedge_status kvedge_set_plan(kvedge_cache * kv, const kvedge_plan * plan, kvedge_error * err);

// Gives one sequence a plan of its own, in place of the cache's; it stays the sequence's when that is emptied and filled
KVEDGE_API kvedge_status kvedge_set_sequence_plan(
    kvedge_cache * kv, int32_t seq_id, const kvedge_plan * plan, kvedge_error * err);

// Switches automatic compression on or off (kvedge_options.auto_compress). While it is off, a prompt lasts until
KVEDGE_API kvedge_status kvedge_set_auto_compress(kvedge_cache * kv, bool on, kvedge_error * err);

// Compresses, now, the tokens of sequence seq_id that were added since its last compression, and returns their
KVEDGE_API kvedge_status kvedge_compress(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);

// Bounded prefill. The next llama_decode of sequence seq_id brings a whole prompt, n_tokens of them in one batch of its own
KVEDGE_API kvedge_status kvedge_bound_prompt(
    kvedge_cache * kv, int32_t seq_id, const uint8_t * image_mask, int32_t n_tokens, kvedge_error * err);

// Layers that the sequence's bounded prompt has behind it: also while llama_decode runs, from any thread, for a progress bar.
KVEDGE_API int32_t kvedge_bounded_layers(const kvedge_cache * kv, int32_t seq_id);

// Whether prompts can be bounded under a plan with keys and values of these types. Allocators spectral (with scorer dct of
KVEDGE_API kvedge_status kvedge_plan_check_bounded(
    const kvedge_plan * plan, kvedge_type type_k, kvedge_type type_v, kvedge_error * err);

// Streams: video, and images without end. Makes sequence seq_id a stream, if it is none yet, and compresses, now, everything
KVEDGE_API kvedge_status kvedge_compress_stream(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);

// Tokens of the sequence that take up room in llama.cpp's own cache, which has n_ctx places: all of them, or those of a
KVEDGE_API int32_t kvedge_cells(const kvedge_cache * kv, int32_t seq_id);

// The first error met inside llama_decode (which can only report a failure code) since the last call, or KVEDGE_OK.
KVEDGE_API kvedge_status kvedge_take_error(kvedge_cache * kv, kvedge_error * err);

typedef struct kvedge_stats {
    size_t   struct_size;        // set by the caller to sizeof(kvedge_stats) before the call
    int32_t  n_layers;           // layers that kvedge stores (the model may have more)
    int32_t  n_heads_kv;         // KV heads of the first of them
    int32_t  n_tokens;           // tokens of the sequence so far, compressed ones included
    int32_t  n_image_tokens;     // of those, tokens that came as embeddings
    int32_t  n_compressions;     // compressions of the sequence so far
    int32_t  n_pending;          // tokens added since the last compression; of a bounded answer, those in blocks not yet packed;
    uint64_t bytes;              // bytes of the sequence's key and value buffers that exist now
    uint64_t index_bytes;        // bytes of its token indices and positions
    uint64_t score_bytes;        // bytes of column sums, of scores, of watched attention, and of queries kept for allocator
    uint64_t before_bytes;       // `bytes` right before the last compression (the full cache, for a first turn)
    uint64_t after_bytes;        // `bytes` right after it
    uint64_t peak_bytes;         // largest value of bytes + index_bytes + score_bytes so far
    int64_t  compress_us;        // wall time of the last compression, microseconds
} kvedge_stats;

KVEDGE_API kvedge_status kvedge_get_stats(const kvedge_cache * kv, int32_t seq_id, kvedge_stats * out, kvedge_error * err);

// Model layer number of stored layer i (0 <= i < n_layers), or -1.
KVEDGE_API int32_t kvedge_layer_id(const kvedge_cache * kv, int32_t i);

// KV pairs that stored layer i, KV head `head` holds now for the sequence; -1 if there is none such.
KVEDGE_API int32_t kvedge_head_length(const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head);

// Original token index (0 = first token of the sequence) of every KV pair of stored layer i, KV head `head`, ascending,
KVEDGE_API kvedge_status kvedge_head_tokens(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, int32_t * out, int32_t n_out, kvedge_error * err);

// Query heads of stored layer i (H); query head h reads KV head h / (H / Hkv). -1: no such layer.
KVEDGE_API int32_t kvedge_query_heads(const kvedge_cache * kv, int32_t i);

// Switches watching on or off (off after kvedge_attach): whether the attention of tokens that are decoded one by one is
KVEDGE_API kvedge_status kvedge_watch(kvedge_cache * kv, bool on, kvedge_error * err);

// What the sequence's last token paid to each stored KV pair: the softmax weights of query head `query_head` of stored
KVEDGE_API kvedge_status kvedge_attention(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t query_head, float * out, int32_t n_out, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------

// Query heads H, KV heads Hkv and head sizes of stored layer i. Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_layer_shape(
    const kvedge_cache * kv, int32_t i, int32_t * n_heads, int32_t * n_heads_kv, int32_t * d_k, int32_t * d_v, kvedge_error * err);

// Keys [n][d_k] and values [n][d_v] of stored layer i, KV head `head`, in float32, n = kvedge_head_length, in the order of
KVEDGE_API kvedge_status kvedge_head_rows(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, float * k, float * v, int32_t n_out, kvedge_error * err);

// Scores [Hkv][kvedge_stats.n_pending] that the plan's scorer gives to the tokens of stored layer i that were added since the last
KVEDGE_API kvedge_status kvedge_pending_scores(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, float * out, int32_t n_out, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------

#define KVEDGE_SESSION_VERSION 1

// Writes sequence seq_id to `path` (UTF-8). The file appears whole: until everything is on the disk, what was there stays.
KVEDGE_API kvedge_status kvedge_save(
    kvedge_cache * kv, int32_t seq_id, const char * path, const char * model, const void * note, size_t n_note,
    kvedge_error * err);

// Reads a file of kvedge_save into sequence seq_id, which must be empty. Runs one token through the model, whose outcome
KVEDGE_API kvedge_status kvedge_load(kvedge_cache * kv, int32_t seq_id, const char * path, const char * model, kvedge_error * err);

typedef struct kvedge_saved {
    size_t   struct_size;  // set by the caller to sizeof(kvedge_saved) before the call
    uint64_t file_bytes;
    uint64_t note_bytes;
    char     model[256];   // as given to kvedge_save
} kvedge_saved;

// What a file of kvedge_save says at its beginning; the rows are not read, but the length of the file is checked.
KVEDGE_API kvedge_status kvedge_read_saved(const char * path, kvedge_saved * out, void * note, size_t n_note, kvedge_error * err);

#ifdef __cplusplus
}
#endif

#include "kvedge-arrays.h"
#include "kvedge-encoder.h"
#include "kvedge-stages.h"

#endif  // KVEDGE_H
