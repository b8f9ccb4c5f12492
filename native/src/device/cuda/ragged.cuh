// Shared code of the two kernels of OWN_RAGGED, attention over KV heads of different lengths: ragged.cu for all types, and
// ragged_mma.cu for f16 rows if several query heads share a KV head.

#pragma once

#include "own.cuh"

namespace kvedge_ragged {

constexpr int   THREADS    = 256, WARPS = THREADS / 32, BLOCKS = 2;  // BLOCKS: blocks on a multiprocessor
constexpr int   MOST_HEADS = 512;
constexpr float LOG2E      = 1.4426950408889634f;
constexpr float LOWEST     = -1e30f;  // below all logits; finite, so that LOWEST - LOWEST is not NaN

struct Job {
    char *        k;
    char *        v;
    const float * q;
    const half *  bias;
    const float * sinks;
    int *         spans;
    float *       dst;
    float *       parts;  // [blocks + bundles][G][d_v] weighted sums of values of each part of a bundle's rows
    float2 *      marks;  // [blocks + bundles][G] largest logit and sum of the weights of each part
    int64_t       k_row, v_row;  // bytes
    int64_t       q_head;        // floats
    int           d_k, d_v;
    int           heads_kv, share, bundles;  // share: query heads of a KV head; bundles: bundles of a KV head's query heads
    int           span;                      // i32 numbers of a span
    float         scale, softcap;
    int           fewest;  // fewest rows of a block
    // the token's own rows [Hkv][d] and their slots [Hkv], which the kernel writes before it reads rows; or NULL
    const float *   fresh_k;
    const float *   fresh_v;
    const int64_t * fresh_at;
};

static __device__ __forceinline__ void store(float x, float & to) { to = x; }
static __device__ __forceinline__ void store(float x, half & to) { to = __float2half_rn(x); }
static __device__ __forceinline__ void store(float x, nv_bfloat16 & to) { to = __float2bfloat16_rn(x); }

// Writes the token's own row of a KV head if its slot is among the n slots from `slot` on: each block that reads the row writes the
// row. All threads of the block call this.
template <typename T> static __device__ __forceinline__ void write_fresh(const Job & job, int kv, int64_t slot, int n) {
    const int64_t at = job.fresh_k ? job.fresh_at[kv] : -1;
    if (at < slot || at >= slot + n) {
        return;
    }
    for (int i = threadIdx.x; i < job.d_k; i += THREADS) {
        store(job.fresh_k[(int64_t) kv * job.d_k + i], ((T *) (job.k + at * job.k_row))[i]);
    }
    for (int i = threadIdx.x; i < job.d_v; i += THREADS) {
        store(job.fresh_v[(int64_t) kv * job.d_v + i], ((T *) (job.v + at * job.v_row))[i]);
    }
    __syncthreads();
}

// Prefetches rows of a KV head into the L2 cache while earlier kernels still compute the queries. All threads call this.
static __device__ __forceinline__ void fetch_ahead(const Job & job, int64_t slot, int n) {
    constexpr int LINE = 128, MOST = 128;  // bytes, rows
    const auto    fetch = [&](const char * rows, int64_t row) {
        const char * from = rows + slot * row;
        for (int64_t i = (int64_t) threadIdx.x * LINE; i < min(n, MOST) * row; i += THREADS * LINE) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
        }
    };
    fetch(job.k, job.k_row);
    fetch(job.v, job.v_row);
}

// tanh by an exponential, because with fast math tanhf is exact to 11 bits only.
static __device__ __forceinline__ float tanh_of(float x) { return 1.0f - 2.0f / (1.0f + exp2f(2.0f * LOG2E * x)); }

// Four neighbouring numbers of a weighted sum of values. A row's weight is 2^(logit - most); `weight` is the sum of the weights.
struct Sum {
    float  most = LOWEST, weight = 0.0f;
    float4 values = { 0.0f, 0.0f, 0.0f, 0.0f };

    // Adds the first min(n, N) partial sums. Loads all of them before it adds the first.
    template <int N, class M, class V> __device__ __forceinline__ void add(int n, const M & mark_of, const V & values_of) {
        float2 marks[N];
        float4 x[N];
        float  top = most;
#pragma unroll
        for (int i = 0; i < N; i++) {
            marks[i] = i < n ? mark_of(i) : float2{ LOWEST, 0.0f };
            x[i]     = i < n ? values_of(i) : float4{ 0.0f, 0.0f, 0.0f, 0.0f };
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            top = fmaxf(top, marks[i].x);
        }
        const float old = exp2f(most - top);
        values = { values.x * old, values.y * old, values.z * old, values.w * old };
        weight *= old;
        most = top;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float now = exp2f(marks[i].x - top);
            weight += marks[i].y * now;
            values = { values.x + x[i].x * now, values.y + x[i].y * now, values.z + x[i].z * now, values.w + x[i].w * now };
        }
    }
};

// Writes the number of rows before each bundle to first [bundles + 1]. One warp calls this.
static __device__ __forceinline__ void number_rows(const Job & job, int * first) {
    const int lane = threadIdx.x;
    int       sum  = 0;
#pragma unroll 1
    for (int base = 0; base < job.heads_kv * job.bundles; base += 32) {
        const int  at     = base + lane;
        const bool inside = at < job.heads_kv * job.bundles;
        int        n      = inside ? job.spans[(at / job.bundles) * job.span + 1] : 0;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
            const int below = __shfl_up_sync(0xffffffff, n, o);
            n += lane >= o ? below : 0;
        }
        if (inside) {
            first[at + 1] = sum + n;
        }
        sum += __shfl_sync(0xffffffff, n, 31);
    }
    if (lane == 0) {
        first[0] = 0;
    }
}

// Runs OWN_RAGGED on tensor cores: d_k = d_v = 64 or 128, at most 8 query heads in a bundle, one block on each multiprocessor.
constexpr int MMA_HEADS = 8;
void attend_mma(const Job & job, int blocks, cudaStream_t stream);

}  // namespace kvedge_ragged
