// The scorer of outlying.py in C.
//
//   cc -std=c99 -O2 -shared -fPIC -I native/include -o outlying.so examples/plugins/outlying.c -lm
//   kvedge chat --plugin ./outlying.so --method outlying-c --image examples/scene-1.png "What is this?"

#include "kvedge.h"

#include <math.h>

// The distance of every key from the mean key of its head: k [Hkv][T][d_k] -> out [Hkv][T].
static kvedge_status score(const kvedge_score_input * in, float * out, kvedge_error * err) {
    const int32_t T = in->n_tokens, d = in->d_k;
    (void) err;  // err->message is where a reason would go, with any other status than KVEDGE_OK
    for (int32_t h = 0; h < in->n_heads_kv; h++) {
        const float * k = in->k + (size_t) h * T * d;
        for (int32_t c = 0; c < d; c++) {
            double mean = 0.0;
            for (int32_t t = 0; t < T; t++) {
                mean += k[(size_t) t * d + c] / T;
            }
            for (int32_t t = 0; t < T; t++) {
                const double x = k[(size_t) t * d + c] - mean;
                out[(size_t) h * T + t] += (float) (x * x);
            }
        }
        for (int32_t t = 0; t < T; t++) {
            out[(size_t) h * T + t] = sqrtf(out[(size_t) h * T + t]);
        }
    }
    return KVEDGE_OK;
}

static const kvedge_custom_scorer SCORERS[] = { {
    .struct_size = sizeof(kvedge_custom_scorer),
    .name        = "outlying-c",
    .summary     = "keys far from the mean key of their head",
    .recent      = 32,
    .thread_safe = true,
    .score       = score,
} };

static const kvedge_plugin PLUGIN = { .struct_size = sizeof(kvedge_plugin), .scorers = SCORERS, .n_scorers = 1 };

KVEDGE_PLUGIN_EXPORT const kvedge_plugin * kvedge_plugin_v1(void);

const kvedge_plugin * kvedge_plugin_v1(void) { return &PLUGIN; }
