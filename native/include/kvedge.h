// kvedge.h - the public C interface of libkvedge, whole.
//
// libkvedge owns the KV memory of a llama.cpp context. It attaches to an existing llama_context, stores keys and values
// for each layer and KV head, and attends over them. When a prompt is complete, it compresses the prompt's KV pairs and returns
// the memory to the operating system.
//
//     // once, before a model is loaded
//     kvedge_error err = { 0 };
//     if (kvedge_load_backends(&err) != KVEDGE_OK) { fprintf(stderr, "%s\n", err.message); return 1; }
//
//     // a plan says what to keep: four stages make a method, and a budget is the share of the prompt that is kept
//     kvedge_plan * plan = NULL;
//     kvedge_plan_create(&plan, &err);
//     kvedge_plan_set(plan, "scorer",    "modal",   &err);
//     kvedge_plan_set(plan, "allocator", "ada",     &err);
//     kvedge_plan_set(plan, "reducer",   "nearest", &err);
//     kvedge_plan_set(plan, "budget",    "0.2",     &err);
//
//     kvedge_cache * kv = NULL;  // of ctx, a llama_context without tokens
//     if (kvedge_attach(ctx, plan, NULL, &kv, &err) != KVEDGE_OK) { fprintf(stderr, "%s\n", err.message); return 1; }
//     ... llama_decode(ctx, prompt) as always; the first generated token triggers the compression ...
//
//     kvedge_detach(kv);
//     kvedge_plan_free(plan);
// examples/c/ask.c is a whole program, and docs/c.md says how to build one.
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
//     the cache, and leave the error for kvedge_take_error. kvedge_detach waits until the other call returns. llama.cpp itself
//     makes no such check: keep your threads apart, as for llama_decode.
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

// ---------------------------------------------------------------------------------------------------------
// Types and errors

// Goes up when a program that was built with older headers would go wrong: a function, a field or a constant is gone, or means something
// else. Within a version functions, constants and fields are only added. A program refuses a library of another version:
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

// ---------------------------------------------------------------------------------------------------------
// The library and its processor

// Version of the library, for example "0.1.0". Static storage.
KVEDGE_API const char * kvedge_version(void);

// KVEDGE_ABI_VERSION of the library that was loaded.
KVEDGE_API int32_t kvedge_abi_version(void);

// Instruction set chosen at run time for the kernels: "avx512vnni", "avx512", "avx2", "neoni8mm",
// "neondot", "neon" or "generic". Static storage.
KVEDGE_API const char * kvedge_simd(void);

// Name of table i of the kernels that this processor can run, the chosen one first; NULL past the end. Static storage.
KVEDGE_API const char * kvedge_kernels(int32_t i);

// Runs every kernel of the table of that name on made-up rows of every storage type and compares with plain loops in double precision, to
// 2e-4 of the sum of the absolute values of what is added up. Takes milliseconds. May be called from any thread. A processor that cannot
// run the library's code ends the process here as anywhere else: call it in a child process. Errors: KVEDGE_E_UNSUPPORTED (a kernel's
// result is wrong; the message names it), KVEDGE_E_UNKNOWN, KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_check_kernels(const char * name, kvedge_error * err);

// Makes llama.cpp ready to compute where its CPU code comes as one library per generation of processors (builds with KVEDGE_PORTABLE, such
// as wheels): loads the one for this processor, and other backends of ggml, from the folder in which libkvedge lies.
// ggml_backend_load_all() would look beside the program and in the current folder only. Call it once, before a model is loaded:
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
    KVEDGE_STAGE_PRUNER    = 4,  // which rows of an image does the model read? ("Fewer image tokens")
} kvedge_stage;

// Number of members of a stage (0 for a stage that does not exist), and the name of member i (NULL past the end).
KVEDGE_API int32_t      kvedge_stage_count(kvedge_stage stage);
KVEDGE_API const char * kvedge_stage_name(kvedge_stage stage, int32_t i);

// A setting of a stage, set as "scorer.NAME" (allocator.NAME, reducer.NAME): a number, or one of several words.
typedef struct kvedge_setting {
    const char * name;             // as a stage's name
    const char * help;             // one line, or NULL
    double       fallback;         // the value if none is set; of words: an index
    double       lowest, highest;  // of a number
    int32_t      step;             // 0: any number; else whole ones, lowest + a multiple of step
    const char * choices;          // "mean,max": one of these words, handed over as its index; NULL: a number
} kvedge_setting;

// ---------------------------------------------------------------------------------------------------------
// Plans

// A new plan keeps everything: scorer "position", allocator "uniform", reducer "evict", decode "keep-all", budget 1.0.
KVEDGE_API kvedge_status kvedge_plan_create(kvedge_plan ** out, kvedge_error * err);
KVEDGE_API void          kvedge_plan_free(kvedge_plan * plan);  // NULL is allowed

// Sets one field from text. Keys:
//   scorer, allocator, reducer, decode, pruner   name of a stage member
//   budget      "0.2": share of the prompt kept, in (0, 1];  "128": KV pairs per layer and KV head, an integer >= 1
//               ("1.0" is the ratio, "1" is one pair)
//   image_tokens   tokens of an image that the pruner keeps ("Fewer image tokens"): "0.5" of them, in (0, 1], or "288", >= 1
//   recent      last tokens of the prompt that are always kept, inside the budget: "16" pairs, or "0.1" of the prompt, or "auto".
//               "auto" depends on the scorer:
//                 cumulative          half of the budget (H2O and LOOK-M: a1 = a2)
//                 window, mixkv       the window, at most half of the budget (SnapKV); scorer.parts names another part
//                 mean                a tenth of the budget, at least 1 (RoCo)
//                 keydiff, expected   32, at most half of the budget
//                 modal               1; its scores keep the end of the text besides (scorer.parts, text)
//                 of your own         the number that it names
//                 any other           0
//   sinks       first tokens of the prompt that are always kept, inside the budget: an integer >= 0
//   text_prior  "true": text tokens rank above all image tokens (LOOK-M eq. 5)
//   critical    "l1" or "l2" (CriticalKV): the first half of the budget goes to the best scores, the second half to the largest
//               (score + 1e-4) * norm of the value behind the output projection. For scorers of attention alone.
//               "none": scores choose the whole budget
//   critical_half  "budget": half of the budget, protected tokens included, as in the released code; "free": half of the pairs
//               that are not protected
//   scorer.NAME, allocator.NAME, reducer.NAME, decode.NAME   a setting of the member chosen for that stage, for example
//               scorer.window with scorer "window"; choosing a member resets its settings
//   later_floor    least number of tokens that a later message keeps where the budget is a share: an integer >= 0, 32 unless set.
//                  A fifth of a short question does not say what is asked
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
// Each stage has a profile of its own. n_layers counts all layers of the model, row i being layer i, also those that kvedge does not store.
// All is copied. values NULL: the stage has no profile any more.
//
//     kvedge_plan_set(plan, "allocator", "heads", &err);
//     kvedge_plan_set_profile(plan, KVEDGE_STAGE_ALLOCATOR, scores, NULL, 32, 32, &err);
//
// Errors: KVEDGE_E_ARGUMENT (the member takes no profile, or the numbers are out of range), KVEDGE_E_MEMORY. A profile that is missing, or
// of another shape than the model, is refused with KVEDGE_E_ARGUMENT by kvedge_attach, kvedge_set_plan and kvedge_compress_arrays.
KVEDGE_API kvedge_status kvedge_plan_set_profile(
    kvedge_plan * plan, kvedge_stage stage, const float * values, const float * budgets, int32_t n_layers, int32_t n_columns,
    kvedge_error * err);

// Checks that the fields fit together (for example that the budget in pairs is not below recent + sinks in pairs).
KVEDGE_API kvedge_status kvedge_plan_check(const kvedge_plan * plan, kvedge_error * err);

// KV pairs per layer and KV head that the plan keeps of a prompt of n_tokens: floor(n_tokens * ratio + 1e-9), at least 1, at most n_tokens;
// or the budget in pairs. All of them where the scorer's window covers the prompt (SnapKV). 0 if n_tokens <= 0.
KVEDGE_API int32_t kvedge_plan_budget(const kvedge_plan * plan, int32_t n_tokens);

// ---------------------------------------------------------------------------------------------------------
// What plans ask for: answers before anything runs

// Setting i of a member of the library, in the order in which the member declares them. kvedge_plan_set takes it as
// "scorer.NAME". A setting whose choices are "true,false" is a switch. NULL past the end, or where there is no such member. Static storage.
//
//     for (int32_t i = 0; (s = kvedge_stage_setting(KVEDGE_STAGE_SCORER, "window", i)); i++) printf("%s: %s\n", s->name, s->help);
KVEDGE_API const kvedge_setting * kvedge_stage_setting(kvedge_stage stage, const char * member, int32_t i);

// What follows from the settings of a member of the library's. Fields that its stage does not have are 0.
typedef struct kvedge_stage_facts {
    size_t       struct_size;   // set by the caller, as are the next two
    int32_t      kept;          // KV pairs that a head keeps,
    int32_t      even;          // and would keep of an even share of the budget
    const char * profile;       // the kind of calibrated profile that it takes, such as "visual-heads"; NULL: none
    int32_t      whole_up_to;   // the longest prompt that is kept whole, whatever the budget
    int32_t      recent;        // last tokens that recent = auto protects in a head that keeps `kept` pairs
    int32_t      reserved;      // pairs of such a head that a second score chooses
    bool         does_without;  // it goes on where a model has no profile
    bool         sinks_first;   // sinks outlast recent tokens when the budget is too small for both
    bool         attends;       // scores are attention and nothing else
    bool         projects;      // it needs the output projection of the layers
    bool         queries;       // it looks at all queries of the prompt
} kvedge_stage_facts;

// settings: [n_settings] in the order of kvedge_stage_setting, of words the index.
// Errors: KVEDGE_E_ARGUMENT (no such member, other settings than it has, struct_size).
KVEDGE_API kvedge_status kvedge_stage_get_facts(
    kvedge_stage stage, const char * member, const double * settings, int32_t n_settings, kvedge_stage_facts * facts, kvedge_error * err);

// Name of storage type 0, 1, 2 and so on, as `kvedge chat --kv-type` and messages have it, and the bytes of 32 stored numbers
// with their share of scales and minima. NULL and 0 past the last. There may be types without a constant in kvedge_type.
KVEDGE_API const char * kvedge_type_name(int32_t type);
KVEDGE_API int32_t      kvedge_type_bytes(int32_t type);

// Number of pairs that the plan keeps of n_tokens that follow a compressed prompt: as kvedge_plan_budget, but a budget that is
// a share keeps at least later_floor of them.
KVEDGE_API int32_t kvedge_plan_later_budget(const kvedge_plan * plan, int32_t n_tokens);

// Whether a stream can be compressed under a plan (kvedge_compress_stream).
// Errors: KVEDGE_E_UNSUPPORTED, with what stands in the way; KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_plan_check_stream(const kvedge_plan * plan, kvedge_error * err);

// Bytes that one layer of n_heads query heads and n_heads_kv KV heads, with keys of d_k numbers, takes beside its keys and
// values while a prompt of n_tokens is read and compressed under the plan: scores, and as far as the stages look at them column
// sums and their squares, entropies, queries of the prompt or of the window, their mean and covariance, and the largest
// attention of each token. 0 where the plan keeps everything.
KVEDGE_API uint64_t kvedge_plan_score_bytes(const kvedge_plan * plan, int32_t n_tokens, int32_t n_heads, int32_t n_heads_kv, int32_t d_k);

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

// Fills options [struct_size bytes] with the defaults: f16, 0, true, KVEDGE_TYPE_SAME twice, KVEDGE_DEVICES_AUTO, KVEDGE_ROTATE_AUTO.
//
//     kvedge_options options;
//     kvedge_options_init(&options, sizeof(options), NULL);
//     options.type = KVEDGE_TYPE_Q8_0;
//
// Errors: KVEDGE_E_ARGUMENT (NULL, or a size that is too small).
KVEDGE_API kvedge_status kvedge_options_init(kvedge_options * options, size_t struct_size, kvedge_error * err);

// Takes over the KV memory of `ctx`. The context must hold no tokens. From now on llama_decode stores and attends through the cache for
// every full-attention layer; sliding-window, recurrent and MLA layers stay as they are. plan: copied; NULL keeps everything. options: NULL
// for the defaults. Errors: KVEDGE_E_ARGUMENT (ctx or out is NULL, options that contradict themselves), KVEDGE_E_NOTHING (no layer to take
// over; the context is unchanged and usable), KVEDGE_E_STATE (tokens present, or another provider attached), KVEDGE_E_BUDGET,
// KVEDGE_E_MEMORY, KVEDGE_E_UNSUPPORTED (head sizes that the storage type cannot hold, or that cannot be rotated, or scorer expected where
// it is not known how the model turns queries by their positions; the context is unchanged and usable).
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
// Errors: KVEDGE_E_ARGUMENT (also where the context has no such sequence), KVEDGE_E_BUDGET, KVEDGE_E_STATE, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_set_sequence_plan(kvedge_cache * kv, int32_t seq_id, const kvedge_plan * plan, kvedge_error * err);

// Switches automatic compression on or off (kvedge_options.auto_compress). While it is off, a prompt lasts until
// kvedge_compress: tokens that come one by one are part of it.
KVEDGE_API kvedge_status kvedge_set_auto_compress(kvedge_cache * kv, bool on, kvedge_error * err);

// Where whole rows stay when a sequence is compressed.
typedef enum kvedge_keep_place {
    KVEDGE_KEEP_NOT    = 0,  // nowhere: what is evicted is gone
    KVEDGE_KEEP_MEMORY = 1,  // in the host's memory
    KVEDGE_KEEP_FILE   = 2,  // in a file without a name, written while the answer is decoded, whose pages are the system's to drop
} kvedge_keep_place;

// Keeps the rows of every sequence that is compressed from now on, and what was observed of them, behind the compressed ones. The answer
// is decoded with the compressed ones. Tokens of a later message attend to all rows, and the compression after them chooses from all rows
// anew, as if the conversation were one prompt. Rows of an answer count as they were computed; for those of the whole cache remove the
// answer's tokens (llama_memory_seq_rm) and decode them again before the message. Not for streams and bounded prompts. folder: UTF-8, of a
// local drive, for KVEDGE_KEEP_FILE; NULL: the current one. most_bytes: of all whole rows together, beyond which the oldest are given up; 0:
// no limit. type: KVEDGE_TYPE_F16 for rows as they are; KVEDGE_TYPE_Q8_0: half as large, rounded, not for kvedge_verify_whole. Where rows
// cannot be kept (a full disk), kvedge_keep_problem says why. Errors: KVEDGE_E_UNSUPPORTED (network drives, head sizes), KVEDGE_E_FILE.
KVEDGE_API kvedge_status kvedge_keep(kvedge_cache * kv, kvedge_keep_place place, const char * folder, uint64_t most_bytes, kvedge_type type,
                                     kvedge_error * err);
// Limits what compressions of a sequence keep of its tokens [first, last), such as an image's: `most` rows at most in every head,
// the best by the scorer's scores; 0: none; negative: the plan decides again. A limit takes the place of those that overlap it. The rest of
// a budget in pairs goes to other tokens; of one that is a share it stays free. Errors: KVEDGE_E_ARGUMENT (no such tokens).
KVEDGE_API kvedge_status kvedge_limit_tokens(kvedge_cache * kv, int32_t seq_id, int32_t first, int32_t last, int32_t most, kvedge_error * err);
// Chooses again, under the plan and limits of now, what a sequence keeps of its whole rows; nothing is read again, and later tokens stay.
// On failure it keeps what it kept. Errors: those of kvedge_compress, KVEDGE_E_STATE (no whole rows), KVEDGE_E_UNSUPPORTED (a decode policy).
KVEDGE_API kvedge_status kvedge_choose_again(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);
// Whether kvedge_save and kvedge_pack write the whole rows of a sequence, too, and what was observed of them, where there are any: a later
// message then chooses as it would without the file. Off at first. Such a file takes as much as the uncompressed cache, and libraries
// before version 4 of session files refuse it. kvedge_load and kvedge_unpack put whole rows where kvedge_keep says now, within its limit;
// in a cache that keeps none they are dropped, and no memory is taken for them. Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_STATE.
KVEDGE_API kvedge_status kvedge_keep_saved(kvedge_cache * kv, bool on, kvedge_error * err);
// Why a sequence has no whole rows although they were asked for; NULL: it has them, or they were not. Until the next call.
KVEDGE_API const char * kvedge_keep_problem(const kvedge_cache * kv, int32_t seq_id);

// Compresses, now, the tokens of sequence seq_id that were added since its last compression, and returns their memory. Does nothing
// (KVEDGE_OK) when there are none, when the budget covers them all (a quantised storage type is written even then), or in the middle of an
// answer that a decode policy bounds. Where recent and sinks together exceed the budget, sinks are dropped first; with scorer position
// recent tokens are. A failure leaves the sequence as it was. Errors: KVEDGE_E_STATE, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_compress(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);

// Returns and clears the first error since the last call, or KVEDGE_OK: of llama_decode, which itself returns only a code, and of
// llama_memory_seq_cp (onto tokens beside those that are copied), seq_add and seq_div, which return nothing: until it is taken llama_decode fails.
KVEDGE_API kvedge_status kvedge_take_error(kvedge_cache * kv, kvedge_error * err);

// Announces n_tokens more of sequence seq_id, in batches of any size. Buffers on devices are then made once for all of them, instead of
// growing by halves; rows on the host grow without copies. A device that has no memory for so many refuses the first batch
// (kvedge_take_error). Where fewer tokens follow, the memory stays until the next compression. Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_STATE.
KVEDGE_API kvedge_status kvedge_expect(kvedge_cache * kv, int32_t seq_id, int32_t n_tokens, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Prompts layer by layer (bounded prefill)
//
// A bounded prompt goes through one layer as a whole, and that layer is compressed before the next one runs. The peak of
// memory is the kept rows and one layer of the whole prompt, not the full cache.
//
//     kvedge_bound_prompt(kv, 0, mask, n, &err);
//     if (llama_decode(ctx, batch) != 0 || kvedge_compress(kv, 0, &err) != KVEDGE_OK) { ... }   // compress reports failures

// Announces that the next llama_decode of sequence seq_id brings a whole prompt of n_tokens in one batch of its own: tokens, or embeddings
// for text and images alike. image_mask [n_tokens]: 1 for an embedding of an image; NULL: there are none. n_ubatch of the context must be
// n_tokens or more. The kept sets are those of a prompt that is not bounded (but see kvedge_plan_check_bounded for budgets that need all
// layers). Afterwards the prompt counts as compressed, whatever auto_compress says. A failure after this call loses the prompt: clear the
// sequence. Errors: KVEDGE_E_UNSUPPORTED (as kvedge_plan_check_bounded), KVEDGE_E_ARGUMENT, KVEDGE_E_STATE, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_bound_prompt(kvedge_cache * kv, int32_t seq_id, const uint8_t * image_mask, int32_t n_tokens, kvedge_error * err);

// Layers of the sequence's bounded prompt that are done, for a progress bar. Any thread may ask, also while llama_decode runs.
// -1: there is no bounded prompt.
KVEDGE_API int32_t kvedge_bounded_layers(const kvedge_cache * kv, int32_t seq_id);

// Whether prompts can be bounded under a plan with keys and values of these types. Allocators spectral (with scorer dct of
// the same gamma) and prefix without a profile grant their budgets when all layers have run: until then every head keeps
// twice the even budget, is trimmed then, and gets no more than that; nothing may be merged or quantised meanwhile. Allocator
// entropy and reducer match cannot be bounded. A stage of the program's own must be thread_safe, and cannot be the allocator.
// Errors: KVEDGE_E_UNSUPPORTED, with the stage that stands in the way; KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_plan_check_bounded(const kvedge_plan * plan, kvedge_type type_k, kvedge_type type_v, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Streams: video, and images without end
//
// Each compression of a stream looks at all rows again, the rows that earlier compressions kept among them, so that memory does not
// grow, however long the stream.
//
//     kvedge_plan_set(plan, "budget", "2048", &err);
//     for (each image) { llama_decode(ctx, image); kvedge_compress_stream(kv, 0, &err); }
//     llama_decode(ctx, question); kvedge_compress_stream(kv, 0, &err);   // the answer may begin

// Makes sequence seq_id a stream, if it is none yet, and compresses all its rows, now, to the plan's budget, which is a number
// of KV pairs per layer and head. Call it after every image, or every so many tokens, and while the answer is generated, whose
// tokens count as well. kvedge_compress does this for a sequence that is a stream already.
//
// Where kvedge stores every layer of the model, llama.cpp's own cells of the sequence are freed, all but the newest: n_ctx then bounds the
// tokens between two calls, not the stream (kvedge_cells). Positions go on from token to token; kvedge_renumber makes them smaller. After
// kvedge_load, the first call makes the loaded sequence a stream again and changes no row. Where llama_memory_seq_rm takes more rows from
// one head than from another, the others give up their oldest rows behind the sinks, so that all heads hold as many rows. Of an empty
// sequence only the plan is checked. A failure leaves the rows as they were. Errors: KVEDGE_E_UNSUPPORTED (a budget that is a share; an
// allocator other than uniform; a decode policy; scorer mean, or cumulative with share = layer; reducer match; text_overflow = keep_all; a
// window longer than the budget; a quantised storage type; a sequence whose heads hold different numbers of KV pairs), KVEDGE_E_STATE (the
// plan's scorer saw nothing of what came), KVEDGE_E_MEMORY, KVEDGE_E_STAGE.
KVEDGE_API kvedge_status kvedge_compress_stream(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);

// Number of the sequence's tokens that hold a cell of llama.cpp's own cache, which has n_ctx cells. In a stream only the tokens
// since its last compression and the newest one before it hold cells. 0: no such sequence.
KVEDGE_API int32_t kvedge_cells(const kvedge_cache * kv, int32_t seq_id);

// Makes positions of a sequence smaller before they pass the length that its model was trained for. Tokens move, and their keys
// turn by the difference (rotary position encoding); values and scores stay. Takes one token's pass through the model.
//
//     if (n_past + n > trained) kvedge_renumber(kv, 0, trained / 2, &n_past, &err);   // before the next n tokens
//
// next: the position at which the next token would come (behind an image of an M-RoPE model: the first one beyond the image); afterwards at most
// `most`, >= 1. Where it is that already, or the sequence is empty, only the model is checked. A token's new position holds for all layers and
// heads. A position of which no head and no whole row (kvedge_keep) holds a token is a gap. The oldest gaps are closed, as many as must be: all
// later distances stay. Where there are too few, the last most / 2 positions keep their distances, and all before share the others in their order,
// several tokens one position if need be. Distances never grow. An image of an M-RoPE model moves as a whole. Whole rows turn, too. Each number of
// a key that turns is rounded once to the storage type. llama.cpp's own cells of the sequence are freed but one, at the last token's new position.
// The logits of the last token are gone: sample before. A failure leaves rows and positions as they were, or gives up whole rows. Errors:
// KVEDGE_E_UNSUPPORTED (quantised keys; whole rows under allocator entropy or reducer match; llama.cpp keeps layers; learned positions; unknown
// turns; positions do not ascend), KVEDGE_E_STATE (a second pass was begun; allocator entropy or reducer match waits for the compression of a
// prompt; llama.cpp could not enter the position, and knows of none of the sequence then), KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_renumber(kvedge_cache * kv, int32_t seq_id, int32_t most, int32_t * next, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Drafts: guesses at the next tokens of an answer, decoded behind its last token in one batch. Several tokens in a batch are a
// prompt to kvedge; a verification says that they are an answer's.
//
//     kvedge_verify_begin(kv, 0, 1 + n_guesses, &err);
//     llama_decode(ctx, last_token_and_guesses);      // logits of every token are asked for
//     kvedge_verify_end(kv, 0, 1 + n_right, &err);    // the guesses that the model does not agree with are gone

// The next n tokens of sequence seq_id, n >= 1, are tokens of its answer; the first one starts a compression that is due. Until
// kvedge_verify_end the sequence cannot be compressed or saved. Errors: KVEDGE_E_STATE (an empty sequence, a prompt that is not
// compressed though the cache does not do it by itself, a verification or a second pass that was not ended), KVEDGE_E_ARGUMENT
// (n is more than kvedge_verify_room), KVEDGE_E_UNSUPPORTED (the decode policy drops rows, a stream, a model with recurrent layers).
KVEDGE_API kvedge_status kvedge_verify_begin(kvedge_cache * kv, int32_t seq_id, int32_t n, kvedge_error * err);

// Begins a verification over whole rows (kvedge_keep): its tokens are those of the whole cache. Tokens that came since the last compression or
// verification over whole rows were drafts: they are removed, and the n tokens begin with the first of them. kvedge_verify_end
// gives the compressed rows those of the tokens that stay. Where these lie on a device, the host attends to whole rows all the same.
// Errors: also KVEDGE_E_STATE (there are no whole rows), KVEDGE_E_UNSUPPORTED (they are q8_0), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_verify_whole(kvedge_cache * kv, int32_t seq_id, int32_t n, kvedge_error * err);

// The first n_accepted of these tokens stay; the others leave the sequence and llama.cpp's own memory. After a llama_decode that
// failed n_accepted is 0; that does nothing where there is no verification. Errors: KVEDGE_E_ARGUMENT (fewer came), KVEDGE_E_STATE.
KVEDGE_API kvedge_status kvedge_verify_end(kvedge_cache * kv, int32_t seq_id, int32_t n_accepted, kvedge_error * err);

// The most tokens that a verification may have now: quantised rows are rounded in groups of 32, and a verification ends with a
// group, so that every token sees the rows that it sees alone. INT32_MAX: no bound; 0: it takes none (kvedge_verify_begin says why).
KVEDGE_API int32_t kvedge_verify_room(const kvedge_cache * kv, int32_t seq_id);

// ---------------------------------------------------------------------------------------------------------
// What a cache holds: its memory, lengths, tokens, rows, attention and scores, for meters, pictures and research

typedef struct kvedge_stats {
    size_t   struct_size;        // set by the caller to sizeof(kvedge_stats) before the call
    int32_t  n_layers;           // layers that kvedge stores (the model may have more)
    int32_t  n_heads_kv;         // KV heads of the first of them
    int32_t  n_tokens;           // tokens of the sequence so far, compressed ones included
    int32_t  n_image_tokens;     // tokens among them that came as embeddings
    int32_t  n_compressions;     // compressions of the sequence so far
    int32_t  n_pending;          // tokens added since the last compression; of a bounded answer, those in blocks not yet packed;
                                 // of a stream, KV pairs that each head holds
    uint64_t bytes;              // bytes of the sequence's key and value buffers, biases of rows included, that exist now
    uint64_t index_bytes;        // bytes of its token indices and positions
    uint64_t score_bytes;        // bytes of column sums, of scores, of watched attention, of queries kept for allocator
                                 // entropy and reducer match, of the mean and covariance of queries, and of the largest attention of each token, that exist now
    uint64_t before_bytes;       // `bytes` right before the last compression (the full cache, for a first turn)
    uint64_t after_bytes;        // `bytes` right after it
    uint64_t peak_bytes;         // largest value of bytes + index_bytes + score_bytes so far
    int64_t  compress_us;        // wall time of the last compression, microseconds
    uint64_t device_bytes;       // of `bytes`, those that lie on devices
    int32_t  n_unfitted;         // heads to which reducer match fitted nothing in the last compression, since fewer queries of
                                 // the prompt were kept than rows were to be fitted; they are as reducer evict leaves them
    int32_t  n_scant;            // heads that it fitted to fewer than twice as many queries as rows
    // of the last compression, where rows lay on devices; else 0:
    uint64_t device_fetched_bytes;  // bytes that came from devices
    uint64_t device_sent_bytes;     // bytes that went to them
    int64_t  device_operations;     // operations of the graphs that ran there
    int64_t  device_measure_us;     // microseconds of each step: what scorers look at is measured there,
    int64_t  device_choose_us;      // the host chooses,
    int64_t  device_gather_us;      // kept rows are gathered there,
    int64_t  device_merge_us;       // evicted rows join them there,
    int64_t  device_upload_us;      // and what the host computed is sent
    int32_t  device_compressed;     // 1: rows on devices were compressed there; 0: on the host, or none lay there
    int32_t  whole_rounded;         // 1: some of the whole rows are stored as q8_0
    uint64_t whole_bytes;           // bytes of whole rows behind the compressed ones (kvedge_keep), beside `bytes`, scores included
    uint64_t whole_file_bytes;      // of whole_bytes, those that lie in a file, whose pages the system may drop from memory
} kvedge_stats;

KVEDGE_API kvedge_status kvedge_get_stats(const kvedge_cache * kv, int32_t seq_id, kvedge_stats * out, kvedge_error * err);
// Model layer number of stored layer i (0 <= i < n_layers), or -1.
KVEDGE_API int32_t kvedge_layer_id(const kvedge_cache * kv, int32_t i);
// Name, as ggml has it, of the device on which the rows of layer i lie ("CUDA0", "RPC0"); NULL: on the host, or no such layer.
// Static storage.
KVEDGE_API const char * kvedge_layer_device(const kvedge_cache * kv, int32_t i);
// Why the last compression of the sequence took place on the host although rows lay on a device: the device and the operation that it
// lacks, or the stage that has no graph. NULL: there is no reason to tell, or no such sequence. Valid until the sequence changes.
KVEDGE_API const char * kvedge_device_problem(const kvedge_cache * kv, int32_t seq_id);
// KV pairs that stored layer i, KV head `head` holds now for the sequence; -1 if there is none such.
KVEDGE_API int32_t kvedge_head_length(const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head);
// Original token index (0 = first token of the sequence) of every KV pair of stored layer i, KV head `head`, ascending,
// into out[0 .. n-1] with n = kvedge_head_length. Errors: KVEDGE_E_ARGUMENT (no such layer, head or sequence; n_out < n).
KVEDGE_API kvedge_status kvedge_head_tokens(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, int32_t * out, int32_t n_out, kvedge_error * err);
// Query heads of stored layer i (H); query head h reads KV head h / (H / Hkv). -1: no such layer.
KVEDGE_API int32_t kvedge_query_heads(const kvedge_cache * kv, int32_t i);
// Switches watching on or off (off after kvedge_attach): whether the attention of tokens that are decoded one by one is kept for
// kvedge_attention. Costs H floats per layer and stored row while it is on (counted in score_bytes), nothing while it is off.
KVEDGE_API kvedge_status kvedge_watch(kvedge_cache * kv, bool on, kvedge_error * err);

// What the sequence's last token paid to each stored KV pair: the softmax weights of query head `query_head` of stored
// layer i over the rows of its KV head, that token's own row included, into out[0 .. n-1] with n = kvedge_head_length, in
// the order of kvedge_head_tokens. They add up to 1, with attention sinks (logits without a row, gpt-oss) to less.
// Errors: KVEDGE_E_ARGUMENT (no such sequence, layer or head; n_out < n), KVEDGE_E_STATE (the last tokens of the sequence
// came several at a time or unwatched, or rows were removed or compressed since).
KVEDGE_API kvedge_status kvedge_attention(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t query_head, float * out, int32_t n_out, kvedge_error * err);
// Query heads H, KV heads Hkv and head sizes of stored layer i. Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_layer_shape(
    const kvedge_cache * kv, int32_t i, int32_t * n_heads, int32_t * n_heads_kv, int32_t * d_k, int32_t * d_v, kvedge_error * err);
// Keys [n][d_k] and values [n][d_v] of stored layer i, KV head `head`, in float32, n = kvedge_head_length, in the order of
// kvedge_head_tokens. n_out: rows that fit k and v. Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_head_rows(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, float * k, float * v, int32_t n_out, kvedge_error * err);

// What is added to the logits of the KV pairs of stored layer i, KV head `head`: natural logarithms, after a soft cap and before
// the softmax, so that a pair stands for e^bias pairs. 0 for pairs that stand for themselves. Into out[0 .. n-1] with
// n = kvedge_head_length, in the order of kvedge_head_tokens. A plan with "reducer.bias" = "mass" makes them: ln of 1 + the pairs
// that were merged into one (four bytes each, counted in kvedge_stats.bytes). Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_head_biases(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, float * out, int32_t n_out, kvedge_error * err);

// Scores [Hkv][kvedge_stats.n_pending] that the plan's scorer gives to the tokens of stored layer i that were added since the last
// compression, without compressing. n_out: floats that fit `out`. Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_STATE (nothing is pending,
// or the plan was set after the prompt and its scorer saw too little), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_pending_scores(const kvedge_cache * kv, int32_t seq_id, int32_t i, float * out, int32_t n_out, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Sessions: a sequence in a file or in memory, to go on with it later without reading its prompt again
//
// docs/chat.md has the layout of the file. It holds the compressed rows, not the plan: what comes after is compressed by
// the plan then set, and an answer that a decode policy bounds goes on if that plan has the same policy.
//
//     kvedge_save(kv, 0, "talk.kvs", "my-model", "any bytes", 9, &err);
//     ... another process: the same model, a context with kvedge attached ...
//     kvedge_load(kv, 0, "talk.kvs", "my-model", &err);
//     llama_decode(ctx, ...) goes on at position llama_memory_seq_pos_max(mem, 0) + 1

// 4 where whole rows come with it (kvedge_keep_saved), 3 where rows have biases (kvedge_head_biases), 2 where they are rotated (kvedge_rotate), else files are of version 1
#define KVEDGE_SESSION_VERSION 4

// Writes sequence seq_id to `path` (UTF-8). The file appears whole: until everything is on the disk, what was there stays. Only its owner
// may read it. model: a name or hash of the model, at most 255 bytes, that kvedge_load compares. note: n_note bytes of the caller's own, at
// most 64 MiB (NULL if 0). Errors: KVEDGE_E_STATE (nothing to save, or a prompt that is not compressed yet: call kvedge_compress),
// KVEDGE_E_FILE, KVEDGE_E_UNSUPPORTED (some full-attention layers are not kvedge's), KVEDGE_E_MEMORY, KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_save(
    kvedge_cache * kv, int32_t seq_id, const char * path, const char * model, const void * note, size_t n_note,
    kvedge_error * err);

// Reads a file of kvedge_save into sequence seq_id, which must be empty. Runs one token through the model, whose outcome
// is thrown away: llama.cpp learns the last position that way. It knows of no other position of the sequence afterwards
// (llama_memory_seq_pos_min is the last one, too). A failure leaves the sequence empty.
// Errors: KVEDGE_E_FILE (damaged, truncated, of a newer version, another model or other layer shapes), KVEDGE_E_ARGUMENT
// (another storage type than the cache's; whether rows are rotated is the file's to say, and so the sequence goes on), KVEDGE_E_STATE (the sequence holds tokens), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_load(kvedge_cache * kv, int32_t seq_id, const char * path, const char * model, kvedge_error * err);

// Writes sequence seq_id to memory, in the form of kvedge_save without a note: to put a conversation aside, to begin several
// with what they share, or to go on in another context of the same model. data [*n_data]; *n_data: the room there, and then the
// bytes that the sequence takes; NULL and 0: only how many. Nothing is changed. Errors: those of kvedge_save; KVEDGE_E_ARGUMENT too where the room is too small.
KVEDGE_API kvedge_status kvedge_pack(kvedge_cache * kv, int32_t seq_id, const char * model, void * data, size_t * n_data, kvedge_error * err);

// Reads bytes of kvedge_pack, or of a file of kvedge_save, as kvedge_load reads a file. Errors: those of kvedge_load.
KVEDGE_API kvedge_status kvedge_unpack(kvedge_cache * kv, int32_t seq_id, const char * model, const void * data, size_t n_data, kvedge_error * err);

typedef struct kvedge_saved {
    size_t   struct_size;  // set by the caller to sizeof(kvedge_saved) before the call
    uint64_t file_bytes;
    uint64_t note_bytes;
    char     model[256];   // as given to kvedge_save
    bool     whole;        // whole rows come with it (kvedge_keep_saved)
} kvedge_saved;

// What a file of kvedge_save says at its beginning; the rows are not read, but the length of the file is checked. The note goes to note[0
// .. min(note_bytes, n_note) - 1]; NULL and 0: only the figures. Errors: KVEDGE_E_FILE, KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_read_saved(const char * path, kvedge_saved * out, void * note, size_t n_note, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Stages of your own: a function and a name. A plan, and every copy that a cache takes of it, carries them.
//
//     static kvedge_status largest(const kvedge_score_input * in, float * out, kvedge_error * err) {
//         (void) err;
//         for (size_t i = 0; i < (size_t) in->n_heads_kv * in->n_tokens; i++)             // [Hkv][T]
//             for (int32_t c = 0; c < in->d_k; c++) out[i] += fabsf(in->k[i * in->d_k + c]);
//         return KVEDGE_OK;
//     }
//     ...
//     kvedge_custom_scorer mine = { .struct_size = sizeof(mine), .name = "largest", .score = largest };
//     kvedge_plan_add_scorer(plan, &mine, &err);
//     kvedge_plan_set(plan, "scorer", "largest", &err);          // composes with every allocator, reducer, policy
//
// A callback returns KVEDGE_OK or, to end the request, any other status with a reason in err->message; whoever asked for the compression is
// then told KVEDGE_E_STAGE and the reason, and the sequence stays as it was. What a callback writes is checked: NaN, or counts that miss
// the budget, are such failures too. Callbacks run on the thread that called kvedge_compress, kvedge_compress_arrays or llama_decode, one
// at a time; with thread_safe, several threads call them at once, each for another layer or head. The arrays they are given live until they
// return. They must not throw, nor use the cache or the context.

// A stage's name: 1 to 40 of a-z, 0-9 and "-", starting with a letter, and none that kvedge_stage_name lists.
// All structs are copied, with their texts; functions and user_data must outlive the plan and every cache that has it.

typedef struct kvedge_score_input {
    int32_t         layer, n_layers;  // 0 <= layer < n_layers, counting the layers that kvedge stores
    int32_t         n_heads, n_heads_kv, n_tokens, d_k, d_v;  // H, Hkv, T, head sizes of keys and values
    const float *   k;            // [Hkv][T][d_k] as stored, widened; position encoding applied
    const float *   v;            // [Hkv][T][d_v]
    const uint8_t * image_mask;   // [T] 1 for an image token
    int32_t         n_queries;    // as many as were asked for and seen: no more than T
    const float *   q;            // [n_queries][H][d_k] of the last tokens; logit = q.k / sqrt(d_k) whatever the model's
                                  // scale. NULL unless asked for
    const float *   column_sums;  // [Hkv][T] attention received, summed over the prompt's queries, mean of the query
                                  // heads of a KV head (H2O; LOOK-M eq. 4). NULL unless asked for
    const double *  settings;     // [n_settings]
    void *          user_data;
} kvedge_score_input;

typedef struct kvedge_custom_scorer {
    size_t                 struct_size;  // sizeof(kvedge_custom_scorer)
    const char *           name;
    const char *           summary;      // one line for lists, or NULL
    const kvedge_setting * settings;     // [n_settings], at most 8
    int32_t                n_settings;
    int32_t                n_queries;    // last queries of the prompt that it wants to see; 0: none
    int32_t                recent;       // last tokens that recent = auto protects, at most half of the budget
    bool                   column_sums;  // whether it wants them
    bool                   thread_safe;
    // out [Hkv][T], all 0 before: the larger, the sooner kept; equal ones by the lower token. Infinities are allowed.
    kvedge_status (*score)(const kvedge_score_input * in, float * out, kvedge_error * err);
    void * user_data;
} kvedge_custom_scorer;

// Heads are numbered through all layers: R = the sum of the layers' Hkv, which is L * Hkv where all layers are alike.
typedef struct kvedge_allocate_input {
    int32_t         n_layers, n_rows, n_tokens;  // L, R, T
    const int32_t * n_heads_kv;  // [L]
    const float *   scores;      // [R][T], as the scorer gave them
    const uint8_t * image_mask;  // [T]
    int32_t         budget;      // KV pairs per head on average, 1 <= budget < T
    int32_t         recent;      // of those, last tokens that every head keeps whatever their score
    const double *  settings;
    void *          user_data;
} kvedge_allocate_input;

typedef struct kvedge_custom_allocator {
    size_t                 struct_size;
    const char *           name;
    const char *           summary;
    const kvedge_setting * settings;
    int32_t                n_settings;
    // counts [R], all 0 before: KV pairs that each head keeps, from 1 to T, with the sum R * budget.
    kvedge_status (*allocate)(const kvedge_allocate_input * in, int32_t * counts, kvedge_error * err);
    void * user_data;
} kvedge_custom_allocator;

typedef struct kvedge_reduce_input {
    int32_t         layer, n_layers, head;  // one KV head
    int32_t         n_tokens, d_k, d_v;     // T, head sizes
    const float *   k;                      // [T][d_k] as stored, widened
    const float *   v;                      // [T][d_v]
    const int32_t * kept;                   // [n_kept] tokens that stay, ascending
    int32_t         n_kept;
    int32_t         sinks, recent;          // first and last tokens of the prompt that are protected
    const double *  settings;
    void *          user_data;
} kvedge_reduce_input;

typedef struct kvedge_custom_reducer {
    size_t                 struct_size;
    const char *           name;
    const char *           summary;
    const kvedge_setting * settings;
    int32_t                n_settings;
    bool                   thread_safe;
    // k [n_kept][d_k] and v [n_kept][d_v]: the rows to store, holding the kept rows before; finite, and small enough for
    // the storage type. With a reducer of the program's own, old rows are given back only when all layers stand.
    kvedge_status (*reduce)(const kvedge_reduce_input * in, float * k, float * v, kvedge_error * err);
    void * user_data;
} kvedge_custom_reducer;

// Errors: KVEDGE_E_ARGUMENT (a name that is taken or not allowed, a setting that contradicts itself, no function).
KVEDGE_API kvedge_status kvedge_plan_add_scorer(kvedge_plan * plan, const kvedge_custom_scorer * scorer, kvedge_error * err);
KVEDGE_API kvedge_status kvedge_plan_add_allocator(kvedge_plan * plan, const kvedge_custom_allocator * allocator, kvedge_error * err);
KVEDGE_API kvedge_status kvedge_plan_add_reducer(kvedge_plan * plan, const kvedge_custom_reducer * reducer, kvedge_error * err);

// A shared library of stages for `kvedge chat --plugin FILE` exports one function; it need not link libkvedge:
//
//     KVEDGE_PLUGIN_EXPORT const kvedge_plugin * kvedge_plugin_v1(void) { return &table; }
typedef struct kvedge_plugin {
    size_t                          struct_size;  // sizeof(kvedge_plugin)
    const kvedge_custom_scorer *    scorers;      // [n_scorers]
    int32_t                         n_scorers;
    const kvedge_custom_allocator * allocators;   // [n_allocators]
    int32_t                         n_allocators;
    const kvedge_custom_reducer *   reducers;     // [n_reducers]
    int32_t                         n_reducers;
} kvedge_plugin;

#if defined(_WIN32)
#    define KVEDGE_PLUGIN_EXPORT __declspec(dllexport)
#else
#    define KVEDGE_PLUGIN_EXPORT __attribute__((visibility("default")))
#endif

// ---------------------------------------------------------------------------------------------------------
// Plain arrays: the same computation without a model, for research and tests

typedef struct kvedge_arrays {
    int32_t         n_layers, n_heads, n_heads_kv, n_tokens, head_size;  // L, H, Hkv, T, d; H % Hkv == 0; d % 8 == 0
    const float *   q;           // [L][H][T][d]    queries, position encoding applied
    const float *   k;           // [L][Hkv][T][d]  keys,    position encoding applied
    const float *   v;           // [L][Hkv][T][d]  values
    const uint8_t * image_mask;  // [T] 1 for an image token; NULL: all text
} kvedge_arrays;

// Which channels of a row turn together by its position (rotary position encoding).
typedef enum kvedge_pairs {
    KVEDGE_PAIRS_NORM = 0,  // 2 i and 2 i + 1: Llama's
    KVEDGE_PAIRS_NEOX = 1,  // i and i + n of n pairs: GPT-NeoX's, Qwen's
} kvedge_pairs;

// Says that the queries and keys of arrays were turned by their positions, 0 to T - 1: pair i by angles[i] radians for each
// position, i < n, channels beyond 2 n not at all. Scorer "expected" turns them back. Of a context the model's own rotation
// holds instead. angles [n] are copied; NULL: they were not turned, as without this call.
//
//     for (i = 0; i < d / 2; i++) angles[i] = pow(10000.0, -2.0 * i / d);
//     kvedge_plan_set_rotation(plan, KVEDGE_PAIRS_NEOX, angles, d / 2, &err);
//
// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY. More channels than a head has are refused with KVEDGE_E_ARGUMENT by
// kvedge_compress_arrays, where the plan asks for the rotation.
KVEDGE_API kvedge_status kvedge_plan_set_rotation(kvedge_plan * plan, kvedge_pairs pairs, const double * angles, int32_t n, kvedge_error * err);

// Gives arrays the output projection of their layers, W_O, by which plans with critical l1 or l2, or with scorer.projected of scorer
// "replay", weigh values: what head h of layer l adds to a row of the residual stream is a row of d_v numbers times values[l][h]. Of a
// context the model's own weights hold instead. values [n_layers][n_heads][d_v][width], finite, are copied; NULL: there are none, as
// without this call. Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY. A projection that is missing is refused with KVEDGE_E_ARGUMENT, one of
// another shape than the arrays with KVEDGE_E_UNSUPPORTED, by kvedge_compress_arrays, where the plan asks for it.
KVEDGE_API kvedge_status kvedge_plan_set_projection(
    kvedge_plan * plan, const float * values, int32_t n_layers, int32_t n_heads, int32_t d_v, int32_t width, kvedge_error * err);

// Stores k and v as `type`, attends causally with scale 1/sqrt(d), compresses by the plan. A quantised type is written last: attention,
// scores and merges see f16. n_threads: 0 for one per core, or fewer for small arrays. Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY,
// KVEDGE_E_UNSUPPORTED (d that the type cannot hold).
KVEDGE_API kvedge_status kvedge_compress_arrays(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type, int32_t n_threads, kvedge_result ** out,
    kvedge_error * err);

// As kvedge_compress_arrays, with a type for keys and one for values.
KVEDGE_API kvedge_status kvedge_compress_arrays_as(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type_k, kvedge_type type_v, int32_t n_threads,
    kvedge_result ** out, kvedge_error * err);

// As kvedge_compress_arrays, with the types, threads and rotation of options; no other field is looked at. NULL: the defaults. The result
// holds rows as they are read: rotated, quantised, and rotated back. Errors: also KVEDGE_E_UNSUPPORTED (a d that cannot be rotated).
KVEDGE_API kvedge_status kvedge_compress_arrays_by(
    const kvedge_plan * plan, const kvedge_arrays * in, const kvedge_options * options, kvedge_result ** out, kvedge_error * err);

// Compresses the arrays as a stream (kvedge_compress_stream): `step` >= 1 tokens at a time attend to the rows that are kept of the tokens
// before, and are compressed together with them. The result has no scores. Errors: also those of kvedge_compress_stream.
KVEDGE_API kvedge_status kvedge_stream_arrays(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type_k, kvedge_type type_v, int32_t step, int32_t n_threads,
    kvedge_result ** out, kvedge_error * err);

KVEDGE_API void kvedge_result_free(kvedge_result * result);  // NULL is allowed

// Per layer and KV head; pointers live as long as the result; NULL or -1 for a layer or head that does not exist.
KVEDGE_API int32_t         kvedge_result_length(const kvedge_result * result, int32_t layer, int32_t head);
KVEDGE_API const int32_t * kvedge_result_kept(const kvedge_result * result, int32_t layer, int32_t head);    // [length] ascending
KVEDGE_API const float *   kvedge_result_k(const kvedge_result * result, int32_t layer, int32_t head);       // [length][d]
KVEDGE_API const float *   kvedge_result_v(const kvedge_result * result, int32_t layer, int32_t head);       // [length][d]
// [length] biases of the rows' logits, as kvedge_head_biases has them; NULL: all are 0.
KVEDGE_API const float *   kvedge_result_biases(const kvedge_result * result, int32_t layer, int32_t head);
KVEDGE_API const float *   kvedge_result_scores(const kvedge_result * result, int32_t layer, int32_t head);  // [T]; NULL: a stream
// Attention output of the full prompt, before compression: [H][T][d] of one layer.
KVEDGE_API const float *   kvedge_result_attention(const kvedge_result * result, int32_t layer);

// ---------------------------------------------------------------------------------------------------------
// A second pass over a prompt, which scorer "replay" goes by
//
// KVzip (Kim et al. 2025, arXiv:2505.23416): when a prompt was read, the model reads a request to repeat it, and the prompt
// again, in chunks; a KV pair matters as much as the largest attention that a query of that pass pays to it. With
// scorer.source = prompt, the default, the prompt's own queries are those, and nothing has to be called. With instruction
// and repeat the program brings the pass, since it knows texts and images:
//
//     llama_decode(ctx, prompt);                                        // n tokens, that end at position p - 1
//     kvedge_replay_chunk chunk = { 0, n, n_template, n_request + n };
//     kvedge_replay_begin(kv, 0, &chunk, &err);
//     llama_decode(ctx, request_and_prompt_again);                      // positions p and so on
//     kvedge_replay_end(kv, 0, &err);                                   // they are gone, the next token is at p again
//     kvedge_compress(kv, 0, &err);

// What a chunk of the pass is about. Tokens count from the first one since the last compression.
typedef struct kvedge_replay_chunk {
    int32_t first, last;  // the tokens [first, last)
    int32_t sinks;        // first tokens, such as those of a chat template, which are kept before all others, as far as there
                          // is room, and are in the scope of every chunk
    int32_t n_tokens;     // that follow, to be read for their queries alone
} kvedge_replay_chunk;

// The n_tokens that sequence seq_id is sent next, in batches of any size, are a chunk of the pass. Their logits may be asked for. With
// scorer.scope = chunk the attention of their queries is shared out among the sinks, the chunk and the replay's tokens themselves, else
// among all. Chunks come in their order: each begins where the one before ended or earlier, the first at 0, which begins the pass anew.
// Errors: KVEDGE_E_STATE (no tokens to go by, a chunk that is not ended or that leaves tokens out, a stream), KVEDGE_E_ARGUMENT (numbers
// that do not fit), KVEDGE_E_UNSUPPORTED (the plan's scorer asks for no pass, or tokens of this model cannot be taken back: recurrent
// layers), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_replay_begin(kvedge_cache * kv, int32_t seq_id, const kvedge_replay_chunk * chunk, kvedge_error * err);

// Takes the tokens since kvedge_replay_begin out of the sequence, and of llama.cpp's own memory. If as many came as were announced, the
// chunk counts; else, as where llama_decode failed or was stopped, it may be begun again. Until then the sequence cannot be compressed or
// saved. Does nothing where no chunk was begun. A layer that llama.cpp keeps itself and that sees a window only must hold all cells
// (llama_context_params.swa_full). Errors: KVEDGE_E_STATE, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_replay_end(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);

// Whether a plan's scorer asks for the pass. False for NULL.
KVEDGE_API bool kvedge_plan_replays(const kvedge_plan * plan);

// The pass over plain arrays. The tokens of its chunks lie one after the other.
typedef struct kvedge_replay {
    int32_t                     n_tokens, n_chunks;  // R, the sum of the chunks' n_tokens
    const float *               q;       // [L][H][R][d]    queries, at positions T, T + 1 and so on in each chunk
    const float *               k;       // [L][Hkv][R][d]  keys likewise
    const kvedge_replay_chunk * chunks;  // [n_chunks]
} kvedge_replay;

// As kvedge_compress_arrays_by, but scored by the pass where the plan's scorer asks for one. Without a pass the prompt's own
// queries stand in for it; so they do in kvedge_compress_arrays_by. replay NULL: none.
// Errors: those of kvedge_compress_arrays_by; KVEDGE_E_ARGUMENT also for chunks that do not fit the prompt.
KVEDGE_API kvedge_status kvedge_compress_arrays_replayed(
    const kvedge_plan * plan, const kvedge_arrays * in, const kvedge_replay * replay, const kvedge_options * options,
    kvedge_result ** out, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Fewer image tokens: which rows of an encoded image the model reads. It stands between mtmd's encoder and llama_decode:
//
//     kvedge_plan_set(plan, "pruner", "residual", &err);
//     kvedge_plan_set(plan, "image_tokens", "0.5", &err);
//     kvedge_image image = { sizeof(image), mtmd_get_output_embd(mtmd), n_tokens, n_embd, 24, 24 };
//     int32_t n = kvedge_plan_image_tokens(plan, n_tokens);
//     if (kvedge_prune(plan, &image, 0, kept, rows, &n, &err) == KVEDGE_OK) { ... }   // decode rows [n][n_embd]
//
// Each row keeps its place: with M-RoPE the positions that mtmd_helper_image_get_decoder_pos gives to row kept[i], else position
// n_past + kept[i], and what follows the image comes at n_past + n_tokens. llama_decode takes such gaps once kvedge is attached.

// One image, or one tile of it, as its encoder made it.
typedef struct kvedge_image {
    size_t        struct_size;  // sizeof(kvedge_image)
    const float * rows;         // [n_rows][width], finite
    int32_t       n_rows, width;
    int32_t       down, across; // rows lie row by row in such a grid; 0 and 0: what each shows is not known
} kvedge_image;

// Rows that the plan lets a model read of an image of n_rows: floor(n_rows * ratio + 1e-9), or the number that it names; at least
// 1, at most n_rows, and all of them with pruner none. 0 if n_rows <= 0.
KVEDGE_API int32_t kvedge_plan_image_tokens(const kvedge_plan * plan, int32_t n_rows);

// Chooses rows by the plan's pruner. kept [*n]: their numbers, ascending; rows [*n][width]: what the model reads, or NULL. *n:
// room for rows, and then how many there are; never more than kvedge_plan_image_tokens. n_threads: 0 for all cores.
// Errors: KVEDGE_E_ARGUMENT (NULL, sizes that are none or do not fit together, too little room), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_prune(
    const kvedge_plan * plan, const kvedge_image * image, int32_t n_threads, int32_t * kept, float * rows, int32_t * n,
    kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Image encoders of libmtmd: how far one is, whether to stop it, and the memory that it worked in
//
// libmtmd keeps the intermediate results of the largest image it has encoded until it is freed. For a model that reads
// images at their own size they can be several times the image's KV cache. And on a CPU such an image takes many seconds,
// in which libmtmd says nothing and cannot be stopped.
//
//     kvedge_encoder * encoder = NULL;
//     kvedge_encoder_create(&encoder, &err);
//     struct mtmd_context_params params = mtmd_context_params_default();
//     params.cb_eval           = kvedge_encoder_eval;
//     params.cb_eval_user_data = encoder;
//     ... mtmd_init_from_file(path, model, params), mtmd_encode_chunk(mtmd, chunk) ...
//     kvedge_encoder_release(encoder);   // after each image; the next one takes the memory again
//     ... mtmd_free(mtmd) ...
//     kvedge_encoder_free(encoder);

struct ggml_tensor;

typedef struct kvedge_encoder kvedge_encoder;  // what is known of the encoder of one mtmd context

// Called when a layer of the encoder is done, from 0 on. false: stop; mtmd_encode_chunk then returns as if it had succeeded,
// with embeddings that mean nothing.
typedef bool (*kvedge_encoder_look)(int32_t layer, void * user_data);

// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_encoder_create(kvedge_encoder ** out, kvedge_error * err);
KVEDGE_API void          kvedge_encoder_free(kvedge_encoder * encoder);  // NULL is allowed

// look: called during the encodings from now on, on the thread that asked for them; NULL: nobody.
KVEDGE_API void kvedge_encoder_set_look(kvedge_encoder * encoder, kvedge_encoder_look look, void * user_data);

// For mtmd_context_params.cb_eval, with the encoder as user data.
KVEDGE_API bool kvedge_encoder_eval(struct ggml_tensor * tensor, bool ask, void * encoder);

// Gives the pages of the intermediate results back to the operating system; mtmd's embeddings stay. Call it right after
// mtmd_encode_chunk has returned 0, and from no other place: a failed encoding may have moved them.
// Returns their bytes; 0 where they lie on a GPU, or nothing was encoded since the last call.
KVEDGE_API uint64_t kvedge_encoder_release(kvedge_encoder * encoder);

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
// before, after: copied; at most KVEDGE_LAST_WORDS bytes of each are written. exit_code: 1 to 255. Any thread may call it, and again when
// the words change. The thread that calls it first gets a stack for handlers, so that an overflow of its own stack is told as well. A
// signal that has a handler already keeps it (Python's faulthandler, a sanitizer); one that is ignored stays so. On Windows an older filter
// of unhandled exceptions is asked first. Not told: SIGKILL, which the system sends when memory ends; on Windows __fastfail, and the
// abort() of another C library than kvedge's. Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_last_words(const char * before, const char * after, int32_t exit_code, kvedge_error * err);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_H
