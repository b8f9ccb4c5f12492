// OWN_RAGGED (../cuda/ragged.cu describes it) on the CPU. Rows, queries and sums are f32. The rows of all KV heads, head by head, are
// divided into as many equal parts as there are threads.

#include "own.h"

#include "ggml-cpu/vec.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// A query head's weighted sum of values. A row's weight is e^(logit - most); `weight` is the sum of the weights.
struct Sum {
    float   most, weight;
    float * values;  // [d_v]

    void raise(int d_v, float top) {
        if (top > most) {
            const float old = std::exp(most - top);
            ggml_vec_scale_f32(d_v, values, old);
            weight *= old;
            most = top;
        }
    }
    void add(int d_v, const float * x, float x_most, float x_weight) {
        raise(d_v, x_most);
        const float now = std::exp(x_most - most);
        ggml_vec_mad_f32(d_v, values, x, now);
        weight += x_weight * now;
    }
};

struct Job {
    const ggml_tensor *q, *k, *v, *bias, *sinks, *spans;
    int                d_k, d_v, heads, heads_kv, share, threads;
    float              scale, softcap;
    float *            work;  // [threads][heads][2 + d_v], then [threads][d_k + d_v]

    float *         place(int thread, int head) const { return work + ((int64_t) thread * heads + head) * (2 + d_v); }
    float *         row(int thread) const { return place(threads, 0) + (int64_t) thread * (d_k + d_v); }
    const int32_t * span(int kv) const { return (const int32_t *) ((const char *) spans->data + (size_t) kv * spans->nb[1]); }
};

const float * widened(const ggml_tensor * rows, int64_t slot, float * out) {
    const char * from = (const char *) rows->data + (size_t) slot * rows->nb[1];
    switch (rows->type) {
        case GGML_TYPE_F16: ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) from, out, rows->ne[0]); return out;
        case GGML_TYPE_BF16: ggml_cpu_bf16_to_fp32((const ggml_bf16_t *) from, out, rows->ne[0]); return out;
        default: GGML_ASSERT(rows->type == GGML_TYPE_F32); return (const float *) from;
    }
}

void write_row(const ggml_tensor * to, const ggml_tensor * from, int row, int64_t slot) {
    const auto * x = (const float *) ((const char *) from->data + (size_t) row * from->nb[1]);
    ggml_get_type_traits_cpu(to->type)->from_float(x, (char *) to->data + (size_t) slot * to->nb[1], to->ne[0]);
}

// Adds one row to the sums of all query heads of its KV head.
void attend_row(const Job & job, int thread, int kv, int64_t slot) {
    float * const keys = job.row(thread), *values = keys + job.d_k;
    const float * k    = widened(job.k, slot, keys);
    const float * v    = widened(job.v, slot, values);
    const float   bias = job.bias ? ggml_fp16_to_fp32(((const ggml_fp16_t *) job.bias->data)[slot]) : 0.0f;
    if (bias == -INFINITY) {
        return;
    }
    for (int g = 0; g < job.share; g++) {
        const int     head = kv * job.share + g;
        const float * q    = (const float *) ((const char *) job.q->data + (size_t) head * job.q->nb[2]);
        float         x    = 0.0f;
        ggml_vec_dot_f32(job.d_k, &x, 0, k, 0, q, 0, 1);
        x *= job.scale;
        x = (job.softcap == 0.0f ? x : job.softcap * std::tanh(x / job.softcap)) + bias;
        float * at = job.place(thread, head);
        Sum     sum{ at[0], at[1], at + 2 };
        sum.add(job.d_v, v, x, 1.0f);
        at[0] = sum.most;
        at[1] = sum.weight;
    }
}

void join(const Job & job, int head, float * out) {
    Sum sum{ -INFINITY, 0.0f, out };
    std::fill_n(out, job.d_v, 0.0f);
    for (int t = 0; t < job.threads; t++) {
        const float * part = job.place(t, head);
        if (part[1] > 0.0f) {
            sum.add(job.d_v, part + 2, part[0], part[1]);
        }
    }
    const float sunk = job.sinks && sum.weight > 0.0f ? std::exp(((const float *) job.sinks->data)[head] - sum.most) : 0.0f;
    ggml_vec_scale_f32(job.d_v, out, sum.weight > 0.0f ? 1.0f / (sum.weight + sunk) : 0.0f);
}

}  // namespace

void kvedge_cpu_ragged(const ggml_compute_params * params, ggml_tensor * dst) {
    Job job;
    job.q        = dst->src[0];
    job.k        = dst->src[1];
    job.v        = dst->src[2];
    job.bias     = dst->src[3];
    job.sinks    = dst->src[4];
    job.spans    = dst->src[5];
    job.d_k      = (int) job.k->ne[0];
    job.d_v      = (int) job.v->ne[0];
    job.heads    = (int) job.q->ne[2];
    job.heads_kv = (int) job.spans->ne[1];
    job.share    = job.heads / job.heads_kv;
    job.threads  = params->nth;
    job.work     = (float *) params->wdata;
    std::memcpy(&job.scale, (const float *) dst->op_params, sizeof(float));
    std::memcpy(&job.softcap, (const float *) dst->op_params + 2, sizeof(float));
    const size_t floats = (size_t) (job.row(job.threads) - job.work);
    GGML_ASSERT(job.q->ne[1] == 1 && job.q->type == GGML_TYPE_F32 && job.spans->type == GGML_TYPE_I32);
    GGML_ASSERT(params->wsize >= floats * sizeof(float));  // ggml_graph_plan reserves it for flash attention

    if (dst->src[6]) {  // write the token's own rows first
        for (int kv = params->ith; kv < job.heads_kv; kv += params->nth) {
            write_row(job.k, dst->src[6], kv, ((const int64_t *) dst->src[8]->data)[kv]);
            write_row(job.v, dst->src[7], kv, ((const int64_t *) dst->src[8]->data)[kv]);
        }
        ggml_barrier(params->threadpool);
    }
    std::fill_n(job.place(params->ith, 0), (size_t) job.heads * (size_t) (2 + job.d_v), 0.0f);
    for (int head = 0; head < job.heads; head++) {
        job.place(params->ith, head)[0] = -INFINITY;
    }
    int64_t all = 0, before = 0;
    for (int kv = 0; kv < job.heads_kv; kv++) {
        all += job.span(kv)[1];
    }
    const int64_t first = all * params->ith / params->nth, behind = all * (params->ith + 1) / params->nth;
    for (int kv = 0; kv < job.heads_kv; kv++) {
        const int64_t n = job.span(kv)[1];
        for (int64_t row = std::max(first, before); row < std::min(behind, before + n); row++) {
            attend_row(job, params->ith, kv, job.span(kv)[0] + row - before);
        }
        before += n;
    }
    ggml_barrier(params->threadpool);
    for (int head = params->ith; head < job.heads; head += params->nth) {
        join(job, head, (float *) dst->data + (int64_t) head * job.d_v);
    }
}
