// kvedge.h - the whole public C interface of libkvedge.
//
// libkvedge owns the KV memory of a llama.cpp context. libkvedge attaches to an existing llama_context, stores keys and values for each
// layer and KV head, and computes the attention over them. When a prompt is complete, libkvedge compresses the prompt's KV pairs and
// returns the memory to the operating system.
//
//     // once, before a model is loaded
//     kvedge_error err = { 0 };
//     if (kvedge_load_backends(&err) != KVEDGE_OK) { fprintf(stderr, "%s\n", err.message); return 1; }
//
//     // a plan says what to keep: one member for each stage, and a budget (here: the share of the prompt that is kept)
//     kvedge_plan * plan = NULL;
//     kvedge_plan_create(&plan, &err);
//     kvedge_plan_set(plan, "scorer",    "modal",   &err);
//     kvedge_plan_set(plan, "allocator", "ada",     &err);
//     kvedge_plan_set(plan, "reducer",   "nearest", &err);
//     kvedge_plan_set(plan, "budget",    "0.2",     &err);
//
//     kvedge_cache * kv = NULL;  // ctx: a llama_context without tokens
//     if (kvedge_attach(ctx, plan, NULL, &kv, &err) != KVEDGE_OK) { fprintf(stderr, "%s\n", err.message); return 1; }
//     ... llama_decode(ctx, prompt) as always; the first generated token triggers the compression ...
//
//     kvedge_detach(kv);
//     kvedge_plan_free(plan);
// examples/c/ask.c is a complete program. docs/c.md describes the build.
//
// Conventions
//   - Every function that can fail returns a kvedge_status and, when `err` is not NULL, fills a message that
//     says what is wrong and what to do. No function aborts, throws, or writes to stdout or stderr.
//   - Shapes are row-major, the last index contiguous. Symbols: L layers, H query heads, Hkv KV heads
//     (query head h reads KV head h / (H / Hkv)), T tokens, d head size.
//   - A "KV pair" is one token's key row and value row of one KV head of one layer. Budgets are counted in KV pairs
//     per layer and KV head.
//   - One thread at a time uses a handle: the thread that calls llama_decode on the context. A function with a kvedge_cache argument
//     does nothing and returns KVEDGE_E_STATE (-1 for a number, 0 in kvedge_verify_room, NULL for a text) while another thread is inside
//     a function with the same cache, or inside llama_decode until its last graph is computed. llama_decode and the llama_memory_*
//     functions wait for a kvedge function of another thread; during a llama_decode of another thread they leave the cache unchanged, and
//     kvedge_take_error returns the error. kvedge_detach waits until the other call returns. llama.cpp itself makes no such check:
//     keep your threads apart, as for llama_decode.
//   - There is no global mutable state, except the handlers of kvedge_last_words. A process can have any number of caches.
//   - A struct that begins with struct_size may get more fields at its end. The caller sets struct_size to the sizeof in the caller's
//     header, and the library copies the fields that both sides know. Input: a field that an older program lacks has its default; a
//     nonzero byte in a field that this library does not know is refused with KVEDGE_E_ARGUMENT. Output: a field that this library
//     does not know becomes 0. A struct_size below the size of the struct's first version is refused with KVEDGE_E_ARGUMENT.
//     Structs without a struct_size, and structs that callbacks receive, never change.

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

// The version of the binary interface. The version increases when a program that was built with older headers would fail: a function, a
// field or a constant is removed or changes its meaning. Otherwise functions, constants and fields are only added. A program refuses a
// library of another version:
//
//     if (kvedge_abi_version() != KVEDGE_ABI_VERSION) { ... "libkvedge and this program do not fit" ... }
#define KVEDGE_ABI_VERSION 1

struct llama_context;

typedef struct kvedge_plan   kvedge_plan;    // what to keep: one member for each stage, and a budget
typedef struct kvedge_cache  kvedge_cache;   // the KV memory of one llama_context
typedef struct kvedge_result kvedge_result;  // the result of kvedge_compress_arrays

typedef enum kvedge_status {
    KVEDGE_OK            = 0,
    KVEDGE_E_ARGUMENT    = 1,  // an invalid pointer, shape, key or value
    KVEDGE_E_UNKNOWN     = 2,  // no stage or setting has the given name
    KVEDGE_E_BUDGET      = 3,  // an impossible budget (0, above 1 as a ratio, below the number of protected tokens)
    KVEDGE_E_MEMORY      = 4,  // the operating system refused memory
    KVEDGE_E_NOTHING     = 5,  // the model has no attention layer that kvedge can take over; the model runs unchanged
    KVEDGE_E_STATE       = 6,  // the call does not fit the state of the cache (context freed, prompt unfinished, ...)
    KVEDGE_E_UNSUPPORTED = 7,  // the model or the batch needs something that this version cannot do
    KVEDGE_E_STAGE       = 8,  // a custom stage of the program failed; the message comes from that stage
    KVEDGE_E_FILE        = 9,  // a file that cannot be read or written, is damaged, is too new, or belongs to another model
} kvedge_status;

typedef struct kvedge_error {
    kvedge_status status;
    char          message[500];  // UTF-8, NUL-terminated, one line
} kvedge_error;

// ---------------------------------------------------------------------------------------------------------
// The library and its processor

// Version of the library, for example "0.1.0". Static storage.
KVEDGE_API const char * kvedge_version(void);

// KVEDGE_ABI_VERSION of the loaded library.
KVEDGE_API int32_t kvedge_abi_version(void);

// Instruction set chosen at run time for the kernels: "avx512vnni", "avx512", "avx2", "neoni8mm",
// "neondot", "neon" or "generic". Static storage.
KVEDGE_API const char * kvedge_simd(void);

// Name of kernel table i that this processor can run. Table 0 is the chosen one. NULL past the end. Static storage.
KVEDGE_API const char * kvedge_kernels(int32_t i);

// Checks every kernel of the named table against plain loops in double precision, on generated rows of every storage type. The tolerance is
// 2e-4 of the sum of the absolute values of the added terms. Takes milliseconds. Any thread may call this function. A processor that cannot
// run the library's code ends the process here, as anywhere else: use a child process. Errors: KVEDGE_E_UNSUPPORTED (a kernel's result is
// wrong; the message names the kernel), KVEDGE_E_UNKNOWN, KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_check_kernels(const char * name, kvedge_error * err);

// Loads the backends of llama.cpp from the folder of libkvedge: the CPU library for this processor, and other backends of ggml. Needed
// where the CPU code comes as one library per processor generation (builds with KVEDGE_PORTABLE, such as wheels). ggml_backend_load_all()
// looks only beside the program and in the current folder. Call this function once, before a model is loaded:
//
//     if (kvedge_load_backends(&err) != KVEDGE_OK) { fprintf(stderr, "%s\n", err.message); return 1; }
//     llama_model * model = llama_model_load_from_file(...);
//
// Does nothing if ggml has a CPU backend already; repeated calls are harmless. Any thread may call this function, except while another
// thread loads backends or sets llama.cpp's log: the log is silent during the call. Errors: KVEDGE_E_FILE (no CPU backend that runs on this
// processor lies beside libkvedge), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_load_backends(kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Stages and their members. A method is one member for each stage.

typedef enum kvedge_stage {
    KVEDGE_STAGE_SCORER    = 0,  // how much does a KV pair matter?
    KVEDGE_STAGE_ALLOCATOR = 1,  // how many KV pairs does each layer and KV head keep?
    KVEDGE_STAGE_REDUCER   = 2,  // what happens to the KV pairs that are not kept?
    KVEDGE_STAGE_DECODE    = 3,  // what happens while tokens are generated?
    KVEDGE_STAGE_PRUNER    = 4,  // which rows of an image does the model read? ("Fewer image tokens")
} kvedge_stage;

// Number of members of a stage (0 for an invalid stage), and name of member i (NULL past the end).
KVEDGE_API int32_t      kvedge_stage_count(kvedge_stage stage);
KVEDGE_API const char * kvedge_stage_name(kvedge_stage stage, int32_t i);

// A setting of a stage member: a number, or one of several words. Its key in kvedge_plan_set is "scorer.NAME" ("allocator.NAME", ...).
typedef struct kvedge_setting {
    const char * name;             // same rules as for a stage's name
    const char * help;             // one line, or NULL
    double       fallback;         // the default value; for words: the index of the word
    double       lowest, highest;  // the allowed range of a number
    int32_t      step;             // 0: any number; else whole numbers: lowest plus a multiple of step
    const char * choices;          // "mean,max": the allowed words, passed on as their index; NULL: the setting is a number
} kvedge_setting;

// ---------------------------------------------------------------------------------------------------------
// Plans

// Creates a plan that keeps everything: scorer "position", allocator "uniform", reducer "evict", decode "keep-all", budget 1.0.
KVEDGE_API kvedge_status kvedge_plan_create(kvedge_plan ** out, kvedge_error * err);
KVEDGE_API void          kvedge_plan_free(kvedge_plan * plan);  // NULL is allowed

// Sets one field from text. Keys:
//   scorer, allocator, reducer, decode, pruner   name of a member of that stage
//   budget      "0.2": share of the prompt kept, in (0, 1];  "128": KV pairs per layer and KV head, an integer >= 1
//               ("1.0" is the ratio, "1" is one pair)
//   image_tokens   image tokens that the pruner keeps ("Fewer image tokens"): "0.5", a share in (0, 1], or "288", a number >= 1
//   recent      last tokens of the prompt that are always kept, inside the budget: "16" pairs, or "0.1" of the prompt, or "auto".
//               "auto" depends on the scorer:
//                 cumulative          half of the budget (H2O and LOOK-M: a1 = a2)
//                 window, mixkv       the window, at most half of the budget (SnapKV); scorer.parts names another part
//                 mean                a tenth of the budget, at least 1 (RoCo)
//                 keydiff, expected   32, at most half of the budget
//                 modal               1; its scores keep the end of the text besides (scorer.parts, text)
//                 a custom scorer     kvedge_custom_scorer.recent
//                 any other           0
//   sinks       first tokens of the prompt that are always kept, inside the budget: an integer >= 0
//   text_prior  "true": text tokens rank above all image tokens (LOOK-M eq. 5)
//   critical    "l1" or "l2" (CriticalKV): the first half of the budget goes to the best scores, the second half to the largest
//               (score + 1e-4) * norm of the value behind the output projection. For scorers of attention alone.
//               "none": the scores choose the whole budget
//   critical_half  "budget": half of the budget, protected tokens included, as in the released code; "free": half of the pairs
//               that are not protected
//   scorer.NAME, allocator.NAME, reducer.NAME, decode.NAME   a setting of the member chosen for that stage, for example
//               scorer.window with scorer "window"; choosing a member resets its settings
//   later_floor    smallest number of tokens that a later message keeps when the budget is a share: an integer >= 0, 32 by default.
//                  Reason: a fifth of a short question loses the question
//   text_overflow  "budget": the weakest text is dropped when text alone exceeds the budget (LOOK-M eq. 8), or
//                  "keep_all": all text is kept, even beyond the budget (LOOK-M's released code)
// Errors: KVEDGE_E_UNKNOWN (key or member), KVEDGE_E_ARGUMENT (value does not parse), KVEDGE_E_BUDGET (out of range).
KVEDGE_API kvedge_status kvedge_plan_set(kvedge_plan * plan, const char * key, const char * value, kvedge_error * err);

// Gives a stage member its profile: calibrated numbers of the model. Choosing another member for the stage drops the profile.
//   allocator "heads"    values [n_layers][n_columns]: how much each query head matters, >= 0, in any unit (SparseMM's visual
//                        score, HeadKV's retrieval score); n_columns = H; budgets NULL
//   allocator "prefix" with allocator.source "profile"    values [n_layers][n_columns]: share of the prompt that each layer
//                        keeps, in [0, 1], at the mean budgets [n_columns], ascending in (0, 1] (PrefixKV, offline); between
//                        two budgets the share is interpolated
//   scorer "mixkv" with scorer.source "profile" and scorer.mode "headwise"    values [n_layers][n_columns]: redundancy of each
//                        KV head, in [0, 1], which replaces the redundancy of the prompt (MixKV eq. 4, offline); n_columns = Hkv;
//                        budgets NULL
//   allocator "calibrated"    values [n_layers][n_columns]: share of all pairs that each KV head keeps, >= 0, in any unit; or, with
//                        allocator.share_of "prompt", the share of the prompt that the head keeps; n_columns = Hkv; budgets NULL
// Each stage has its own profile. n_layers counts all layers of the model; row i is layer i, even if kvedge does not store that layer.
// The function copies all numbers. values NULL: removes the profile of the stage.
//
//     kvedge_plan_set(plan, "allocator", "heads", &err);
//     kvedge_plan_set_profile(plan, KVEDGE_STAGE_ALLOCATOR, scores, NULL, 32, 32, &err);
//
// Errors: KVEDGE_E_ARGUMENT (the member takes no profile, or the numbers are out of range), KVEDGE_E_MEMORY. kvedge_attach, kvedge_set_plan
// and kvedge_compress_arrays refuse a missing profile, or a profile with another shape, with KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_plan_set_profile(
    kvedge_plan * plan, kvedge_stage stage, const float * values, const float * budgets, int32_t n_layers, int32_t n_columns,
    kvedge_error * err);

// Checks that the fields fit together (for example that the budget in pairs is not below recent + sinks in pairs).
KVEDGE_API kvedge_status kvedge_plan_check(const kvedge_plan * plan, kvedge_error * err);

// Returns the KV pairs per layer and KV head that the plan keeps of a prompt of n_tokens: floor(n_tokens * ratio + 1e-9), at least 1, at
// most n_tokens; or the budget in pairs. Returns n_tokens if the scorer's window covers the prompt (SnapKV), 0 if n_tokens <= 0.
KVEDGE_API int32_t kvedge_plan_budget(const kvedge_plan * plan, int32_t n_tokens);

// ---------------------------------------------------------------------------------------------------------
// Facts about plans, known before anything runs

// Returns setting i of a library member, in the member's order. kvedge_plan_set takes the setting as "scorer.NAME". A setting with the
// choices "true,false" is a switch. Returns NULL past the end, or if the stage has no such member. Static storage.
//
//     for (int32_t i = 0; (s = kvedge_stage_setting(KVEDGE_STAGE_SCORER, "window", i)); i++) printf("%s: %s\n", s->name, s->help);
KVEDGE_API const kvedge_setting * kvedge_stage_setting(kvedge_stage stage, const char * member, int32_t i);

// Facts that follow from the settings of a library member. A field that does not apply to the stage is 0.
typedef struct kvedge_stage_facts {
    size_t       struct_size;   // input: set by the caller
    int32_t      kept;          // input: KV pairs that a head keeps
    int32_t      even;          // input: KV pairs that a head keeps when all heads share the budget equally
    const char * profile;       // the kind of calibrated profile that the member takes, such as "visual-heads"; NULL: no profile
    int32_t      whole_up_to;   // the longest prompt that is kept whole under every budget
    int32_t      recent;        // last tokens that recent = auto protects in a head that keeps `kept` pairs
    int32_t      reserved;      // KV pairs of a head with `kept` pairs that a second score chooses
    bool         does_without;  // the member also runs on a model without a profile
    bool         sinks_first;   // if the budget is too small for sinks and recent tokens, sinks are kept first
    bool         attends;       // the scores are attention and nothing else
    bool         projects;      // the member needs the output projections of the layers
    bool         queries;       // the member looks at all queries of the prompt
} kvedge_stage_facts;

// settings [n_settings]: values in the order of kvedge_stage_setting; a word is given as its index.
// Errors: KVEDGE_E_ARGUMENT (no such member, settings that the member does not have, struct_size).
KVEDGE_API kvedge_status kvedge_stage_get_facts(
    kvedge_stage stage, const char * member, const double * settings, int32_t n_settings, kvedge_stage_facts * facts, kvedge_error * err);

// Returns the name of storage type 0, 1, 2 and so on, as `kvedge chat --kv-type` and messages show it; and the bytes of 32 stored numbers
// with their share of scales and minima. NULL and 0 past the last type. A type may have no constant in kvedge_type.
KVEDGE_API const char * kvedge_type_name(int32_t type);
KVEDGE_API int32_t      kvedge_type_bytes(int32_t type);

// Returns the number of pairs that the plan keeps of n_tokens that follow a compressed prompt. Equals kvedge_plan_budget, except that a
// budget that is a share keeps at least later_floor tokens.
KVEDGE_API int32_t kvedge_plan_later_budget(const kvedge_plan * plan, int32_t n_tokens);

// Checks whether a stream can be compressed under the plan (kvedge_compress_stream).
// Errors: KVEDGE_E_UNSUPPORTED (the message names the obstacle), KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_plan_check_stream(const kvedge_plan * plan, kvedge_error * err);

// Returns the bytes that one layer takes beside its keys and values while a prompt of n_tokens is read and compressed under the plan. The
// layer has n_heads query heads and n_heads_kv KV heads; a key has d_k numbers. Counted are scores and, if the stages need them, column
// sums and their squares, entropies, queries of the prompt or of the window, the mean and covariance of these queries, and the largest
// attention of each token. 0 where the plan keeps everything.
KVEDGE_API uint64_t kvedge_plan_score_bytes(const kvedge_plan * plan, int32_t n_tokens, int32_t n_heads, int32_t n_heads_kv, int32_t d_k);

// ---------------------------------------------------------------------------------------------------------
// The cache of a llama_context

typedef enum kvedge_type {
    KVEDGE_TYPE_F16   = 0,  // IEEE half precision, llama.cpp's default
    KVEDGE_TYPE_BF16  = 1,
    KVEDGE_TYPE_F32   = 2,
    // Quantised types. A prompt is scored and merged in f16, and quantised when it is compressed or, if the budget covers the whole prompt,
    // when it is complete. Generated tokens are f16 until 32 of them are complete. Head sizes must be multiples of 32.
    KVEDGE_TYPE_Q8_0  = 3,  // llama.cpp's blocks: 32 channels of a token share a scale; 8.5 bits per number
    KVEDGE_TYPE_Q4_0  = 4,  // 4.5 bits per number
    // KIVI (Liu et al. 2024): keys share scale and minimum per channel over 32 tokens, values per token over 32 channels. Keys of an
    // incomplete group and the newest 32 values (while generating, up to 63) stay f16
    KVEDGE_TYPE_KIVI4 = 5,  // 4 bits per number, 5 with scales
    KVEDGE_TYPE_KIVI2 = 6,  // 2 bits per number, 3 with scales
    KVEDGE_TYPE_TQ3   = 7,  // as TurboQuant (Zandieh et al. 2025): 8 levels for rotated rows; 3.5 bits with a scale for 32 channels
    KVEDGE_TYPE_SAME  = -1, // in kvedge_options: the type in `type`
    KVEDGE_TYPE_LAST  = 63, // a library may have more types, with numbers up to this one: kvedge_type_name
} kvedge_type;

// Where keys and values lie, and where attention over them is computed.
typedef enum kvedge_devices {
    KVEDGE_DEVICES_AUTO = 0,  // with the weights of their layer: on the GPU or the remote machine to which llama.cpp assigned the layer
    KVEDGE_DEVICES_NONE = 1,  // on the host, all of them; a layer on a GPU then pays for the transfer of every token
    KVEDGE_DEVICES_ALL  = 2,  // as AUTO, and layers on the CPU also use ggml's operations: for comparisons
} kvedge_devices;

// Whether rows of q8_0, q4_0 and tq3 are rotated before they are quantised. A normalised Hadamard matrix multiplies every 64 numbers of a
// value when the value is written, and again when it is read; a key's group is the largest power of two that divides the key's size.
// Rotation spreads channels with large numbers, which cost the other channels bits; without such channels it changes little. Scores, merges
// and functions that return rows see the unrotated rows.
typedef enum kvedge_rotate {
    // as llama.cpp rotates its own cache: keys rotate if all layers have one key size, a multiple of 64; the same rule holds for values.
    // Nothing rotates if the rows of a layer lie on a device
    KVEDGE_ROTATE_AUTO = 0,
    KVEDGE_ROTATE_OFF  = 1,
    KVEDGE_ROTATE_ON   = 2,  // sizes must be multiples of 64; quantised rows lie on the host
} kvedge_rotate;

typedef struct kvedge_options {
    size_t      struct_size;    // set by kvedge_options_init
    kvedge_type type;           // storage type of keys and values
    int32_t     n_threads;      // threads of the compression; 0: the context's n_threads_batch
    bool        auto_compress;  // compress when the first token after a prompt is decoded
    kvedge_type type_k;         // storage type of keys; KVEDGE_TYPE_SAME: `type`
    kvedge_type type_v;         // storage type of values; KVEDGE_TYPE_SAME: `type`
    int32_t     unused;         // not read
    // Where rows lie. Quantised types keep rows on the host, except q8_0 and q4_0 on heads with flash attention. The host computes the
    // attention that a device cannot give, with the rows fetched: prompts for allocator entropy, streams, bounded prompts, decode policies
    // by score, watched tokens. The rows return to the device with the next token whose attention the device can compute.
    kvedge_devices devices;
    kvedge_rotate  rotate;      // applies to q8_0, q4_0 and tq3
} kvedge_options;

// Fills options [struct_size bytes] with the defaults: f16, 0, true, KVEDGE_TYPE_SAME twice, KVEDGE_DEVICES_AUTO, KVEDGE_ROTATE_AUTO.
//
//     kvedge_options options;
//     kvedge_options_init(&options, sizeof(options), NULL);
//     options.type = KVEDGE_TYPE_Q8_0;
//
// Errors: KVEDGE_E_ARGUMENT (NULL, or struct_size is too small).
KVEDGE_API kvedge_status kvedge_options_init(kvedge_options * options, size_t struct_size, kvedge_error * err);

// Takes over the KV memory of `ctx`, which must hold no tokens. From now on llama_decode stores and attends through the cache in every
// full-attention layer; sliding-window, recurrent and MLA layers stay with llama.cpp. plan: copied; NULL: keeps everything. options: NULL:
// the defaults. Errors: KVEDGE_E_ARGUMENT (ctx or out is NULL, options contradict each other), KVEDGE_E_NOTHING (no layer to take over),
// KVEDGE_E_STATE (tokens present, or another provider attached), KVEDGE_E_BUDGET, KVEDGE_E_MEMORY, KVEDGE_E_UNSUPPORTED (the storage type
// cannot hold or rotate the head sizes, or scorer expected does not know how the model rotates queries by their positions). After
// KVEDGE_E_NOTHING and KVEDGE_E_UNSUPPORTED the context is unchanged and usable.
KVEDGE_API kvedge_status kvedge_attach(
    struct llama_context * ctx, const kvedge_plan * plan, const kvedge_options * options, kvedge_cache ** out,
    kvedge_error * err);

// Gives the context back to llama.cpp and frees the cache. The context's memory is cleared: the tokens are gone. NULL is allowed. May be
// called right after llama_free(ctx). Waits until a running call of another thread returns.
KVEDGE_API void kvedge_detach(kvedge_cache * kv);

// Replaces the plan. Prompts that complete from now on are compressed by the new plan, and their answers follow its decode policy.
// Errors: the errors of kvedge_attach that concern plans.
KVEDGE_API kvedge_status kvedge_set_plan(kvedge_cache * kv, const kvedge_plan * plan, kvedge_error * err);

// Gives one sequence its own plan, which replaces the plan of the cache. The sequence keeps its plan when it is emptied and filled again.
// plan: copied; NULL: the plan of the cache again. A copy of a sequence (llama_memory_seq_cp) follows the plan of the copy's number. If a
// batch holds several sequences, each sequence is observed and compressed by its own plan.
//
//     kvedge_set_sequence_plan(kv, 3, careful, &err);
//
// Errors: KVEDGE_E_ARGUMENT (also where the context has no such sequence), KVEDGE_E_BUDGET, KVEDGE_E_STATE, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_set_sequence_plan(kvedge_cache * kv, int32_t seq_id, const kvedge_plan * plan, kvedge_error * err);

// Switches automatic compression on or off (kvedge_options.auto_compress). While it is off, a prompt lasts until kvedge_compress: tokens
// that come one by one are part of the prompt.
KVEDGE_API kvedge_status kvedge_set_auto_compress(kvedge_cache * kv, bool on, kvedge_error * err);

// Where the whole rows of a sequence stay when it is compressed.
typedef enum kvedge_keep_place {
    KVEDGE_KEEP_NOT    = 0,  // nowhere: evicted rows are gone
    KVEDGE_KEEP_MEMORY = 1,  // in the host's memory
    KVEDGE_KEEP_FILE   = 2,  // in an unnamed file, written while the answer is decoded; the system may drop its pages from memory
} kvedge_keep_place;

// Keeps the whole rows of every sequence that is compressed from now on, with the observations of these rows. The answer is decoded with
// the compressed rows. Tokens of a later message attend to all rows, and the compression after the message chooses from all rows again, as
// if the conversation were one prompt. Rows of an answer stay as they were computed; for the rows of the whole cache, remove the answer's
// tokens (llama_memory_seq_rm) and decode them again before the message. Not for streams and bounded prompts. folder: UTF-8, on a local
// drive, for KVEDGE_KEEP_FILE; NULL: the current folder. most_bytes: limit of all whole rows together, beyond which the oldest are given
// up; 0: no limit. type: KVEDGE_TYPE_F16: rows as they are; KVEDGE_TYPE_Q8_0: half as large, rounded, not for kvedge_verify_whole. If rows
// cannot be kept (a full disk), kvedge_keep_problem says why. Errors: KVEDGE_E_UNSUPPORTED (network drives, head sizes), KVEDGE_E_FILE.
KVEDGE_API kvedge_status kvedge_keep(kvedge_cache * kv, kvedge_keep_place place, const char * folder, uint64_t most_bytes, kvedge_type type,
                                     kvedge_error * err);
// Limits how many of the tokens [first, last) of a sequence, such as an image's tokens, compressions keep. most: the most rows in every
// head, chosen by the scorer's scores; 0: no rows; negative: the plan decides again. A limit replaces the limits that overlap it. The
// unused part of a budget in pairs goes to other tokens; the unused part of a share stays free. Errors: KVEDGE_E_ARGUMENT (no such tokens).
KVEDGE_API kvedge_status kvedge_limit_tokens(kvedge_cache * kv, int32_t seq_id, int32_t first, int32_t last, int32_t most, kvedge_error * err);
// Chooses again, by the current plan and limits, which of its whole rows a sequence keeps. The model reads nothing; later tokens stay. A
// failure leaves the kept rows. Errors: those of kvedge_compress, KVEDGE_E_STATE (no whole rows), KVEDGE_E_UNSUPPORTED (a decode policy).
KVEDGE_API kvedge_status kvedge_choose_again(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);
// Sets whether kvedge_save and kvedge_pack also write the whole rows of a sequence, with their observations: a later message then chooses
// as it would without the file. Off by default. The file is as large as the uncompressed cache; libraries before session file version 4
// refuse it. kvedge_load and kvedge_unpack put whole rows where kvedge_keep says at that time, within its limit. A cache that keeps no
// whole rows drops the file's whole rows and takes no memory for them. Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_STATE.
KVEDGE_API kvedge_status kvedge_keep_saved(kvedge_cache * kv, bool on, kvedge_error * err);
// Returns why a sequence has no requested whole rows. NULL: it has whole rows, or none were requested. Valid until the next call.
KVEDGE_API const char * kvedge_keep_problem(const kvedge_cache * kv, int32_t seq_id);

// Compresses the tokens that were added to sequence seq_id since its last compression, and returns their memory. Does nothing (KVEDGE_OK)
// if there are no such tokens, if the budget covers all of them (a quantised storage type is written even then), or in the middle of an
// answer that a decode policy bounds. If recent and sinks together exceed the budget, sinks are dropped first; with scorer position recent
// tokens are dropped first. A failure leaves the sequence unchanged. Errors: KVEDGE_E_STATE, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_compress(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);

// Returns and clears the first error since the last call, or KVEDGE_OK. Reports errors of llama_decode, which returns only a code, and of
// functions that return nothing: llama_memory_seq_cp (onto a sequence with other tokens), seq_add and seq_div; llama_decode then fails
// until this call.
KVEDGE_API kvedge_status kvedge_take_error(kvedge_cache * kv, kvedge_error * err);

// Announces n_tokens more tokens of sequence seq_id, in batches of any size. Buffers on devices are then made once for all these tokens,
// instead of growing by halves; rows on the host grow without copies. A device without memory for so many tokens refuses the first batch
// (kvedge_take_error). If fewer tokens follow, the memory stays until the next compression. Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_STATE.
KVEDGE_API kvedge_status kvedge_expect(kvedge_cache * kv, int32_t seq_id, int32_t n_tokens, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Prompts layer by layer (bounded prefill)
//
// A bounded prompt passes one layer as a whole, and that layer is compressed before the next layer runs. The peak of memory is the kept
// rows and one layer of the whole prompt, not the full cache.
//
//     kvedge_bound_prompt(kv, 0, mask, n, &err);
//     if (llama_decode(ctx, batch) != 0 || kvedge_compress(kv, 0, &err) != KVEDGE_OK) { ... }   // compress reports failures

// Announces that the next llama_decode of sequence seq_id brings a whole prompt of n_tokens in one batch without other tokens: tokens, or
// embeddings for text and images alike. image_mask [n_tokens]: 1 for an embedding of an image; NULL: no images. n_ubatch of the context
// must be at least n_tokens. The kept sets equal those of an unbounded prompt, except for budgets that need all layers
// (kvedge_plan_check_bounded). Afterwards the prompt counts as compressed, also without auto_compress. A failure after this call loses the
// prompt: clear the sequence. Errors: KVEDGE_E_UNSUPPORTED (as kvedge_plan_check_bounded), KVEDGE_E_ARGUMENT, KVEDGE_E_STATE,
// KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_bound_prompt(kvedge_cache * kv, int32_t seq_id, const uint8_t * image_mask, int32_t n_tokens, kvedge_error * err);

// Returns the number of finished layers of the sequence's bounded prompt, for a progress bar. Any thread may call this function, also while
// llama_decode runs. -1: there is no bounded prompt.
KVEDGE_API int32_t kvedge_bounded_layers(const kvedge_cache * kv, int32_t seq_id);

// Checks whether prompts can be bounded under the plan with keys and values of these types. Allocators spectral (with scorer dct of the
// same gamma) and prefix without a profile know their budgets only when all layers have run: until then every head keeps twice the even
// budget, then the head is trimmed, and gets no more than that; before the trimming nothing may be merged or quantised. Allocator entropy
// and reducer match cannot be bounded. A custom stage must be thread_safe, and cannot be the allocator. Errors: KVEDGE_E_UNSUPPORTED (the
// message names the stage), KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_plan_check_bounded(const kvedge_plan * plan, kvedge_type type_k, kvedge_type type_v, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Streams: video, and endless images
//
// Each compression of a stream chooses from all rows, including the rows that earlier compressions kept: memory does not grow with the
// length of the stream.
//
//     kvedge_plan_set(plan, "budget", "2048", &err);
//     for (each image) { llama_decode(ctx, image); kvedge_compress_stream(kv, 0, &err); }
//     llama_decode(ctx, question); kvedge_compress_stream(kv, 0, &err);   // the answer may begin

// Makes sequence seq_id a stream, if it is not a stream yet, and compresses all its rows to the plan's budget. The budget must be a number
// of KV pairs per layer and head. Call this function after every image, or every so many tokens, and while the answer is generated: the
// answer's tokens count too. kvedge_compress calls this function for a sequence that is a stream already.
//
// If kvedge stores every layer of the model, llama.cpp's own cells of the sequence are freed, except the newest: n_ctx then bounds the
// tokens between two calls, not the stream (kvedge_cells). Positions go on from token to token; kvedge_renumber makes them smaller. After
// kvedge_load, the first call makes the loaded sequence a stream again and changes no row. If llama_memory_seq_rm removes more rows from
// one head than from another, the other heads give up their oldest rows behind the sinks, so that all heads hold equally many rows. For an
// empty sequence only the plan is checked. A failure leaves the rows unchanged. Errors: KVEDGE_E_UNSUPPORTED (a budget that is a share; an
// allocator other than uniform; a decode policy; scorer mean, or cumulative with share = layer; reducer match; text_overflow = keep_all; a
// window longer than the budget; a quantised storage type; a sequence whose heads hold different numbers of KV pairs), KVEDGE_E_STATE (the
// plan's scorer observed none of the new tokens), KVEDGE_E_MEMORY, KVEDGE_E_STAGE.
KVEDGE_API kvedge_status kvedge_compress_stream(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);

// Returns the number of the sequence's tokens that hold a cell of llama.cpp's own cache, which has n_ctx cells. In a stream only the tokens
// since the last compression and the newest token before it hold cells. 0: no such sequence.
KVEDGE_API int32_t kvedge_cells(const kvedge_cache * kv, int32_t seq_id);

// Makes the positions of a sequence smaller before they pass the length that its model was trained for. Tokens move, and their keys turn by
// the difference (rotary position encoding); values and scores stay. Takes one token's pass through the model.
//
//     if (n_past + n > trained) kvedge_renumber(kv, 0, trained / 2, &n_past, &err);   // before the next n tokens
//
// next: the position of the next token (behind an image of an M-RoPE model: the first position beyond the image); afterwards at most
// `most`, which is >= 1. If `next` is small enough already, or the sequence is empty, only the model is checked. A token's new position
// holds for all layers and heads. A gap is a position at which no head and no whole row (kvedge_keep) holds a token. The oldest gaps are
// closed, as many as needed: later distances stay. If the gaps do not suffice, the last most / 2 positions keep their distances, and the
// earlier tokens share the remaining positions in their order, several tokens at one position if needed. Distances never grow. An image of
// an M-RoPE model moves as a whole. Whole rows turn, too. Each number of a turned key is rounded once to the storage type. llama.cpp's own
// cells of the sequence are freed, except one at the last token's new position. The logits of the last token are gone: sample before. A
// failure leaves rows and positions unchanged, or gives up whole rows. Errors: KVEDGE_E_UNSUPPORTED (quantised keys; whole rows under
// allocator entropy or reducer match; llama.cpp keeps layers; learned positions; unknown rotations; positions do not ascend),
// KVEDGE_E_STATE (a second pass was begun; allocator entropy or reducer match waits for the compression of a prompt; llama.cpp could not
// enter the position, and then knows no position of the sequence), KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_renumber(kvedge_cache * kv, int32_t seq_id, int32_t most, int32_t * next, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Drafts: guesses at the next tokens of an answer, decoded behind its last token in one batch. kvedge takes several tokens in a batch for a
// prompt; a verification says that they belong to an answer.
//
//     kvedge_verify_begin(kv, 0, 1 + n_guesses, &err);
//     llama_decode(ctx, last_token_and_guesses);      // logits of every token are requested
//     kvedge_verify_end(kv, 0, 1 + n_right, &err);    // removes the guesses that the model does not agree with

// Begins a verification: the next n tokens of sequence seq_id, n >= 1, are tokens of its answer. The first token starts a compression that
// is due. Until kvedge_verify_end the sequence cannot be compressed or saved. Errors: KVEDGE_E_STATE (an empty sequence, an uncompressed
// prompt without automatic compression, a verification or a second pass that was not ended), KVEDGE_E_ARGUMENT (n is more than
// kvedge_verify_room), KVEDGE_E_UNSUPPORTED (the decode policy drops rows, a stream, a model with recurrent layers).
KVEDGE_API kvedge_status kvedge_verify_begin(kvedge_cache * kv, int32_t seq_id, int32_t n, kvedge_error * err);

// Begins a verification over whole rows (kvedge_keep): its n tokens get the logits of the whole cache. Tokens after the last compression or
// verification over whole rows are drafts: they are removed, and the n tokens begin with the first draft. kvedge_verify_end adds the rows
// of the accepted tokens to the compressed rows. The host attends to whole rows, also if the compressed rows lie on a device. Errors: those
// of kvedge_verify_begin, KVEDGE_E_STATE (no whole rows), KVEDGE_E_UNSUPPORTED (whole rows in q8_0), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_verify_whole(kvedge_cache * kv, int32_t seq_id, int32_t n, kvedge_error * err);

// Ends a verification. Its first n_accepted tokens stay; the others leave the sequence and llama.cpp's own memory. After a failed
// llama_decode n_accepted is 0, which is no error without a verification. Errors: KVEDGE_E_ARGUMENT (fewer tokens came), KVEDGE_E_STATE.
KVEDGE_API kvedge_status kvedge_verify_end(kvedge_cache * kv, int32_t seq_id, int32_t n_accepted, kvedge_error * err);

// Returns the most tokens that a verification may have now. Quantised rows are rounded in groups of 32, and a verification ends with a
// group, so that every token sees the rows that it sees alone. INT32_MAX: no limit; 0: none is possible (kvedge_verify_begin says why).
KVEDGE_API int32_t kvedge_verify_room(const kvedge_cache * kv, int32_t seq_id);

// ---------------------------------------------------------------------------------------------------------
// What a cache holds: its memory, lengths, tokens, rows, attention and scores, for meters, pictures and research

typedef struct kvedge_stats {
    size_t   struct_size;        // set by the caller to sizeof(kvedge_stats) before the call
    int32_t  n_layers;           // layers that kvedge stores (the model may have more)
    int32_t  n_heads_kv;         // KV heads of the first stored layer
    int32_t  n_tokens;           // tokens of the sequence so far, compressed ones included
    int32_t  n_image_tokens;     // tokens of n_tokens that came as embeddings
    int32_t  n_compressions;     // compressions of the sequence so far
    int32_t  n_pending;          // tokens added since the last compression; in a bounded answer: tokens in blocks not yet packed;
                                 // in a stream: KV pairs that each head holds
    uint64_t bytes;              // present bytes of the sequence's key and value buffers, including biases of rows
    uint64_t index_bytes;        // bytes of the sequence's token indices and positions
    uint64_t score_bytes;        // present bytes of column sums, scores, watched attention, queries kept for allocator entropy and
                                 // reducer match, mean and covariance of queries, and the largest attention of each token
    uint64_t before_bytes;       // `bytes` right before the last compression (the full cache, for a first turn)
    uint64_t after_bytes;        // `bytes` right after the last compression
    uint64_t peak_bytes;         // largest value of bytes + index_bytes + score_bytes so far
    int64_t  compress_us;        // wall time of the last compression, microseconds
    uint64_t device_bytes;       // the part of `bytes` that lies on devices
    int32_t  n_unfitted;         // heads to which reducer match fitted nothing in the last compression, because fewer queries of
                                 // the prompt were kept than rows to fit; these heads are as after reducer evict
    int32_t  n_scant;            // heads that reducer match fitted to fewer than twice as many queries as rows
    // About the last compression, if rows lay on devices; else 0:
    uint64_t device_fetched_bytes;  // bytes fetched from devices
    uint64_t device_sent_bytes;     // bytes sent to devices
    int64_t  device_operations;     // operations of the graphs that ran on devices
    int64_t  device_measure_us;     // microseconds in which devices measured what scorers look at
    int64_t  device_choose_us;      // microseconds in which the host chose rows
    int64_t  device_gather_us;      // microseconds in which devices gathered the kept rows
    int64_t  device_merge_us;       // microseconds in which devices merged evicted rows into kept rows
    int64_t  device_upload_us;      // microseconds in which the host's results were sent
    int32_t  device_compressed;     // 1: devices compressed their rows; 0: the host did, or no rows lay on devices
    int32_t  whole_rounded;         // 1: some of the whole rows are stored as q8_0
    uint64_t whole_bytes;           // bytes of whole rows (kvedge_keep) and their scores; not part of `bytes`
    uint64_t whole_file_bytes;      // the part of whole_bytes that lies in a file; the system may drop these pages from memory
} kvedge_stats;

KVEDGE_API kvedge_status kvedge_get_stats(const kvedge_cache * kv, int32_t seq_id, kvedge_stats * out, kvedge_error * err);
// Returns the model's layer number of stored layer i (0 <= i < n_layers), or -1.
KVEDGE_API int32_t kvedge_layer_id(const kvedge_cache * kv, int32_t i);
// Returns ggml's name of the device on which the rows of layer i lie ("CUDA0", "RPC0"). NULL: on the host, or no such layer.
// Static storage.
KVEDGE_API const char * kvedge_layer_device(const kvedge_cache * kv, int32_t i);
// Returns why the last compression of the sequence ran on the host although rows lay on a device: the device and the operation that it
// lacks, or the stage that has no graph. NULL: no reason, or no such sequence. Valid until the sequence changes.
KVEDGE_API const char * kvedge_device_problem(const kvedge_cache * kv, int32_t seq_id);
// Returns the KV pairs that stored layer i, KV head `head` holds now for the sequence; -1: no such sequence, layer or head.
KVEDGE_API int32_t kvedge_head_length(const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head);
// Writes the original token index (0 = first token of the sequence) of every KV pair of stored layer i, KV head `head`, ascending.
// Writes out[0 .. n-1], n = kvedge_head_length. Errors: KVEDGE_E_ARGUMENT (no such layer, head or sequence; n_out < n).
KVEDGE_API kvedge_status kvedge_head_tokens(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, int32_t * out, int32_t n_out, kvedge_error * err);
// Returns the query heads of stored layer i (H); query head h reads KV head h / (H / Hkv). -1: no such layer.
KVEDGE_API int32_t kvedge_query_heads(const kvedge_cache * kv, int32_t i);
// Switches watching on or off (off after kvedge_attach). While watching is on, the attention of tokens that are decoded one by one is kept
// for kvedge_attention; this costs H floats per layer and stored row (counted in score_bytes).
KVEDGE_API kvedge_status kvedge_watch(kvedge_cache * kv, bool on, kvedge_error * err);

// Writes the attention that the sequence's last token pays to each stored KV pair: the softmax weights of query head `query_head` of stored
// layer i over the rows of its KV head, including the token's own row. Writes out[0 .. n-1], n = kvedge_head_length, in the order of
// kvedge_head_tokens. The weights add up to 1, or to less with attention sinks (logits without a row, gpt-oss). Errors: KVEDGE_E_ARGUMENT
// (no such sequence, layer or head; n_out < n), KVEDGE_E_STATE (the last tokens of the sequence came several at a time or unwatched, or
// rows were removed or compressed since).
KVEDGE_API kvedge_status kvedge_attention(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t query_head, float * out, int32_t n_out, kvedge_error * err);
// Writes query heads H, KV heads Hkv and head sizes of stored layer i. Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_layer_shape(
    const kvedge_cache * kv, int32_t i, int32_t * n_heads, int32_t * n_heads_kv, int32_t * d_k, int32_t * d_v, kvedge_error * err);
// Writes keys [n][d_k] and values [n][d_v] of stored layer i, KV head `head`, in float32, n = kvedge_head_length, in the order of
// kvedge_head_tokens. n_out: number of rows that fit k and v. Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_head_rows(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, float * k, float * v, int32_t n_out, kvedge_error * err);

// Writes the biases of the KV pairs of stored layer i, KV head `head`, to out[0 .. n-1], n = kvedge_head_length, in the order of
// kvedge_head_tokens. A bias is a natural logarithm that is added to the pair's logit after a soft cap and before the softmax: the pair
// stands for e^bias pairs. 0: the pair stands for itself. A plan with "reducer.bias" = "mass" makes biases: ln of 1 + the number of pairs
// that were merged into the pair (four bytes each, counted in kvedge_stats.bytes). Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_head_biases(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, float * out, int32_t n_out, kvedge_error * err);

// Writes the scores [Hkv][kvedge_stats.n_pending] that the plan's scorer gives to the tokens of stored layer i that were added since the
// last compression. Compresses nothing. n_out: floats that fit `out`. Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_STATE (nothing is pending, or the
// plan was set after the prompt and its scorer observed too little), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_pending_scores(const kvedge_cache * kv, int32_t seq_id, int32_t i, float * out, int32_t n_out, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Sessions: a sequence in a file or in memory, to continue later without reading its prompt again
//
// docs/chat.md has the layout of the file. The file holds the compressed rows, not the plan: later tokens are compressed by the plan of the
// cache. An answer that a decode policy bounds continues if the plan of the cache has the same policy.
//
//     kvedge_save(kv, 0, "talk.kvs", "my-model", "any bytes", 9, &err);
//     ... another process: the same model, a context with kvedge attached ...
//     kvedge_load(kv, 0, "talk.kvs", "my-model", &err);
//     llama_decode(ctx, ...) goes on at position llama_memory_seq_pos_max(mem, 0) + 1

// File versions: 4 with whole rows (kvedge_keep_saved), else 3 with biases (kvedge_head_biases), else 2 with rotated rows, else 1
#define KVEDGE_SESSION_VERSION 4

// Writes sequence seq_id to `path` (UTF-8). An older file stays until the new file is complete on the disk. Only the owner may read the
// file. model: a name or hash of the model, at most 255 bytes; kvedge_load compares it. note: n_note bytes of the caller, at most 64 MiB
// (NULL if 0). Errors: KVEDGE_E_STATE (nothing to save, or a prompt that is not compressed yet: call kvedge_compress), KVEDGE_E_FILE,
// KVEDGE_E_UNSUPPORTED (llama.cpp keeps some full-attention layers), KVEDGE_E_MEMORY, KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_save(
    kvedge_cache * kv, int32_t seq_id, const char * path, const char * model, const void * note, size_t n_note,
    kvedge_error * err);

// Reads a file of kvedge_save into sequence seq_id, which must be empty. Decodes one token and discards its result, which tells llama.cpp
// the last position. llama.cpp knows no other position of the sequence (llama_memory_seq_pos_min is the last position, too). A failure
// leaves the sequence empty. Errors: KVEDGE_E_FILE (damaged, truncated, of a newer version, of another model or with other layer shapes),
// KVEDGE_E_ARGUMENT (another storage type than the cache's; rows are rotated as in the file, also later rows of this sequence),
// KVEDGE_E_STATE (the sequence holds tokens), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_load(kvedge_cache * kv, int32_t seq_id, const char * path, const char * model, kvedge_error * err);

// Writes sequence seq_id to memory, in the format of kvedge_save without a note: to put a conversation aside, to begin several with the
// same tokens, or to continue in another context of the same model. data [*n_data]; *n_data: in: the size of data; out: the size of the
// sequence. data NULL and *n_data 0: only writes the size. Errors: those of kvedge_save, KVEDGE_E_ARGUMENT (data is too small).
KVEDGE_API kvedge_status kvedge_pack(kvedge_cache * kv, int32_t seq_id, const char * model, void * data, size_t * n_data, kvedge_error * err);

// Reads bytes of kvedge_pack, or of a file of kvedge_save, as kvedge_load reads a file. Errors: those of kvedge_load.
KVEDGE_API kvedge_status kvedge_unpack(kvedge_cache * kv, int32_t seq_id, const char * model, const void * data, size_t n_data, kvedge_error * err);

typedef struct kvedge_saved {
    size_t   struct_size;  // set by the caller to sizeof(kvedge_saved) before the call
    uint64_t file_bytes;
    uint64_t note_bytes;
    char     model[256];   // the model given to kvedge_save
    bool     whole;        // the file has whole rows (kvedge_keep_saved)
} kvedge_saved;

// Reads the beginning of a file of kvedge_save, and checks the length of the file; reads no rows. Writes the note to note[0 ..
// min(note_bytes, n_note) - 1]; NULL and 0: no note. Errors: KVEDGE_E_FILE, KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_read_saved(const char * path, kvedge_saved * out, void * note, size_t n_note, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Stages of your own: a function and a name. A plan, and every copy of the plan in a cache, carries them.
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
// A callback returns KVEDGE_OK or, to end the request, another status with a reason in err->message. The function that asked for the
// compression then returns KVEDGE_E_STAGE with this reason, and the sequence stays unchanged. NaN in a callback's output, or counts that
// miss the budget, end the request, too. Callbacks run on the thread that called kvedge_compress, kvedge_compress_arrays or llama_decode,
// one at a time; with thread_safe, several threads call them at once, each for another layer or head. The arrays of a callback are valid
// until it returns. A callback must not throw, and must not use the cache or the context.

// A stage's name: 1 to 40 of a-z, 0-9 and "-", starting with a letter, and different from all names of kvedge_stage_name. All structs are
// copied, with their texts; functions and user_data must outlive the plan and every cache that uses the plan.

typedef struct kvedge_score_input {
    int32_t         layer, n_layers;  // 0 <= layer < n_layers, counting the layers that kvedge stores
    int32_t         n_heads, n_heads_kv, n_tokens, d_k, d_v;  // H, Hkv, T, head sizes of keys and values
    const float *   k;            // [Hkv][T][d_k] as stored, in float32; position encoding applied
    const float *   v;            // [Hkv][T][d_v]
    const uint8_t * image_mask;   // [T] 1 for an image token
    int32_t         n_queries;    // the requested queries that were observed: at most T
    const float *   q;            // [n_queries][H][d_k] of the last tokens, scaled so that logit = q.k / sqrt(d_k) in every model.
                                  // NULL unless requested
    const float *   column_sums;  // [Hkv][T] attention received, summed over the prompt's queries, mean over the query
                                  // heads of a KV head (H2O; LOOK-M eq. 4). NULL unless requested
    const double *  settings;     // [n_settings]
    void *          user_data;
} kvedge_score_input;

typedef struct kvedge_custom_scorer {
    size_t                 struct_size;  // sizeof(kvedge_custom_scorer)
    const char *           name;
    const char *           summary;      // one line for lists, or NULL
    const kvedge_setting * settings;     // [n_settings], at most 8
    int32_t                n_settings;
    int32_t                n_queries;    // last queries of the prompt that the scorer requests; 0: none
    int32_t                recent;       // last tokens that recent = auto protects, at most half of the budget
    bool                   column_sums;  // the scorer requests column sums
    bool                   thread_safe;
    // out [Hkv][T], all 0 at first: KV pairs with larger scores are kept first, on ties the lower token. Infinities are allowed.
    kvedge_status (*score)(const kvedge_score_input * in, float * out, kvedge_error * err);
    void * user_data;
} kvedge_custom_scorer;

// Heads are numbered through all layers: R = the sum of the layers' Hkv, which is L * Hkv if all layers are alike.
typedef struct kvedge_allocate_input {
    int32_t         n_layers, n_rows, n_tokens;  // L, R, T
    const int32_t * n_heads_kv;  // [L]
    const float *   scores;      // [R][T], from the scorer
    const uint8_t * image_mask;  // [T]
    int32_t         budget;      // KV pairs per head on average, 1 <= budget < T
    int32_t         recent;      // part of the budget: last tokens that every head keeps under every score
    const double *  settings;
    void *          user_data;
} kvedge_allocate_input;

typedef struct kvedge_custom_allocator {
    size_t                 struct_size;
    const char *           name;
    const char *           summary;
    const kvedge_setting * settings;
    int32_t                n_settings;
    // counts [R], all 0 at first: KV pairs that each head keeps, from 1 to T, with the sum R * budget.
    kvedge_status (*allocate)(const kvedge_allocate_input * in, int32_t * counts, kvedge_error * err);
    void * user_data;
} kvedge_custom_allocator;

typedef struct kvedge_reduce_input {
    int32_t         layer, n_layers, head;  // one KV head
    int32_t         n_tokens, d_k, d_v;     // T, head sizes
    const float *   k;                      // [T][d_k] as stored, in float32
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
    // k [n_kept][d_k] and v [n_kept][d_v]: the rows to store, at first the kept rows. Numbers must be finite and fit the storage type. With
    // a custom reducer, the memory of old rows is returned only when all layers are done.
    kvedge_status (*reduce)(const kvedge_reduce_input * in, float * k, float * v, kvedge_error * err);
    void * user_data;
} kvedge_custom_reducer;

// Errors: KVEDGE_E_ARGUMENT (a name that is taken or invalid, a setting that contradicts itself, no function).
KVEDGE_API kvedge_status kvedge_plan_add_scorer(kvedge_plan * plan, const kvedge_custom_scorer * scorer, kvedge_error * err);
KVEDGE_API kvedge_status kvedge_plan_add_allocator(kvedge_plan * plan, const kvedge_custom_allocator * allocator, kvedge_error * err);
KVEDGE_API kvedge_status kvedge_plan_add_reducer(kvedge_plan * plan, const kvedge_custom_reducer * reducer, kvedge_error * err);

// A shared library of stages for `kvedge chat --plugin FILE` exports one function, and need not link libkvedge:
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

// Which channels of a row rotate together (rotary position encoding).
typedef enum kvedge_pairs {
    KVEDGE_PAIRS_NORM = 0,  // channels 2 i and 2 i + 1: Llama
    KVEDGE_PAIRS_NEOX = 1,  // channels i and i + n of n pairs: GPT-NeoX, Qwen
} kvedge_pairs;

// States that the queries and keys of arrays are rotated by their positions, 0 to T - 1: pair i, i < n, by angles[i] radians per position;
// channels from 2 n on are not rotated. Scorer "expected" undoes this rotation. With a context, the model's own rotation is used instead.
// angles [n]: copied; NULL: queries and keys are not rotated, as without this call.
//
//     for (i = 0; i < d / 2; i++) angles[i] = pow(10000.0, -2.0 * i / d);
//     kvedge_plan_set_rotation(plan, KVEDGE_PAIRS_NEOX, angles, d / 2, &err);
//
// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY. If the plan needs the rotation, kvedge_compress_arrays refuses more channels than a head has
// with KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_plan_set_rotation(kvedge_plan * plan, kvedge_pairs pairs, const double * angles, int32_t n, kvedge_error * err);

// Sets the output projections W_O of the layers of arrays. Plans with critical l1 or l2, or with scorer.projected of scorer "replay", weigh
// values by W_O: head h of layer l adds a row of d_v numbers times values[l][h] to a row of the residual stream. With a context, the
// model's own weights are used instead. values [n_layers][n_heads][d_v][width]: finite, copied; NULL: no projections, as without this call.
// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY. If the plan needs projections, kvedge_compress_arrays refuses missing ones with
// KVEDGE_E_ARGUMENT, and another shape than that of the arrays with KVEDGE_E_UNSUPPORTED.
KVEDGE_API kvedge_status kvedge_plan_set_projection(
    kvedge_plan * plan, const float * values, int32_t n_layers, int32_t n_heads, int32_t d_v, int32_t width, kvedge_error * err);

// Stores k and v as `type`, attends causally with scale 1/sqrt(d), and compresses by the plan. A quantised type is written last: attention,
// scores and merges use f16. n_threads: 0: one for each core, or fewer for small arrays. Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY,
// KVEDGE_E_UNSUPPORTED (d that the type cannot hold).
KVEDGE_API kvedge_status kvedge_compress_arrays(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type, int32_t n_threads, kvedge_result ** out,
    kvedge_error * err);

// Like kvedge_compress_arrays, with separate types for keys and values.
KVEDGE_API kvedge_status kvedge_compress_arrays_as(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type_k, kvedge_type type_v, int32_t n_threads,
    kvedge_result ** out, kvedge_error * err);

// Like kvedge_compress_arrays, with the types, threads and rotation of options; other fields are ignored. options NULL: the defaults. The
// result holds rows as attention reads them: rotated, quantised, rotated back. Errors: also KVEDGE_E_UNSUPPORTED (d cannot be rotated).
KVEDGE_API kvedge_status kvedge_compress_arrays_by(
    const kvedge_plan * plan, const kvedge_arrays * in, const kvedge_options * options, kvedge_result ** out, kvedge_error * err);

// Compresses the arrays as a stream (kvedge_compress_stream). `step` >= 1 tokens at a time attend to the kept rows of the tokens before,
// and are compressed together with these rows. The result has no scores. Errors: also those of kvedge_compress_stream.
KVEDGE_API kvedge_status kvedge_stream_arrays(
    const kvedge_plan * plan, const kvedge_arrays * in, kvedge_type type_k, kvedge_type type_v, int32_t step, int32_t n_threads,
    kvedge_result ** out, kvedge_error * err);

KVEDGE_API void kvedge_result_free(kvedge_result * result);  // NULL is allowed

// Parts of a result, per layer and KV head. Pointers live as long as the result. NULL or -1: no such layer or head.
KVEDGE_API int32_t         kvedge_result_length(const kvedge_result * result, int32_t layer, int32_t head);
KVEDGE_API const int32_t * kvedge_result_kept(const kvedge_result * result, int32_t layer, int32_t head);    // [length] ascending
KVEDGE_API const float *   kvedge_result_k(const kvedge_result * result, int32_t layer, int32_t head);       // [length][d]
KVEDGE_API const float *   kvedge_result_v(const kvedge_result * result, int32_t layer, int32_t head);       // [length][d]
// [length] biases of the rows' logits, as in kvedge_head_biases; NULL: all are 0.
KVEDGE_API const float *   kvedge_result_biases(const kvedge_result * result, int32_t layer, int32_t head);
KVEDGE_API const float *   kvedge_result_scores(const kvedge_result * result, int32_t layer, int32_t head);  // [T]; NULL: a stream
// Attention output of the full prompt, before compression: [H][T][d] of one layer.
KVEDGE_API const float *   kvedge_result_attention(const kvedge_result * result, int32_t layer);

// ---------------------------------------------------------------------------------------------------------
// A second pass over a prompt, for scorer "replay"
//
// KVzip (Kim et al. 2025, arXiv:2505.23416): after the prompt, the model reads a request to repeat it, and the prompt again, in chunks. The
// score of a KV pair is the largest attention that a query of this pass pays to the pair. With scorer.source = prompt, the default, the
// prompt's own queries replace the pass, and no call is needed. With instruction and repeat the program brings the pass, since the program
// knows texts and images:
//
//     llama_decode(ctx, prompt);                                        // n tokens, that end at position p - 1
//     kvedge_replay_chunk chunk = { 0, n, n_template, n_request + n };
//     kvedge_replay_begin(kv, 0, &chunk, &err);
//     llama_decode(ctx, request_and_prompt_again);                      // positions p and so on
//     kvedge_replay_end(kv, 0, &err);                                   // removes the pass's tokens, the next token is at p again
//     kvedge_compress(kv, 0, &err);

// What a chunk of the pass covers. Token numbers count from the first token after the last compression.
typedef struct kvedge_replay_chunk {
    int32_t first, last;  // the tokens [first, last)
    int32_t sinks;        // first tokens, such as those of a chat template, which are kept before all others, as far as there
                          // is room; they are in the scope of every chunk
    int32_t n_tokens;     // tokens that follow, read for their queries alone
} kvedge_replay_chunk;

// Announces that the next n_tokens of sequence seq_id, in batches of any size, are a chunk of the pass. Their logits may be requested. With
// scorer.scope = chunk the softmax of their queries covers the sinks, the chunk and the tokens of the pass; else all tokens. Chunks come in
// order: a chunk begins where the chunk before ended, or earlier; a chunk that begins at 0 begins the pass again. Errors: KVEDGE_E_STATE
// (no prompt tokens, a chunk or a verification that was not ended, tokens left out between chunks, a stream), KVEDGE_E_UNSUPPORTED (the
// plan's scorer needs no pass, or the model cannot take tokens back: recurrent layers), KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_replay_begin(kvedge_cache * kv, int32_t seq_id, const kvedge_replay_chunk * chunk, kvedge_error * err);

// Removes the tokens since kvedge_replay_begin from the sequence and from llama.cpp's own memory. If all announced tokens came, the chunk
// counts; else (llama_decode failed or was stopped) the chunk may be begun again. Before this call the sequence cannot be compressed or
// saved. Does nothing if no chunk was begun. A sliding-window layer that llama.cpp keeps must hold all cells
// (llama_context_params.swa_full). Errors: KVEDGE_E_STATE, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_replay_end(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);

// Returns whether the plan's scorer needs the pass. False for NULL.
KVEDGE_API bool kvedge_plan_replays(const kvedge_plan * plan);

// The pass over plain arrays. The tokens of the chunks lie one after the other.
typedef struct kvedge_replay {
    int32_t                     n_tokens, n_chunks;  // R, the sum of the chunks' n_tokens
    const float *               q;       // [L][H][R][d]    queries, at positions T, T + 1 and so on in each chunk
    const float *               k;       // [L][Hkv][R][d]  keys at the same positions
    const kvedge_replay_chunk * chunks;  // [n_chunks]
} kvedge_replay;

// Like kvedge_compress_arrays_by, with scores from the pass if the plan's scorer needs one. Without a pass (replay NULL, or
// kvedge_compress_arrays_by) the prompt's own queries replace it. Errors: also KVEDGE_E_ARGUMENT for chunks that do not fit the prompt.
KVEDGE_API kvedge_status kvedge_compress_arrays_replayed(
    const kvedge_plan * plan, const kvedge_arrays * in, const kvedge_replay * replay, const kvedge_options * options,
    kvedge_result ** out, kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Fewer image tokens: which rows of an encoded image the model reads. kvedge_prune runs between mtmd's encoder and llama_decode:
//
//     kvedge_plan_set(plan, "pruner", "residual", &err);
//     kvedge_plan_set(plan, "image_tokens", "0.5", &err);
//     kvedge_image image = { sizeof(image), mtmd_get_output_embd(mtmd), n_tokens, n_embd, 24, 24 };
//     int32_t n = kvedge_plan_image_tokens(plan, n_tokens);
//     if (kvedge_prune(plan, &image, 0, kept, rows, &n, &err) == KVEDGE_OK) { ... }   // decode rows [n][n_embd]
//
// Each row keeps its place: with M-RoPE the positions that mtmd_helper_image_get_decoder_pos gives to row kept[i], else position n_past +
// kept[i]. The token after the image has position n_past + n_tokens. With kvedge attached, llama_decode accepts the gaps.

// One image, or one tile of an image, from the encoder.
typedef struct kvedge_image {
    size_t        struct_size;  // sizeof(kvedge_image)
    const float * rows;         // [n_rows][width], finite
    int32_t       n_rows, width;
    int32_t       down, across; // the rows' grid, row by row; 0 and 0: the grid is unknown
} kvedge_image;

// Returns the rows that the plan keeps of an image of n_rows: floor(n_rows * ratio + 1e-9), or the plan's number; at least 1, at most
// n_rows; n_rows with pruner none. 0 if n_rows <= 0.
KVEDGE_API int32_t kvedge_plan_image_tokens(const kvedge_plan * plan, int32_t n_rows);

// Chooses rows by the plan's pruner. kept [*n]: numbers of the chosen rows, ascending; rows [*n][width]: the chosen rows, or NULL. *n: in:
// the room in rows; out: the chosen rows, at most kvedge_plan_image_tokens. n_threads: 0: all cores.
// Errors: KVEDGE_E_ARGUMENT (NULL, sizes below 1 or that do not fit together, too little room), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_prune(
    const kvedge_plan * plan, const kvedge_image * image, int32_t n_threads, int32_t * kept, float * rows, int32_t * n,
    kvedge_error * err);

// ---------------------------------------------------------------------------------------------------------
// Image encoders of libmtmd: their progress, how to stop them, and how to release their memory
//
// libmtmd keeps the intermediate results of the largest encoded image until the mtmd context is freed. For a model that reads images at
// their own size these can be several times the image's KV cache. On a CPU the encoding of a large image takes many seconds, in which
// libmtmd says nothing and cannot be stopped.
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

typedef struct kvedge_encoder kvedge_encoder;  // the observer of one mtmd context's encoder

// Called when a layer of the encoder is done; layers count from 0. Return false to stop; mtmd_encode_chunk then returns as if it had
// succeeded, with embeddings that mean nothing.
typedef bool (*kvedge_encoder_look)(int32_t layer, void * user_data);

// Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_encoder_create(kvedge_encoder ** out, kvedge_error * err);
KVEDGE_API void          kvedge_encoder_free(kvedge_encoder * encoder);  // NULL is allowed

// look: called during later encodings, on the thread that asked for them; NULL: no calls.
KVEDGE_API void kvedge_encoder_set_look(kvedge_encoder * encoder, kvedge_encoder_look look, void * user_data);

// The value for mtmd_context_params.cb_eval; user data: the encoder.
KVEDGE_API bool kvedge_encoder_eval(struct ggml_tensor * tensor, bool ask, void * encoder);

// Returns the pages of the intermediate results to the operating system; mtmd's embeddings stay. Call this function right after
// mtmd_encode_chunk has returned 0, and nowhere else: a failed encoding may have moved the results. Returns the bytes of the results; 0 if
// they lie on a GPU, or if nothing was encoded since the last call.
KVEDGE_API uint64_t kvedge_encoder_release(kvedge_encoder * encoder);

// ---------------------------------------------------------------------------------------------------------
// The last line of a program

#define KVEDGE_LAST_WORDS 2000

// After this call a crash in native code ends the process with one line on stderr and exit_code, without a core file. The line is `before`,
// the kind of crash ("segmentation fault"), and `after`. Covers SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT and std::terminate; on Windows the
// same kinds of unhandled exceptions, and SIGABRT of the C library. For programs, not for libraries inside another program: the handlers
// belong to the whole process, and stay.
//
//     kvedge_last_words("mine: error: native code crashed: ", "; the log is in mine.log", 1, &err);
//
// before, after: copied; at most KVEDGE_LAST_WORDS bytes of each are written. exit_code: 1 to 255. Any thread may call this function, also
// again with new words. The first thread that calls it gets a stack for handlers, so that an overflow of the thread's stack is reported,
// too. A signal that has a handler already keeps it (Python's faulthandler, a sanitizer); an ignored signal stays ignored. On Windows an
// older filter of unhandled exceptions runs first. Not reported: SIGKILL, which the system sends when memory ends; on Windows __fastfail,
// and abort() of another C library than kvedge's. Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_last_words(const char * before, const char * after, int32_t exit_code, kvedge_error * err);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_H
