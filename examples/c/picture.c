// Asks a model about a picture: what a program needs of llama.cpp, libmtmd and kvedge. ask.c has more options.
//
//   picture MODEL.gguf MMPROJ.gguf IMAGE QUESTION [MAX_TOKENS]
//
// The answer goes to stdout; bytes of keys and values, and what went wrong, to stderr. Ctrl-C ends it early. Exit codes:
// 0, 1 something failed, 2 wrong arguments, 130 Ctrl-C. docs/c.md says how it is built.

#include <kvedge.h>
#include <llama.h>
#include <mtmd-helper.h>
#include <mtmd.h>

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAILED = 1, USAGE = 2, CANCELLED = 130, N_UBATCH = 512 };

// All that has to be freed; NULL, which all may be given, where it was not made.
struct state {
    struct llama_model *   model;
    kvedge_encoder *       encoder;
    mtmd_context *         vision;
    mtmd_input_chunks *    chunks;
    struct llama_context * ctx;
    kvedge_plan *          plan;
    kvedge_cache *         kv;
    struct llama_sampler * sampler;
};

// Set by a signal handler, read by the threads of llama.cpp.
static atomic_bool stopped;

static void on_interrupt(int number) { (void) number, atomic_store(&stopped, true); }
static bool is_stopped(void * unused) { return (void) unused, atomic_load(&stopped); }
static bool go_on_loading(float progress, void * unused) { return (void) progress, !is_stopped(unused); }
static bool go_on_encoding(int32_t layer, void * unused) { return (void) layer, !is_stopped(unused); }

// llama.cpp's log: nothing but its errors, with the lines that go on with one.
static void log_errors(enum ggml_log_level level, const char * text, void * last) {
    enum ggml_log_level * of = last;
    *of                      = level == GGML_LOG_LEVEL_CONT ? *of : level;
    if (*of == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

// What Ctrl-C interrupts fails, too, but is no error.
static int failed(const char * what, const char * why) {
    if (atomic_load(&stopped)) {
        fputs("picture: cancelled\n", stderr);
        return CANCELLED;
    }
    fprintf(stderr, "picture: error: %s: %s\n", what, why);
    return FAILED;
}

// Why llama_decode failed, as far as libkvedge knows.
static int decode_failed(const char * what, struct state * s) {
    kvedge_error err = { KVEDGE_OK, "" };
    return failed(what, kvedge_take_error(s->kv, &err) != KVEDGE_OK ? err.message : "llama.cpp cannot decode");
}

static int load(const char * model, const char * mmproj, struct state * s) {
    kvedge_error              err    = { KVEDGE_OK, "" };
    struct llama_model_params params = llama_model_default_params();
    params.progress_callback         = go_on_loading;
    s->model                         = llama_model_load_from_file(model, params);
    if (!s->model) {
        return failed(model, "it cannot be loaded");
    }
    if (kvedge_encoder_create(&s->encoder, &err) != KVEDGE_OK) {
        return failed(mmproj, err.message);
    }
    kvedge_encoder_set_look(s->encoder, go_on_encoding, NULL);
    struct mtmd_context_params vision = mtmd_context_params_default();
    vision.print_timings = vision.warmup = false;
    vision.cb_eval                       = kvedge_encoder_eval;
    vision.cb_eval_user_data             = s->encoder;
    s->vision                            = mtmd_init_from_file(mmproj, s->model, vision);
    return s->vision ? 0 : failed(mmproj, "it cannot be loaded as the model's image encoder");
}

// The question behind the image, by the model's chat template; NULL where llama.cpp does not know that. To be freed.
static char * write_prompt(const char * question, const struct state * s) {
    const char * form   = llama_model_chat_template(s->model, NULL);
    const size_t length = strlen(mtmd_default_marker()) + strlen(question) + 2;
    char *       text   = malloc(length);
    if (!form || !text) {
        free(text);
        return NULL;
    }
    snprintf(text, length, "%s\n%s", mtmd_default_marker(), question);
    const struct llama_chat_message message = { "user", text };
    const int32_t                   n       = llama_chat_apply_template(form, &message, 1, true, NULL, 0);
    char *                          prompt  = n < 0 ? NULL : calloc((size_t) n + 1, 1);
    if (prompt) {
        llama_chat_apply_template(form, &message, 1, true, prompt, n + 1);
    }
    free(text);
    return prompt;
}

// The prompt, in pieces of text and image.
static int split(const char * path, const char * question, struct state * s) {
    char * prompt = write_prompt(question, s);
    if (!prompt) {
        return failed("the prompt", "the model has no chat template that llama.cpp knows");
    }
    mtmd_bitmap * image = mtmd_helper_bitmap_init_from_file(s->vision, path, false, mtmd_helper_init_opt_default()).bitmap;
    const mtmd_bitmap *          images[] = { image };
    const struct mtmd_input_text text     = { prompt, strlen(prompt), true, true };
    s->chunks                             = mtmd_input_chunks_init();
    const int32_t status                  = image ? mtmd_tokenize(s->vision, s->chunks, &text, images, 1) : -1;
    mtmd_bitmap_free(image);
    free(prompt);
    return status == 0 ? 0 : failed(path, image ? "it cannot be prepared" : "it cannot be read; use png, jpg or bmp");
}

// A context for prompt and answer whose keys and values kvedge keeps: a fifth of the prompt's.
static int attach(int max_tokens, struct state * s) {
    static const char * const   PLAN[][2] = { { "scorer", "modal" }, { "allocator", "ada" }, { "reducer", "nearest" }, { "budget", "0.2" } };
    const uint32_t              n_prompt  = (uint32_t) mtmd_helper_get_n_tokens(s->chunks);
    struct llama_context_params params    = llama_context_default_params();
    params.n_ctx                          = n_prompt + (uint32_t) max_tokens;
    // where the tokens of an image look at each other, one pass must hold them
    params.n_ubatch       = mtmd_decode_use_non_causal(s->vision, NULL) && n_prompt > N_UBATCH ? n_prompt : N_UBATCH;
    params.n_batch        = params.n_ubatch;
    params.abort_callback = is_stopped;
    s->ctx                = llama_init_from_model(s->model, params);
    if (!s->ctx) {
        return failed("the context", "llama.cpp cannot make it");
    }
    kvedge_error   err = { KVEDGE_OK, "" };
    kvedge_options options;
    kvedge_status  status = kvedge_options_init(&options, sizeof(options), &err);
    options.auto_compress = false;  // so that there is time to look at the memory before
    for (size_t i = 0; status == KVEDGE_OK && i <= sizeof(PLAN) / sizeof(*PLAN); i++) {
        status = i == 0 ? kvedge_plan_create(&s->plan, &err) : kvedge_plan_set(s->plan, PLAN[i - 1][0], PLAN[i - 1][1], &err);
    }
    status = status == KVEDGE_OK ? kvedge_attach(s->ctx, s->plan, &options, &s->kv, &err) : status;
    return status == KVEDGE_OK ? 0 : failed("the cache", err.message);
}

static int read_and_compress(struct state * s) {
    llama_pos    n_past = 0;
    kvedge_error err    = { KVEDGE_OK, "" };
    kvedge_stats before = { .struct_size = sizeof(before) }, after = before;
    const int    n_batch = (int) llama_n_batch(s->ctx);
    if (mtmd_helper_eval_chunks(s->vision, s->ctx, s->chunks, n_past, 0, n_batch, true, &n_past) != 0) {
        return decode_failed("the prompt", s);
    }
    if (kvedge_get_stats(s->kv, 0, &before, &err) != KVEDGE_OK || kvedge_compress(s->kv, 0, &err) != KVEDGE_OK ||
        kvedge_get_stats(s->kv, 0, &after, &err) != KVEDGE_OK) {
        return failed("the prompt", err.message);
    }
    fprintf(stderr, "picture: %d tokens, %d of them image: %llu bytes of keys and values, then %llu\n", after.n_tokens,
            after.n_image_tokens, (unsigned long long) before.bytes, (unsigned long long) after.bytes);
    return 0;
}

static int answer(int max_tokens, struct state * s) {
    const struct llama_vocab * vocab = llama_model_get_vocab(s->model);
    s->sampler                       = llama_sampler_init_greedy();
    for (int i = 0; i < max_tokens; i++) {
        char        piece[256];
        llama_token token = llama_sampler_sample(s->sampler, s->ctx, -1);
        if (llama_vocab_is_eog(vocab, token)) {
            break;
        }
        const int32_t n = llama_token_to_piece(vocab, token, piece, sizeof(piece), i == 0 ? 1 : 0, false);
        fwrite(piece, 1, n > 0 ? (size_t) n : 0, stdout);
        fflush(stdout);
        if (i + 1 < max_tokens && llama_decode(s->ctx, llama_batch_get_one(&token, 1)) != 0) {
            putchar('\n');
            return decode_failed("the answer", s);
        }
    }
    putchar('\n');
    return fflush(stdout) == 0 && !ferror(stdout) ? 0 : failed("the answer", "it cannot be written");
}

static int run(char ** argv, int max_tokens, struct state * s) {
    kvedge_error err = { KVEDGE_OK, "" };
    if (kvedge_abi_version() != KVEDGE_ABI_VERSION) {
        return failed("libkvedge", "it has another ABI version than the headers");
    }
    if (kvedge_load_backends(&err) != KVEDGE_OK) {
        return failed("ggml", err.message);
    }
    int code = load(argv[1], argv[2], s);
    code     = code ? code : split(argv[3], argv[4], s);
    code     = code ? code : attach(max_tokens, s);
    code     = code ? code : read_and_compress(s);
    return code ? code : answer(max_tokens, s);
}

int main(int argc, char ** argv) {
    char *     end        = NULL;
    const long max_tokens = argc == 6 ? strtol(argv[5], &end, 10) : 80;
    if (argc < 5 || argc > 6 || (end && *end) || max_tokens < 1 || max_tokens > 1000000) {
        fputs("picture MODEL.gguf MMPROJ.gguf IMAGE QUESTION [MAX_TOKENS, 80]\n", stderr);
        return USAGE;
    }
    struct state        s    = { 0 };
    enum ggml_log_level last = GGML_LOG_LEVEL_NONE;
    signal(SIGINT, on_interrupt);
    llama_log_set(log_errors, &last);
    mtmd_helper_log_set(log_errors, &last);
    llama_backend_init();
    const int code = run(argv, (int) max_tokens, &s);
    llama_sampler_free(s.sampler);
    kvedge_detach(s.kv);  // before its context
    llama_free(s.ctx);
    kvedge_plan_free(s.plan);
    mtmd_input_chunks_free(s.chunks);
    mtmd_free(s.vision);
    kvedge_encoder_free(s.encoder);  // which the encoder's context calls
    llama_model_free(s.model);
    llama_backend_free();
    return code;
}
