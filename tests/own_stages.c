// Stages of every kind, and of every kind of failure, for test_plugins_c.py.

#include "kvedge.h"

#include <math.h>
#include <stdio.h>

enum { WINDOW, KIND };

static const kvedge_setting SETTINGS[] = {
    { "window", "last queries that vote", 8, 1, 64, 1, NULL },
    { "kind", "sum or largest", 0, 0, 0, 0, "sum,max" },
};

// Attention logits of the last queries, exponentiated, and the column sums: everything that a scorer is given.
static kvedge_status attended(const kvedge_score_input * in, float * out, kvedge_error * err) {
    const int32_t group = in->n_heads / in->n_heads_kv, window = (int32_t) in->settings[WINDOW];
    const int32_t first = in->n_queries > window ? in->n_queries - window : 0;
    if (!in->q || !in->column_sums || in->user_data != (void *) SETTINGS) {
        snprintf(err->message, sizeof(err->message), "what was asked for is not there");
        return KVEDGE_E_ARGUMENT;
    }
    for (int32_t h = 0; h < in->n_heads_kv; h++) {
        for (int32_t t = 0; t < in->n_tokens; t++) {
            const float * k = in->k + ((size_t) h * in->n_tokens + t) * in->d_k;
            double        sum = 0.0, top = 0.0;
            for (int32_t r = first; r < in->n_queries; r++) {
                for (int32_t g = 0; g < group; g++) {
                    const float * q     = in->q + ((size_t) r * in->n_heads + h * group + g) * in->d_k;
                    double        logit = 0.0;
                    for (int32_t c = 0; c < in->d_k; c++) {
                        logit += (double) q[c] * k[c];
                    }
                    const double x = exp(logit / sqrt(in->d_k) / 4.0);
                    sum += x;
                    top = x > top ? x : top;
                }
            }
            const size_t at = (size_t) h * in->n_tokens + t;
            out[at]         = (float) (in->settings[KIND] == 1 ? top : sum) + in->column_sums[at] + (in->image_mask[t] ? 1.0f : 0.0f);
        }
    }
    return KVEDGE_OK;
}

// One pair from every head of the first layer to the same head of the last.
static kvedge_status shifted(const kvedge_allocate_input * in, int32_t * counts, kvedge_error * err) {
    (void) err;
    const int32_t last = in->n_rows - in->n_heads_kv[in->n_layers - 1];
    for (int32_t r = 0; r < in->n_rows; r++) {
        counts[r] = in->budget;
    }
    for (int32_t r = 0; in->budget > 1 && in->n_layers > 1 && r < in->n_heads_kv[0]; r++) {
        counts[r] -= 1;
        counts[last + r] += 1;
    }
    return KVEDGE_OK;
}

// The first protected value is doubled; the rest stays, as it was handed over.
static kvedge_status doubled(const kvedge_reduce_input * in, float * k, float * v, kvedge_error * err) {
    (void) k, (void) err;
    for (int32_t c = 0; in->sinks + in->recent > 0 && c < in->d_v; c++) {
        v[(size_t) (in->sinks ? 0 : in->n_kept - in->recent) * in->d_v + c] *= 2.0f;
    }
    return KVEDGE_OK;
}

static kvedge_status refuses(const kvedge_score_input * in, float * out, kvedge_error * err) {
    (void) out;
    snprintf(err->message, sizeof(err->message), "layer %d of %d is not to my taste", (int) in->layer, (int) in->n_layers);
    return in->layer == 1 ? KVEDGE_E_UNSUPPORTED : KVEDGE_OK;
}

static kvedge_status silent(const kvedge_score_input * in, float * out, kvedge_error * err) {
    (void) in, (void) out, (void) err;
    return (kvedge_status) 77;
}

static kvedge_status not_a_number(const kvedge_score_input * in, float * out, kvedge_error * err) {
    (void) err;
    out[in->n_tokens + 2] = NAN;
    return KVEDGE_OK;
}

static kvedge_status greedy(const kvedge_allocate_input * in, int32_t * counts, kvedge_error * err) {
    (void) err;
    for (int32_t r = 0; r < in->n_rows; r++) {
        counts[r] = in->budget + 1;
    }
    return KVEDGE_OK;
}

static kvedge_status nothing(const kvedge_allocate_input * in, int32_t * counts, kvedge_error * err) {
    (void) in, (void) counts, (void) err;
    return KVEDGE_OK;
}

// Fails in the last layer, after all others were written.
static kvedge_status late(const kvedge_reduce_input * in, float * k, float * v, kvedge_error * err) {
    (void) v;
    (void) err;
    k[0] = in->layer == in->n_layers - 1 ? 1e6f : k[0];
    return KVEDGE_OK;
}

#define SCORER(NAME, FUNCTION) { .struct_size = sizeof(kvedge_custom_scorer), .name = NAME, .score = FUNCTION }

static kvedge_custom_scorer SCORERS[] = {
    { .struct_size = sizeof(kvedge_custom_scorer), .name = "attended", .summary = "everything that a scorer is given",
      .settings = SETTINGS, .n_settings = 2, .n_queries = 64, .recent = 8, .column_sums = true, .thread_safe = true,
      .score = attended, .user_data = (void *) SETTINGS },
    SCORER("refuses", refuses),
    SCORER("silent", silent),
    SCORER("not-a-number", not_a_number),
};

#define ALLOCATOR(NAME, FUNCTION) { .struct_size = sizeof(kvedge_custom_allocator), .name = NAME, .allocate = FUNCTION }

static const kvedge_custom_allocator ALLOCATORS[] = {
    ALLOCATOR("shifted", shifted),
    ALLOCATOR("greedy", greedy),
    ALLOCATOR("nothing", nothing),
};

#define REDUCER(NAME, FUNCTION) { .struct_size = sizeof(kvedge_custom_reducer), .name = NAME, .reduce = FUNCTION }

static const kvedge_custom_reducer REDUCERS[] = { REDUCER("doubled", doubled), REDUCER("late", late) };

static const kvedge_plugin PLUGIN = {
    .struct_size = sizeof(kvedge_plugin),
    .scorers = SCORERS, .n_scorers = sizeof(SCORERS) / sizeof(*SCORERS),
    .allocators = ALLOCATORS, .n_allocators = sizeof(ALLOCATORS) / sizeof(*ALLOCATORS),
    .reducers = REDUCERS, .n_reducers = sizeof(REDUCERS) / sizeof(*REDUCERS),
};

KVEDGE_PLUGIN_EXPORT const kvedge_plugin * kvedge_plugin_v1(void);

const kvedge_plugin * kvedge_plugin_v1(void) { return &PLUGIN; }
