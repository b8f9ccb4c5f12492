// OWN_SUMS (../cuda/sums.cu describes it) on the CPU, in f32; keys may be f32, too. A thread computes whole KV heads.

#include "own.h"

#include "ggml-cpu/vec.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

template <typename T> T * row(const ggml_tensor * x, int64_t i1, int64_t i2 = 0) {
    return (T *) ((char *) x->data + i1 * (int64_t) x->nb[1] + i2 * (int64_t) x->nb[2]);
}

void widen(const ggml_tensor * rows, int64_t i, int64_t head, float * out) {
    switch (rows->type) {
        case GGML_TYPE_F16: return ggml_cpu_fp16_to_fp32(row<ggml_fp16_t>(rows, i, head), out, rows->ne[0]);
        case GGML_TYPE_BF16: return ggml_cpu_bf16_to_fp32(row<ggml_bf16_t>(rows, i, head), out, rows->ne[0]);
        default: GGML_ASSERT(rows->type == GGML_TYPE_F32); std::copy_n(row<float>(rows, i, head), rows->ne[0], out);
    }
}

// Writes the attention weights [shown] of query t of a query head. key: scratch [d] for one key in f32.
void weigh(const ggml_tensor * dst, int64_t t, int64_t head, int64_t kv, float * key, float * weights) {
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *mask = dst->src[2], *sinks = dst->src[6];
    const auto *       params = (const float *) dst->op_params;
    const float        scale = params[0], softcap = params[2];
    const int          shown = (int) k->ne[1];
    float              most = -INFINITY, sum = 0.0f;
    for (int i = 0; i < shown; i++) {
        const float bias = ggml_fp16_to_fp32(row<ggml_fp16_t>(mask, t)[i]);
        weights[i]       = -INFINITY;
        if (bias != -INFINITY) {
            float x = 0.0f;
            widen(k, i, kv, key);
            ggml_vec_dot_f32((int) k->ne[0], &x, 0, key, 0, row<float>(q, head, t), 0, 1);
            x *= scale;
            weights[i] = (softcap == 0.0f ? x : softcap * std::tanh(x / softcap)) + bias;
        }
        most = std::max(most, weights[i]);
    }
    for (int i = 0; i < shown; i++) {
        weights[i] = weights[i] == -INFINITY ? 0.0f : std::exp(weights[i] - most);
        sum += weights[i];
    }
    sum += sinks && sum > 0.0f ? std::exp(((const float *) sinks->data)[head] - most) : 0.0f;
    ggml_vec_scale_f32(shown, weights, sum > 0.0f ? 1.0f / sum : 0.0f);
}

}  // namespace

void kvedge_cpu_sums(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *columns = dst->src[3], *squares = dst->src[4];
    const int64_t      d = k->ne[0], shown = k->ne[1], heads_kv = k->ne[2], share = q->ne[1] / heads_kv;
    const int64_t      from = dst->op_params[OWN_KIND + 1];
    float * const      key = (float *) params->wdata + params->ith * (d + 2 * shown), *weights = key + d, *sum = weights + shown;
    GGML_ASSERT(params->wsize >= (size_t) (params->nth * (d + 2 * shown)) * sizeof(float));  // ggml_graph_plan reserves it
    for (int64_t kv = params->ith; kv < heads_kv; kv += params->nth) {
        for (int64_t t = 0; t < q->ne[2]; t++) {
            std::fill_n(sum, shown, 0.0f);
            for (int64_t head = kv * share; head < (kv + 1) * share; head++) {
                weigh(dst, t, head, kv, key, weights);
                ggml_vec_add_f32((int) shown, sum, sum, weights);
                for (int64_t i = 0; i < shown && dst->op_params[OWN_KIND + 2] != 0; i++) {
                    *row<float>(dst->src[5], kv) += weights[i] > 0.0f ? weights[i] * std::log(weights[i]) : 0.0f;
                }
            }
            for (int64_t i = from; i < shown; i++) {
                if (columns) {
                    row<float>(columns, kv)[i - from] += sum[i];
                }
                if (squares) {
                    row<float>(squares, kv)[i - from] += sum[i] * sum[i];
                }
            }
        }
    }
}
