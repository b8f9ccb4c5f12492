// What a program in C does with an installed wheel: loads the processor's backend from beside libkvedge, asks a model about
// an image, compresses the prompt with LOOK-M at a fifth, and prints the answer.
//
//   check_wheel MODEL.gguf MMPROJ.gguf IMAGE QUESTION

#include "kvedge.h"
#include "llama.h"
#include "mtmd-helper.h"
#include "mtmd.h"

#include <stdio.h>
#include <string.h>

enum { N_CTX = 1024, MOST_TOKENS = 40, SPACE = 4096, N_FIELDS = 4 };

static int failed(const char * what) {
    fprintf(stderr, "check_wheel: error: %s\n", what);
    return 1;
}

static void quiet(enum ggml_log_level level, const char * text, void * data) {
    (void) data;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static int make_plan(kvedge_plan ** plan, kvedge_error * err) {
    static const char * const fields[N_FIELDS][2] = {
        { "scorer", "cumulative" }, { "reducer", "pivotal" }, { "text_prior", "true" }, { "budget", "0.2" }
    };
    kvedge_status status = kvedge_plan_create(plan, err);
    for (int i = 0; status == KVEDGE_OK && i < N_FIELDS; i++) {
        status = kvedge_plan_set(*plan, fields[i][0], fields[i][1], err);
    }
    return status == KVEDGE_OK ? 0 : failed(err->message);
}

// Reads the image and the question; *n_past: the position after them.
static int read_prompt(
    const struct llama_model * model, struct llama_context * ctx, mtmd_context * vision, const char * image, const char * question,
    llama_pos * n_past) {
    char text[SPACE], prompt[SPACE];
    snprintf(text, sizeof(text), "%s\n%s", mtmd_default_marker(), question);
    const struct llama_chat_message message = { "user", text };
    const int32_t n = llama_chat_apply_template(llama_model_chat_template(model, NULL), &message, 1, true, prompt, SPACE - 1);
    if (n < 0 || n >= SPACE) {
        return failed("the chat template cannot be used");
    }
    prompt[n] = '\0';
    const struct mtmd_helper_bitmap_wrapper picture =
        mtmd_helper_bitmap_init_from_file(vision, image, false, mtmd_helper_init_opt_default());
    if (!picture.bitmap) {
        return failed("the image cannot be read");
    }
    const mtmd_bitmap *          bitmaps = picture.bitmap;
    const struct mtmd_input_text input   = { prompt, strlen(prompt), true, true };
    mtmd_input_chunks *          chunks  = mtmd_input_chunks_init();
    const int                    code    = mtmd_tokenize(vision, chunks, &input, &bitmaps, 1) == 0 &&
                             mtmd_helper_eval_chunks(vision, ctx, chunks, 0, 0, N_CTX, true, n_past) == 0
                                                   ? 0
                                                   : failed("the prompt cannot be read");
    mtmd_input_chunks_free(chunks);
    mtmd_bitmap_free(picture.bitmap);
    return code;
}

static int answer(const struct llama_model * model, struct llama_context * ctx) {
    const struct llama_vocab * vocab  = llama_model_get_vocab(model);
    struct llama_sampler *     greedy = llama_sampler_init_greedy();
    int                        code   = 0;
    for (int i = 0; i < MOST_TOKENS && code == 0; i++) {
        llama_token token = llama_sampler_sample(greedy, ctx, -1);
        char        piece[64];
        if (llama_vocab_is_eog(vocab, token)) {
            break;
        }
        const int32_t n = llama_token_to_piece(vocab, token, piece, sizeof(piece), 0, false);
        if (n > 0) {
            fwrite(piece, 1, (size_t) n, stdout);
        }
        code = llama_decode(ctx, llama_batch_get_one(&token, 1)) == 0 ? 0 : failed("llama_decode failed");
    }
    putchar('\n');
    llama_sampler_free(greedy);
    return code;
}

int main(int argc, char ** argv) {
    kvedge_error  err  = { KVEDGE_OK, "" };
    kvedge_plan * plan = NULL;
    if (argc != 5) {
        return failed("MODEL MMPROJ IMAGE QUESTION are needed");
    }
    llama_log_set(quiet, NULL);
    mtmd_helper_log_set(quiet, NULL);
    if (kvedge_load_backends(&err) != KVEDGE_OK) {
        return failed(err.message);
    }
    struct llama_model *       model  = llama_model_load_from_file(argv[1], llama_model_default_params());
    struct mtmd_context_params vision = mtmd_context_params_default();
    vision.use_gpu = vision.print_timings = vision.warmup = false;
    mtmd_context *              eye    = model ? mtmd_init_from_file(argv[2], model, vision) : NULL;
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = N_CTX;
    params.n_threads = params.n_threads_batch = 2;
    struct llama_context * ctx                      = eye ? llama_init_from_model(model, params) : NULL;
    kvedge_cache *         kv                       = NULL;
    llama_pos              n_past                   = 0;
    int                    code = ctx ? make_plan(&plan, &err) : failed("the model cannot be loaded");
    if (code == 0 && kvedge_attach(ctx, plan, NULL, &kv, &err) != KVEDGE_OK) {
        code = failed(err.message);
    }
    if (code == 0) {
        code = read_prompt(model, ctx, eye, argv[3], argv[4], &n_past);
    }
    if (code == 0 && kvedge_compress(kv, 0, &err) != KVEDGE_OK) {
        code = failed(err.message);
    }
    if (code == 0) {
        code = answer(model, ctx);
    }
    kvedge_detach(kv);
    kvedge_plan_free(plan);
    llama_free(ctx);
    mtmd_free(eye);
    llama_model_free(model);
    return code;
}
