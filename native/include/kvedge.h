// kvedge.h - the whole public C ABI of libkvedge, with what it includes: kvedge-queries.h (what there is, and what a plan asks
// for), kvedge-inspect.h (what a cache holds), kvedge-sessions.h (a sequence in a file), kvedge-stages.h (stages of your own),
// kvedge-arrays.h (compression of plain arrays), kvedge-encoder.h (image encoders), kvedge-images.h (fewer image tokens),
// kvedge-replay.h (a second pass over a prompt).
//
// libkvedge owns the KV memory of a llama.cpp context. It attaches to an existing llama_context, stores keys
// and values per layer and per KV head, attends over them, and after a prompt is complete it compresses the
// prompt's KV pairs and returns the memory to the operating system.
//
//     kvedge_error   err = { 0 };
//     kvedge_plan  * plan = NULL;
//     kvedge_cache * kv   = NULL;
//     kvedge_plan_create(&plan, &err);
//     kvedge_plan_set(plan, "scorer",     "cumulative", &err);   // four stages make a method
//     kvedge_plan_set(plan, "reducer",    "pivotal",    &err);
//     kvedge_plan_set(plan, "text_prior", "true",       &err);
//     kvedge_plan_set(plan, "budget",     "0.2",        &err);   // share of the prompt that is kept
//     if (kvedge_attach(ctx, plan, NULL, &kv, &err) != KVEDGE_OK) { fprintf(stderr, "%s\n", err.message); }
//     ... llama_decode(ctx, prompt) as always; the first generated token triggers the compression ...
//     kvedge_detach(kv);
//     kvedge_plan_free(plan);
//
// Conventions
//   - Every function that can fail returns a kvedge_status and, when `err` is not NULL, fills a message that
//     says what is wrong and what to do. No function aborts, throws, or writes to stdout or stderr.
//   - Shapes are row-major, the last index contiguous. Symbols: L layers, H query heads, Hkv KV heads
//     (query head h reads KV head h / (H / Hkv)), T tokens, d head size.
//   - A "KV pair" is one token's key row and value row of one KV head of one layer. Budgets are counted in KV pairs
//     per layer and KV head.
//   - A handle is used by one thread at a time: the thread that calls llama_decode on the context. A function that takes a
//     kvedge_cache, called from a second thread while one is in such a function, or in llama_decode until its last graph
//     is computed, returns KVEDGE_E_STATE (-1 where it returns a number) and does nothing. llama_decode and the
//     llama_memory_* functions wait for such a function of another thread; beside another llama_decode they do nothing to
//     the cache, and leave the error for kvedge_take_error.
//     kvedge_detach waits instead. llama.cpp itself does not notice: a program keeps its threads apart, as for llama_decode.
//   - There is no global mutable state but for the handlers of kvedge_last_words; any number of caches can exist in one
//     process.
//   - Structs that begin with struct_size may get more fields, at their end. The caller sets struct_size to the sizeof of its
//     header, and what both sides know is copied. What the library reads: fields that an older program lacks have their
//     defaults; bytes of a newer one that this library does not know must be 0, else KVEDGE_E_ARGUMENT. What it fills: fields
//     that this library does not know become 0. A struct_size below that of the first version: KVEDGE_E_ARGUMENT.
//     Structs without a struct_size, and what callbacks are given, never change.

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

// Goes up when a program that was built with older headers would go wrong: a function, a field or a constant is gone, or
// means something else. Within a version functions, constants and fields are only added. A program refuses a library of
// another version:
//
//     if (kvedge_abi_version() != KVEDGE_ABI_VERSION) { ... "libkvedge and this program do not fit" ... }
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

// KVEDGE_ABI_VERSION of the library that was loaded.
KVEDGE_API int32_t kvedge_abi_version(void);

// Instruction set chosen at run time for the kernels: "avx512vnni", "avx512", "avx2", "neoni8mm",
// "neondot", "neon" or "generic". Static storage.
KVEDGE_API const char * kvedge_simd(void);

// Name of table i of the kernels that this processor can run, the chosen one first; NULL past the end. Static storage.
KVEDGE_API const char * kvedge_kernels(int32_t i);

// Runs every kernel of the table of that name on made-up rows of every storage type and compares with plain loops in double
// precision, to 2e-4 of the sum of the absolute values of what is added up. Takes milliseconds. May be called from any
// thread. A processor that cannot run the library's code ends the process here as anywhere else: call it in a child process.
// Errors: KVEDGE_E_UNSUPPORTED (a kernel's result is wrong; the message names it), KVEDGE_E_UNKNOWN, KVEDGE_E_ARGUMENT,
// KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_check_kernels(const char * name, kvedge_error * err);

// Makes llama.cpp ready to compute where its CPU code comes as one library per generation of processors (builds with
// KVEDGE_PORTABLE, such as wheels): loads the one for this processor, and other backends of ggml, from the folder in which
// libkvedge lies. ggml_backend_load_all() would look beside the program and in the current folder only. Call it once,
// before a model is loaded:
//
//     if (kvedge_load_backends(&err) != KVEDGE_OK) { fprintf(stderr, "%s\n", err.message); return 1; }
//     llama_model * model = llama_model_load_from_file(...);
//
// Does nothing where ggml has a CPU backend already, so that it can be called anyway, and again. From any thread, but not
// while another loads backends or sets llama.cpp's log by itself: the log is silent meanwhile.
// Errors: KVEDGE_E_FILE (no CPU backend that runs on this processor lies beside libkvedge), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_load_backends(kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Stages: the members that this library can run.

typedef enum kvedge_stage {
    KVEDGE_STAGE_SCORER    = 0,  // how much does a KV pair matter?
    KVEDGE_STAGE_ALLOCATOR = 1,  // how many does each layer and KV head keep?
    KVEDGE_STAGE_REDUCER   = 2,  // what becomes of the others?
    KVEDGE_STAGE_DECODE    = 3,  // what happens as tokens are generated?
    KVEDGE_STAGE_PRUNER    = 4,  // which rows of an image does the model read? (kvedge-images.h)
} kvedge_stage;

// Number of members of a stage (0 for a stage that does not exist), and the name of member i (NULL past the end).
KVEDGE_API int32_t      kvedge_stage_count(kvedge_stage stage);
KVEDGE_API const char * kvedge_stage_name(kvedge_stage stage, int32_t i);

// ---------------------------------------------------------------------------------------------------------
// Plans

// A new plan keeps everything: scorer "position", allocator "uniform", reducer "evict", decode "keep-all", budget 1.0.
KVEDGE_API kvedge_status kvedge_plan_create(kvedge_plan ** out, kvedge_error * err);
KVEDGE_API void          kvedge_plan_free(kvedge_plan * plan);  // NULL is allowed

// Sets one field from text. Keys:
//   scorer, allocator, reducer, decode, pruner   name of a stage member
//   budget      "0.2": share of the prompt kept, in (0, 1];  "128": KV pairs per layer and KV head, an integer >= 1
//               ("1.0" is the ratio, "1" is one pair)
//   image_tokens   what the pruner leaves of an image (kvedge-images.h): "0.5" of its tokens, in (0, 1], or "288", >= 1
//   recent      last tokens of the prompt that are always kept, inside the budget: "16" pairs, or "0.1" of the prompt,
//               or "auto": half of the budget with scorer cumulative (H2O and LOOK-M: a1 = a2), the window, but at most
//               half of the budget, with scorer window (SnapKV) and mixkv (scorer.parts: another part), a tenth of the
//               budget and at least 1 with scorer mean (RoCo), 32, but at most half of the budget, with scorer keydiff and
//               expected, 1 with scorer modal, whose scores keep the end of the text besides (scorer.parts, text), what a scorer of
//               your own says, 0 with any other
//   sinks       first tokens of the prompt that are always kept, inside the budget: an integer >= 0
//   text_prior  "true": text tokens rank above all image tokens (LOOK-M eq. 5)
//   critical    "l1" or "l2": what the best half by score leaves is chosen by (score + 1e-4) times the norm of what a value adds
//               through the output projection (CriticalKV); with scorers of attention alone. "none": by score
//   critical_half  "budget": protected tokens count as chosen by score, as released; "free": half of the others is
//   scorer.NAME, allocator.NAME, reducer.NAME, decode.NAME   a setting of the member chosen for that stage, for example
//               scorer.window with scorer "window"; choosing a member resets its settings
//   later_floor    tokens that a later message keeps at least, where the budget is a share: an integer >= 0, 32 unless set, since
//                  a fifth of a short question does not say what is asked
//   text_overflow  "budget": the weakest text is dropped when text alone exceeds the budget (LOOK-M eq. 8), or
//                  "keep_all": all text is kept, beyond the budget if need be (LOOK-M's released code)
// Errors: KVEDGE_E_UNKNOWN (key or member), KVEDGE_E_ARGUMENT (value does not parse), KVEDGE_E_BUDGET (out of range).
KVEDGE_API kvedge_status kvedge_plan_set(kvedge_plan * plan, const char * key, const char * value, kvedge_error * err);

// Gives a stage the calibrated numbers of a model that its member works with; choosing another member drops them.
//   allocator "heads"    values [n_layers][n_columns]: how much each query head matters, >= 0, in any unit (SparseMM's visual
//                        score, HeadKV's retrieval score); n_columns = H; budgets NULL
//   allocator "prefix" with allocator.source "profile"    values [n_layers][n_columns]: share of the prompt that each layer
//                        keeps, in [0, 1], at the mean budgets [n_columns], ascending in (0, 1] (PrefixKV, offline); between
//                        two budgets the share is interpolated
//   scorer "mixkv" with scorer.source "profile" and scorer.mode "headwise"    values [n_layers][n_columns]: redundancy of each
//                        KV head, in [0, 1], to mix by instead of the prompt's own (MixKV eq. 4, offline); n_columns = Hkv;
//                        budgets NULL
//   allocator "calibrated"    values [n_layers][n_columns]: share of all pairs that each KV head keeps, >= 0, in any unit, or with
//                        allocator.share_of "prompt" its share of the prompt; n_columns = Hkv; budgets NULL
// Each stage has a profile of its own. n_layers counts all layers of the model, row i being layer i, also those that kvedge
// does not store. All is copied.
// values NULL: the stage has no profile any more.
//
//     kvedge_plan_set(plan, "allocator", "heads", &err);
//     kvedge_plan_set_profile(plan, KVEDGE_STAGE_ALLOCATOR, scores, NULL, 32, 32, &err);
//
// Errors: KVEDGE_E_ARGUMENT (the member takes no profile, or the numbers are out of range), KVEDGE_E_MEMORY. A profile that
// is missing, or of another shape than the model, is refused with KVEDGE_E_ARGUMENT by kvedge_attach, kvedge_set_plan and
// kvedge_compress_arrays.
KVEDGE_API kvedge_status kvedge_plan_set_profile(
    kvedge_plan * plan, kvedge_stage stage, const float * values, const float * budgets, int32_t n_layers, int32_t n_columns,
    kvedge_error * err);

// Checks that the fields fit together (for example that the budget in pairs is not below recent + sinks in pairs).
KVEDGE_API kvedge_status kvedge_plan_check(const kvedge_plan * plan, kvedge_error * err);

// KV pairs per layer and KV head that the plan keeps of a prompt of n_tokens: floor(n_tokens * ratio + 1e-9), at least 1,
// at most n_tokens; or the budget in pairs. All of them where the scorer's window covers the prompt (SnapKV). 0 if
// n_tokens <= 0.
KVEDGE_API int32_t kvedge_plan_budget(const kvedge_plan * plan, int32_t n_tokens);

// ---------------------------------------------------------------------------------------------------------
// The cache of a llama_context

typedef enum kvedge_type {
    KVEDGE_TYPE_F16   = 0,  // IEEE half precision, llama.cpp's default
    KVEDGE_TYPE_BF16  = 1,
    KVEDGE_TYPE_F32   = 2,
    // Quantised types. A prompt is scored and merged in f16, and quantised when it is compressed or, where the budget covers
    // it, complete; generated tokens are f16 until 32 of them are there. Head sizes must be multiples of 32.
    KVEDGE_TYPE_Q8_0  = 3,  // llama.cpp's blocks: 32 channels of a token share a scale; 8.5 bits a number
    KVEDGE_TYPE_Q4_0  = 4,  // 4.5 bits a number
    // KIVI (Liu et al. 2024): keys share scale and minimum per channel over 32 tokens, values per token over 32 channels;
    // keys that fill no group yet and the newest 32 (while generating, up to 63) values stay f16
    KVEDGE_TYPE_KIVI4 = 5,  // 4 bits, 5 with scales
    KVEDGE_TYPE_KIVI2 = 6,  // 2 bits, 3 with scales
    KVEDGE_TYPE_TQ3   = 7,  // as TurboQuant (Zandieh et al. 2025): 8 levels for rotated rows; 3.5 bits with a scale for 32 channels
    KVEDGE_TYPE_SAME  = -1, // in kvedge_options: as `type`
    KVEDGE_TYPE_LAST  = 63, // a library may have more types, up to this number: kvedge_type_name
} kvedge_type;

// Where keys and values lie, and where attention over them is computed.
typedef enum kvedge_devices {
    KVEDGE_DEVICES_AUTO = 0,  // with the weights of their layer: on a GPU or another machine what llama.cpp put there
    KVEDGE_DEVICES_NONE = 1,  // on the host, all of them; their way to a GPU's layer and back is paid for every token
    KVEDGE_DEVICES_ALL  = 2,  // as AUTO, and the CPU's layers too go through ggml's operations: to compare with
} kvedge_devices;

// Whether rows of q8_0, q4_0 and tq3 are rotated before they are quantised: every 64 numbers of a value, and as many of a key as
// the largest power of two that divides its size, are multiplied by a normalised Hadamard matrix, and by it again when they are
// read. Channels that stand out then take less of the others' bits; where none does, it changes little. What is scored, merged
// and read back are the rows themselves.
typedef enum kvedge_rotate {
    // as llama.cpp has its own cache: keys where all layers' are of the same size, a multiple of 64, and values likewise; but not
    // where a layer's rows lie on a device
    KVEDGE_ROTATE_AUTO = 0,
    KVEDGE_ROTATE_OFF  = 1,
    KVEDGE_ROTATE_ON   = 2,  // sizes are multiples of 64; quantised rows lie on the host
} kvedge_rotate;

typedef struct kvedge_options {
    size_t      struct_size;    // set by kvedge_options_init
    kvedge_type type;           // storage type of keys and values
    int32_t     n_threads;      // threads of the compression; 0: the context's n_threads_batch
    bool        auto_compress;  // compress by itself when the first token after a prompt is decoded
    kvedge_type type_k;         // storage type of keys, where it is not `type`
    kvedge_type type_v;         // and of values
    int32_t     unused;         // not read
    // Where rows lie. Quantised types other than q8_0 and q4_0 keep them on the host, also these two where heads have no flash
    // attention. What a device's attention does not give - prompts for allocator entropy, streams, bounded prompts, decode
    // policies by score, watched tokens - takes place on the host, with the rows fetched;
    // they go back with the next token that a device can attend to.
    kvedge_devices devices;
    kvedge_rotate  rotate;      // of q8_0, q4_0 and tq3
} kvedge_options;

// Fills options [struct_size bytes] with the defaults: f16, 0, true, KVEDGE_TYPE_SAME twice, KVEDGE_DEVICES_AUTO,
// KVEDGE_ROTATE_AUTO.
//
//     kvedge_options options;
//     kvedge_options_init(&options, sizeof(options), NULL);
//     options.type = KVEDGE_TYPE_Q8_0;
//
// Errors: KVEDGE_E_ARGUMENT (NULL, or a size that is too small).
KVEDGE_API kvedge_status kvedge_options_init(kvedge_options * options, size_t struct_size, kvedge_error * err);

// Takes over the KV memory of `ctx`. The context must hold no tokens. From now on llama_decode stores and attends
// through the cache for every full-attention layer; sliding-window, recurrent and MLA layers stay as they are.
// plan: copied; NULL keeps everything. options: NULL for the defaults.
// Errors: KVEDGE_E_ARGUMENT (ctx or out is NULL, options that contradict themselves), KVEDGE_E_NOTHING (no layer to take over; the context is unchanged and usable), KVEDGE_E_STATE (tokens present,
// or another provider attached), KVEDGE_E_BUDGET, KVEDGE_E_MEMORY, KVEDGE_E_UNSUPPORTED (head sizes that the storage type
// cannot hold, or that cannot be rotated, or scorer expected where it is not known how the model turns queries by their
// positions; the context is unchanged and usable).
KVEDGE_API kvedge_status kvedge_attach(
    struct llama_context * ctx, const kvedge_plan * plan, const kvedge_options * options, kvedge_cache ** out,
    kvedge_error * err);

// Gives the context back to llama.cpp (its memory is cleared: the tokens are gone) and frees the cache.
// NULL is allowed. Also right after llama_free(ctx). Waits for a call of another thread that is under way.
KVEDGE_API void kvedge_detach(kvedge_cache * kv);

// Replaces the plan; the prompts that complete from now on are compressed by it, and their answers follow its decode policy.
// Errors: as kvedge_attach's of plans.
KVEDGE_API kvedge_status kvedge_set_plan(kvedge_cache * kv, const kvedge_plan * plan, kvedge_error * err);

// Gives one sequence a plan of its own, in place of the cache's; it stays the sequence's when that is emptied and filled
// again. plan: copied; NULL: the cache's again. A copy of a sequence (llama_memory_seq_cp) follows its own number's plan.
// What several sequences send in one batch is gathered and compressed for each by its plan.
//
//     kvedge_set_sequence_plan(kv, 3, careful, &err);
//
// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_BUDGET, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_set_sequence_plan(
    kvedge_cache * kv, int32_t seq_id, const kvedge_plan * plan, kvedge_error * err);

// Switches automatic compression on or off (kvedge_options.auto_compress). While it is off, a prompt lasts until
// kvedge_compress: tokens that come one by one are part of it.
KVEDGE_API kvedge_status kvedge_set_auto_compress(kvedge_cache * kv, bool on, kvedge_error * err);

// Compresses, now, the tokens of sequence seq_id that were added since its last compression, and returns their
// memory. Does nothing (KVEDGE_OK) when there are none, when the budget covers them all (a quantised storage type is
// written even then), or in the middle of an answer
// that a decode policy bounds. Where recent and sinks ask for more than the budget, they give way: recent tokens outlast
// sinks, with scorer position it is the other way round.
// A failure leaves the sequence as it was. Errors: KVEDGE_E_STATE, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_compress(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);

// Says that n_tokens more of sequence seq_id follow soon, in batches of any size. Buffers on devices are then made once for
// all of them, instead of growing by halves; rows on the host grow without copies, and nothing is done for them. A device that
// has no memory for so many refuses the first batch (KVEDGE_E_MEMORY, kvedge_take_error). A number that does not come true
// costs memory until the next compression. Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_STATE.
KVEDGE_API kvedge_status kvedge_expect(kvedge_cache * kv, int32_t seq_id, int32_t n_tokens, kvedge_error * err);

// Bounded prefill. The next llama_decode of sequence seq_id brings a whole prompt, n_tokens of them in one batch of its own
// (tokens, or embeddings for text and images alike: then image_mask [n_tokens] says which are of an image; NULL: none). The
// prompt goes through each layer at once, and the layer is compressed before the next one runs: the peak is what is kept
// and one layer of the whole prompt, not the full cache. The kept sets are those of the ordinary way (but see
// kvedge_plan_check_bounded for budgets that need all layers). Afterwards the prompt
// counts as compressed, whatever auto_compress says. n_ubatch of the context must be n_tokens or more.
//
//     kvedge_bound_prompt(kv, 0, mask, n, &err);
//     if (llama_decode(ctx, batch) != 0 || kvedge_compress(kv, 0, &err) != KVEDGE_OK) { ... }   // compress reports failures
//
// A failure after this call loses the prompt: clear the sequence. Errors: KVEDGE_E_UNSUPPORTED (as
// kvedge_plan_check_bounded), KVEDGE_E_ARGUMENT, KVEDGE_E_STATE, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_bound_prompt(
    kvedge_cache * kv, int32_t seq_id, const uint8_t * image_mask, int32_t n_tokens, kvedge_error * err);

// Layers that the sequence's bounded prompt has behind it: also while llama_decode runs, from any thread, for a progress bar.
// -1: there is none.
KVEDGE_API int32_t kvedge_bounded_layers(const kvedge_cache * kv, int32_t seq_id);

// Whether prompts can be bounded under a plan with keys and values of these types. Allocators spectral (with scorer dct of
// the same gamma) and prefix without a profile grant their budgets when all layers have run: until then every head keeps
// twice the even budget, is trimmed then, and gets no more than that; nothing may be merged or quantised meanwhile. Allocator
// entropy and reducer match cannot be bounded. A stage of the program's own must be thread_safe, and cannot be the allocator.
// Errors: KVEDGE_E_UNSUPPORTED, with the stage that stands in the way; KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_plan_check_bounded(
    const kvedge_plan * plan, kvedge_type type_k, kvedge_type type_v, kvedge_error * err);

// Streams: video, and images without end. Makes sequence seq_id a stream, if it is none yet, and compresses, now, everything
// it holds - what earlier compressions left and what came since - to the plan's budget, a number of KV pairs per layer and
// head. What is left is looked at again the next time, so that memory does not grow, however long the stream: call this
// after every image, or every so many tokens, and while the answer is generated, whose tokens count as well.
//
//     kvedge_plan_set(plan, "budget", "2048", &err);
//     for (each image) { llama_decode(ctx, image); kvedge_compress_stream(kv, 0, &err); }
//     llama_decode(ctx, question); kvedge_compress_stream(kv, 0, &err);   // the answer may begin
//
// Where kvedge stores every layer of the model, llama.cpp's own cells of the sequence are freed, all but the newest: n_ctx
// then bounds what comes between two calls, not the stream (kvedge_cells). Positions go on from token to token and are not
// shifted. kvedge_compress does the same for a sequence that is a stream; a session file of one goes on as a stream when
// this is called after kvedge_load, which changes no row yet. Where llama_memory_seq_rm takes more rows from one head than from another, the others
// give up their oldest ones behind the sinks, so that all hold as many.
// An empty sequence: only the plan is looked at. A failure leaves the rows as they were.
// Errors: KVEDGE_E_UNSUPPORTED (a budget that is a share; an allocator other than uniform; a decode policy; scorer mean, or
// cumulative with share = layer; reducer match; text_overflow = keep_all; a window longer than the budget; a quantised storage type; a
// sequence whose heads hold different numbers of KV pairs), KVEDGE_E_STATE (the plan's scorer saw nothing of what came),
// KVEDGE_E_MEMORY, KVEDGE_E_STAGE.
KVEDGE_API kvedge_status kvedge_compress_stream(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);

// Tokens of the sequence that take up room in llama.cpp's own cache, which has n_ctx places: all of them, or those of a
// stream since its last compression and the newest before it. 0: no such sequence.
KVEDGE_API int32_t kvedge_cells(const kvedge_cache * kv, int32_t seq_id);

// The first error met inside llama_decode (which can only report a failure code) since the last call, or KVEDGE_OK.
// Reading it clears it.
KVEDGE_API kvedge_status kvedge_take_error(kvedge_cache * kv, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// The last line of a program

#define KVEDGE_LAST_WORDS 2000

// From now on a fault in native code ends the process with one line on stderr and exit_code, without a core file. The line is
// `before`, what happened ("segmentation fault"), and `after`. It tells of SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT and
// std::terminate; on Windows of the exceptions that mean the same, where nobody handles them, and of the C library's SIGABRT.
// It is for programs, not for libraries in a program of somebody else: handlers are the whole process's, and stay.
//
//     kvedge_last_words("mine: error: native code crashed: ", "; the log is in mine.log", 1, &err);
//
// before, after: copied; at most KVEDGE_LAST_WORDS bytes of each are written. exit_code: 1 to 255. Any thread may call it,
// and again when the words change. The thread that calls it first gets a stack for handlers, so that an overflow of its own
// stack is told as well. A signal that has a handler already keeps it (Python's faulthandler, a sanitizer); one that is
// ignored stays so. On Windows an older filter of unhandled exceptions is asked first. Not told: SIGKILL, which the system
// sends when memory ends; on Windows __fastfail, and the abort() of another C library than kvedge's.
// Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_last_words(const char * before, const char * after, int32_t exit_code, kvedge_error * err);

#ifdef __cplusplus
}
#endif

#include "kvedge-arrays.h"
#include "kvedge-encoder.h"
#include "kvedge-images.h"
#include "kvedge-inspect.h"
#include "kvedge-queries.h"
#include "kvedge-replay.h"
#include "kvedge-sessions.h"
#include "kvedge-stages.h"

#endif  // KVEDGE_H
