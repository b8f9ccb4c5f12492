// Asks a model, about an image if one is given, with a KV cache that libkvedge compresses: kvedge chat in C.
//
//   ask [OPTIONS] MODEL.gguf QUESTION
//
// The answer goes to stdout, a line of figures to stderr. It is greedy, so that every machine gives the same one, as far as
// its arithmetic does. examples/README.md says how it is built.

#include "kvedge.h"
#include "llama.h"
#include "mtmd-helper.h"
#include "mtmd.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAILED = 1, REFUSED = 2, MOST_FIELDS = 32, N_UBATCH = 512, PIECE = 256 };

static const char USAGE[] =
    "ask [OPTIONS] MODEL.gguf QUESTION\n"
    "  --mmproj FILE     the model's image encoder\n"
    "  --image FILE      png, jpg or bmp; needs --mmproj\n"
    "  --set KEY=VALUE   a field of the plan (kvedge.h: kvedge_plan_set), repeatable; by default\n"
    "                    scorer=modal allocator=ada reducer=nearest budget=0.2\n"
    "  --kv-type NAME    f16, q8_0 or q4_0: how keys and values are stored, f16 if it is not given\n"
    "  --max-tokens N    of the answer, 80 if it is not given\n"
    "  --threads N       4 if it is not given\n"
    "  --raw             QUESTION is the whole prompt, with <__media__> where the image goes\n";

struct request {
    const char * model, * mmproj, * image, * question;
    const char * fields[MOST_FIELDS];
    int          n_fields, max_tokens, threads;
    kvedge_type  type;
    bool         raw;
};

// All that has to be freed; NULL, which all may be given, where it was not made.
struct state {
    struct llama_model *   model;
    mtmd_context *         vision;
    mtmd_input_chunks *    chunks;
    char *                 prompt;
    struct llama_context * ctx;
    kvedge_plan *          plan;
    kvedge_cache *         kv;
    struct llama_sampler * sampler;
};

static int complain(int code, const char * format, ...) {
    va_list args;
    va_start(args, format);
    fputs("ask: error: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return code;
}

// llama.cpp's log: nothing but its errors, with the lines that go on with one.
static void log_errors(enum ggml_log_level level, const char * text, void * last) {
    enum ggml_log_level * of = last;
    if (level != GGML_LOG_LEVEL_CONT) {
        *of = level;
    }
    if (*of == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static int positive(const char * option, const char * text, int * out) {
    char *     end;
    const long n = strtol(text, &end, 10);
    if (*end || n < 1 || n > 1000000) {
        return complain(REFUSED, "%s takes a number from 1 to 1000000, not %s", option, text);
    }
    *out = (int) n;
    return 0;
}

static int storage(const char * text, kvedge_type * out) {
    *out = strcmp(text, "q8_0") == 0 ? KVEDGE_TYPE_Q8_0 : strcmp(text, "q4_0") == 0 ? KVEDGE_TYPE_Q4_0 : KVEDGE_TYPE_F16;
    const bool known = *out != KVEDGE_TYPE_F16 || strcmp(text, "f16") == 0;
    return known ? 0 : complain(REFUSED, "--kv-type is f16, q8_0 or q4_0, not %s", text);
}

static int set_option(const char * name, const char * value, struct request * out) {
    const char ** text = strcmp(name, "--mmproj") == 0 ? &out->mmproj : strcmp(name, "--image") == 0 ? &out->image : NULL;
    if (text) {
        *text = value;
        return 0;
    }
    if (strcmp(name, "--max-tokens") == 0) {
        return positive(name, value, &out->max_tokens);
    }
    if (strcmp(name, "--threads") == 0) {
        return positive(name, value, &out->threads);
    }
    if (strcmp(name, "--kv-type") == 0) {
        return storage(value, &out->type);
    }
    if (strcmp(name, "--set") != 0) {
        return complain(REFUSED, "there is no option %s; ask without arguments lists them", name);
    }
    if (out->n_fields == MOST_FIELDS || !strchr(value, '=')) {
        return complain(REFUSED, "--set takes KEY=VALUE, %d times at most", MOST_FIELDS);
    }
    out->fields[out->n_fields++] = value;
    return 0;
}

static int parse(int argc, char ** argv, struct request * out) {
    const char ** plain[] = { &out->model, &out->question };
    int           n_plain = 0;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) != 0) {
            if (n_plain == 2) {
                return complain(REFUSED, "%s is one word too many; put the question in quotes", argv[i]);
            }
            *plain[n_plain++] = argv[i];
        } else if (strcmp(argv[i], "--raw") == 0) {
            out->raw = true;
        } else if (i + 1 == argc) {
            return complain(REFUSED, "%s needs a value; ask without arguments lists the options", argv[i]);
        } else if (set_option(argv[i], argv[i + 1], out) != 0) {
            return REFUSED;
        } else {
            i++;
        }
    }
    if (n_plain != 2) {
        return complain(REFUSED, "a model and a question are needed; ask without arguments lists the options");
    }
    return out->image && !out->mmproj ? complain(REFUSED, "--image needs --mmproj, the model's image encoder") : 0;
}

static int make_plan(const struct request * ask, struct state * s) {
    static const char * const DEFAULT[] = { "scorer=modal", "allocator=ada", "reducer=nearest", "budget=0.2" };
    const char * const *      fields  = ask->n_fields ? ask->fields : DEFAULT;
    const int                 n       = ask->n_fields ? ask->n_fields : 4;
    kvedge_error              err     = { KVEDGE_OK, "" };
    if (kvedge_plan_create(&s->plan, &err) != KVEDGE_OK) {
        return complain(FAILED, "%s", err.message);
    }
    for (int i = 0; i < n; i++) {
        char         key[64];
        const char * equals = strchr(fields[i], '=');
        const size_t length = (size_t) (equals - fields[i]);
        if (length >= sizeof(key)) {
            return complain(REFUSED, "--set %s: no field has so long a name", fields[i]);
        }
        memcpy(key, fields[i], length);
        key[length] = '\0';
        if (kvedge_plan_set(s->plan, key, equals + 1, &err) != KVEDGE_OK) {
            return complain(REFUSED, "%s", err.message);
        }
    }
    return kvedge_plan_check(s->plan, &err) == KVEDGE_OK ? 0 : complain(REFUSED, "%s", err.message);
}

static int load(const struct request * ask, struct state * s) {
    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers              = 0;
    s->model                         = llama_model_load_from_file(ask->model, params);
    if (!s->model) {
        return complain(FAILED, "%s cannot be loaded", ask->model);
    }
    if (ask->mmproj) {
        struct mtmd_context_params vision = mtmd_context_params_default();
        vision.use_gpu = vision.print_timings = vision.warmup = false;
        vision.n_threads                      = ask->threads;
        s->vision                             = mtmd_init_from_file(ask->mmproj, s->model, vision);
        if (!s->vision) {
            return complain(FAILED, "%s cannot be loaded as the image encoder of %s", ask->mmproj, ask->model);
        }
    }
    return 0;
}

// The prompt in s->prompt, by the model's chat template where llama.cpp knows it, without the token that begins a text.
static int make_prompt(const struct request * ask, struct state * s) {
    const char * marker = ask->image && !ask->raw ? mtmd_default_marker() : "";
    const size_t length = strlen(marker) + strlen(ask->question) + 2;
    char *       text   = malloc(length);
    if (!text) {
        return complain(FAILED, "no memory for the prompt");
    }
    snprintf(text, length, "%s%s%s", marker, *marker ? "\n" : "", ask->question);
    if (ask->raw) {
        s->prompt = text;
        return 0;
    }
    const char *              form    = llama_model_chat_template(s->model, NULL);
    struct llama_chat_message message = { "user", text };
    const int32_t             n       = form ? llama_chat_apply_template(form, &message, 1, true, NULL, 0) : -1;
    if (n >= 0 && (s->prompt = calloc((size_t) n + 1, 1)) != NULL) {
        llama_chat_apply_template(form, &message, 1, true, s->prompt, n + 1);
    }
    free(text);
    return s->prompt ? 0 : complain(REFUSED, "%s has no chat template that llama.cpp knows; use --raw", ask->model);
}

// Text alone, into *tokens, to be freed.
static int32_t tokenize(const struct state * s, llama_token ** tokens) {
    const struct llama_vocab * vocab  = llama_model_get_vocab(s->model);
    const int32_t              length = (int32_t) strlen(s->prompt);
    const int32_t              n      = -llama_tokenize(vocab, s->prompt, length, NULL, 0, true, true);
    *tokens = n > 0 ? malloc((size_t) n * sizeof(llama_token)) : NULL;
    return *tokens ? llama_tokenize(vocab, s->prompt, length, *tokens, n, true, true) : 0;
}

// The prompt's pieces of text and image in s->chunks, of a model with an image encoder.
static int split(const struct request * ask, struct state * s) {
    struct mtmd_helper_bitmap_wrapper image = { NULL, NULL };
    if (ask->image) {
        image = mtmd_helper_bitmap_init_from_file(s->vision, ask->image, false, mtmd_helper_init_opt_default());
        if (!image.bitmap) {
            return complain(REFUSED, "%s cannot be read; use png, jpg or bmp", ask->image);
        }
    }
    const struct mtmd_input_text text    = { s->prompt, strlen(s->prompt), true, true };
    const mtmd_bitmap *          bitmaps = image.bitmap;
    s->chunks                            = mtmd_input_chunks_init();
    const int32_t status                 = mtmd_tokenize(s->vision, s->chunks, &text, &bitmaps, ask->image ? 1 : 0);
    mtmd_bitmap_free(image.bitmap);
    return status == 0 ? 0 : complain(REFUSED, status == 1 ? "the prompt and --image differ in the number of images"
                                                           : "the image cannot be prepared");
}

// A context for n_prompt tokens and the answer, with kvedge attached.
static int attach(const struct request * ask, struct state * s, size_t n_prompt) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx                       = (uint32_t) n_prompt + (uint32_t) ask->max_tokens;
    params.n_threads = params.n_threads_batch = ask->threads;
    params.n_ubatch                           = N_UBATCH;
    if (s->vision && mtmd_decode_use_non_causal(s->vision, NULL) && n_prompt > N_UBATCH) {
        params.n_ubatch = (uint32_t) n_prompt;  // the tokens of an image look at each other: one pass must hold them
    }
    params.n_batch = params.n_ubatch;
    s->ctx         = llama_init_from_model(s->model, params);
    if (!s->ctx) {
        return complain(FAILED, "a context of %u tokens cannot be made", params.n_ctx);
    }
    kvedge_options options;
    kvedge_options_init(&options, sizeof(options), NULL);
    options.auto_compress  = false;
    options.type           = ask->type;
    kvedge_error err       = { KVEDGE_OK, "" };
    return kvedge_attach(s->ctx, s->plan, &options, &s->kv, &err) != KVEDGE_OK ? complain(FAILED, "%s", err.message) : 0;
}

// Why llama_decode failed, as far as libkvedge knows.
static int decode_failed(struct state * s) {
    kvedge_error err = { KVEDGE_OK, "" };
    return complain(FAILED, "%s", kvedge_take_error(s->kv, &err) != KVEDGE_OK ? err.message : "llama.cpp cannot decode");
}

// Reads the prompt; *n_past: the position after it.
static int read_prompt(const struct request * ask, struct state * s, llama_pos * n_past) {
    int code = make_prompt(ask, s);
    if (code != 0) {
        return code;
    }
    if (s->vision) {
        code = split(ask, s);
        if (code == 0) {
            code = attach(ask, s, mtmd_helper_get_n_tokens(s->chunks));
        }
        if (code != 0) {
            return code;
        }
        const int32_t n_batch = (int32_t) llama_n_batch(s->ctx);
        return mtmd_helper_eval_chunks(s->vision, s->ctx, s->chunks, 0, 0, n_batch, true, n_past) == 0 ? 0 : decode_failed(s);
    }
    llama_token * tokens = NULL;
    const int32_t n      = tokenize(s, &tokens);
    code                 = n > 0 ? attach(ask, s, (size_t) n) : complain(REFUSED, "the prompt is empty");
    for (int32_t at = 0; code == 0 && at < n; at += N_UBATCH) {
        const int32_t part = n - at < N_UBATCH ? n - at : N_UBATCH;
        code = llama_decode(s->ctx, llama_batch_get_one(tokens + at, part)) == 0 ? 0 : decode_failed(s);
    }
    free(tokens);
    *n_past = n;
    return code;
}

static int answer(const struct request * ask, struct state * s, llama_pos n_past) {
    const struct llama_vocab * vocab = llama_model_get_vocab(s->model);
    struct llama_batch         batch = llama_batch_init(1, 0, 1);
    int                        code  = 0;
    s->sampler                       = llama_sampler_init_greedy();
    for (int i = 0; i < ask->max_tokens; i++) {
        const llama_token token = llama_sampler_sample(s->sampler, s->ctx, -1);
        if (llama_vocab_is_eog(vocab, token)) {
            break;
        }
        char          piece[PIECE];
        const int32_t n = llama_token_to_piece(vocab, token, piece, PIECE, i == 0 ? 1 : 0, false);
        if (n > 0) {
            fwrite(piece, 1, (size_t) n, stdout);
            fflush(stdout);
        }
        batch.n_tokens     = 1;
        batch.token[0]     = token;
        batch.pos[0]       = n_past++;
        batch.n_seq_id[0]  = 1;
        batch.seq_id[0][0] = 0;
        batch.logits[0]    = true;
        if (i + 1 < ask->max_tokens && llama_decode(s->ctx, batch) != 0) {
            code = decode_failed(s);
            break;
        }
    }
    putchar('\n');
    llama_batch_free(batch);
    return code;
}

// A number that differs where any head keeps another token (FNV-1a of all their indices).
static uint32_t kept_set(const kvedge_cache * kv, const kvedge_stats * stats) {
    uint32_t hash = 2166136261u;
    for (int32_t i = 0; i < stats->n_layers; i++) {
        for (int32_t h = 0, n; (n = kvedge_head_length(kv, 0, i, h)) >= 0; h++) {
            int32_t * tokens = malloc((size_t) (n + 1) * sizeof(int32_t));
            if (tokens && kvedge_head_tokens(kv, 0, i, h, tokens, n, NULL) == KVEDGE_OK) {
                for (int32_t t = 0; t < n; t++) {
                    hash = (hash ^ (uint32_t) tokens[t]) * 16777619u;
                }
            }
            free(tokens);
        }
    }
    return hash;
}

static int run(const struct request * ask, struct state * s) {
    llama_pos    n_past = 0;
    kvedge_error err    = { KVEDGE_OK, "" };
    kvedge_stats before = { .struct_size = sizeof(before) }, after = before;
    int          code   = make_plan(ask, s);
    if (code == 0) {
        code = load(ask, s);
    }
    if (code == 0) {
        code = read_prompt(ask, s, &n_past);
    }
    if (code != 0) {
        return code;
    }
    if (kvedge_get_stats(s->kv, 0, &before, &err) != KVEDGE_OK || kvedge_compress(s->kv, 0, &err) != KVEDGE_OK ||
        kvedge_get_stats(s->kv, 0, &after, &err) != KVEDGE_OK) {
        return complain(FAILED, "%s", err.message);
    }
    const uint32_t kept = kept_set(s->kv, &after);
    code                = answer(ask, s, n_past);
    fprintf(stderr, "kernels=%s tokens=%d image_tokens=%d kv_bytes_before=%llu kv_bytes_after=%llu kept=%08x\n", kvedge_simd(),
            after.n_tokens, after.n_image_tokens, (unsigned long long) before.bytes, (unsigned long long) after.bytes, kept);
    return code;
}

int main(int argc, char ** argv) {
    if (argc == 1) {
        fputs(USAGE, stderr);
        return REFUSED;
    }
    struct request ask = { .max_tokens = 80, .threads = 4 };
    if (parse(argc, argv, &ask) != 0) {
        return REFUSED;
    }
    if (kvedge_abi_version() != KVEDGE_ABI_VERSION) {
        return complain(FAILED, "libkvedge has ABI version %d, this program was built for %d; build them together",
                        kvedge_abi_version(), KVEDGE_ABI_VERSION);
    }
    enum ggml_log_level last = GGML_LOG_LEVEL_NONE;
    llama_log_set(log_errors, &last);
    mtmd_helper_log_set(log_errors, &last);
    kvedge_error err = { KVEDGE_OK, "" };
    if (kvedge_load_backends(&err) != KVEDGE_OK) {
        return complain(FAILED, "%s", err.message);
    }
    llama_backend_init();
    struct state s    = { 0 };
    const int    code = run(&ask, &s);
    llama_sampler_free(s.sampler);
    kvedge_detach(s.kv);
    llama_free(s.ctx);
    mtmd_input_chunks_free(s.chunks);
    mtmd_free(s.vision);
    llama_model_free(s.model);
    kvedge_plan_free(s.plan);
    free(s.prompt);
    llama_backend_free();
    return code;
}
