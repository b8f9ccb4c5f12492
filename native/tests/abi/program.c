// A program that was built with the first headers (v1/): all structs that travel, and what the library makes of them.
//
//   kvedge-abi-v1 MODEL.gguf FILE

#include "kvedge.h"
#include "llama.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { FAILED = 1, STALE = 3, N = 64, CANARY = 0x5a };

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, err.message); \
            return FAILED;                                                           \
        }                                                                            \
    } while (0)

// Nothing may be written behind a struct.
struct guarded_stats {
    kvedge_stats  stats;
    unsigned char canary[64];
};
struct guarded_saved {
    kvedge_saved  saved;
    unsigned char canary[64];
};
struct guarded_options {
    kvedge_options options;
    unsigned char  canary[64];
};

static int touched(const unsigned char * canary) {
    for (int i = 0; i < 64; i++) {
        if (canary[i] != CANARY) {
            return 1;
        }
    }
    return 0;
}

static kvedge_status largest(const kvedge_score_input * in, float * out, kvedge_error * err) {
    (void) err;
    for (int32_t i = 0; i < in->n_heads_kv * in->n_tokens; i++) {
        out[i] = fabsf(in->k[(size_t) i * (size_t) in->d_k]) + (float) in->settings[0];
    }
    return KVEDGE_OK;
}

static kvedge_status evenly(const kvedge_allocate_input * in, int32_t * counts, kvedge_error * err) {
    (void) err;
    for (int32_t r = 0; r < in->n_rows; r++) {
        counts[r] = in->budget;
    }
    return KVEDGE_OK;
}

static kvedge_status unchanged(const kvedge_reduce_input * in, float * k, float * v, kvedge_error * err) {
    (void) in, (void) k, (void) v, (void) err;
    return KVEDGE_OK;
}

static int make_plan(kvedge_plan ** plan) {
    static const kvedge_setting settings[] = { { "bias", "added", 1, 0, 2, 0, NULL } };
    const kvedge_custom_scorer  scorer = { .struct_size = sizeof(scorer), .name = "largest", .settings = settings, .n_settings = 1, .score = largest };
    const kvedge_custom_allocator allocator = { .struct_size = sizeof(allocator), .name = "evenly", .allocate = evenly };
    const kvedge_custom_reducer   reducer   = { .struct_size = sizeof(reducer), .name = "unchanged", .reduce = unchanged };
    kvedge_error                  err       = { KVEDGE_OK, "" };
    CHECK(kvedge_plan_create(plan, &err) == KVEDGE_OK);
    CHECK(kvedge_plan_add_scorer(*plan, &scorer, &err) == KVEDGE_OK);
    CHECK(kvedge_plan_add_allocator(*plan, &allocator, &err) == KVEDGE_OK);
    CHECK(kvedge_plan_add_reducer(*plan, &reducer, &err) == KVEDGE_OK);
    CHECK(kvedge_plan_set(*plan, "scorer", "largest", &err) == KVEDGE_OK);
    CHECK(kvedge_plan_set(*plan, "scorer.bias", "0.5", &err) == KVEDGE_OK);
    CHECK(kvedge_plan_set(*plan, "allocator", "evenly", &err) == KVEDGE_OK);
    CHECK(kvedge_plan_set(*plan, "reducer", "unchanged", &err) == KVEDGE_OK);
    CHECK(kvedge_plan_set(*plan, "budget", "16", &err) == KVEDGE_OK);
    return 0;
}

static int in_a_context(struct llama_context * ctx, const kvedge_plan * plan, const char * path) {
    kvedge_error           err = { KVEDGE_OK, "" };
    kvedge_cache *         kv  = NULL;
    struct guarded_options given;
    struct guarded_stats   stats;
    struct guarded_saved   saved;
    llama_token            tokens[N];
    memset(&given, CANARY, sizeof(given));
    memset(&stats, CANARY, sizeof(stats));
    memset(&saved, CANARY, sizeof(saved));
    given.options = kvedge_options_default();
    CHECK(!touched(given.canary) && given.options.struct_size == sizeof(kvedge_options) && given.options.auto_compress);
    CHECK(given.options.type == KVEDGE_TYPE_F16 && given.options.type_k == KVEDGE_TYPE_SAME && given.options.n_threads == 0);
    given.options.auto_compress = false;
    given.options.type_v        = KVEDGE_TYPE_Q8_0;
    CHECK(kvedge_attach(ctx, plan, &given.options, &kv, &err) == KVEDGE_OK);
    for (int i = 0; i < N; i++) {
        tokens[i] = 5 + i;
    }
    CHECK(llama_decode(ctx, llama_batch_get_one(tokens, N)) == 0);
    stats.stats.struct_size = sizeof(kvedge_stats);
    CHECK(kvedge_get_stats(kv, 0, &stats.stats, &err) == KVEDGE_OK && !touched(stats.canary));
    CHECK(stats.stats.n_tokens == N && stats.stats.n_pending == N && stats.stats.n_compressions == 0 && stats.stats.bytes > 0);
    CHECK(kvedge_compress(kv, 0, &err) == KVEDGE_OK && kvedge_head_length(kv, 0, 0, 0) == 16);
    CHECK(kvedge_get_stats(kv, 0, &stats.stats, &err) == KVEDGE_OK && !touched(stats.canary));
    CHECK(stats.stats.n_compressions == 1 && stats.stats.after_bytes == stats.stats.bytes && stats.stats.compress_us >= 0);
    CHECK(stats.stats.before_bytes > stats.stats.after_bytes && stats.stats.peak_bytes >= stats.stats.before_bytes);
    stats.stats.struct_size = 8;
    CHECK(kvedge_get_stats(kv, 0, &stats.stats, &err) == KVEDGE_E_ARGUMENT);
    CHECK(kvedge_save(kv, 0, path, "tiny", "note", 4, &err) == KVEDGE_OK);
    saved.saved.struct_size = sizeof(kvedge_saved);
    CHECK(kvedge_read_saved(path, &saved.saved, NULL, 0, &err) == KVEDGE_OK && !touched(saved.canary));
    CHECK(strcmp(saved.saved.model, "tiny") == 0 && saved.saved.note_bytes == 4 && saved.saved.file_bytes > 0);
    CHECK(llama_memory_seq_rm(llama_get_memory(ctx), 0, -1, -1) && kvedge_load(kv, 0, path, "tiny", &err) == KVEDGE_OK);
    CHECK(kvedge_head_length(kv, 0, 0, 0) == 16);
    kvedge_detach(kv);
    return 0;
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        return FAILED;
    }
    if (kvedge_abi_version() != KVEDGE_ABI_VERSION) {
        fprintf(stderr, "libkvedge has ABI version %d, this program was built for %d\n", (int) kvedge_abi_version(), KVEDGE_ABI_VERSION);
        return STALE;
    }
    kvedge_plan * plan = NULL;
    kvedge_error  err  = { KVEDGE_OK, "" };
    CHECK(kvedge_load_backends(&err) == KVEDGE_OK);
    struct llama_model *        model  = llama_model_load_from_file(argv[1], llama_model_default_params());
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx                       = 2 * N;
    params.n_threads = params.n_threads_batch = 1;
    struct llama_context * ctx                = model ? llama_init_from_model(model, params) : NULL;
    CHECK(ctx);
    const int code = make_plan(&plan) == 0 ? in_a_context(ctx, plan, argv[2]) : FAILED;
    kvedge_plan_free(plan);
    llama_free(ctx);
    llama_model_free(model);
    return code;
}
