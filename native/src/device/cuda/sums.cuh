// Shared code of the kernels of sums.cu: their job, and products of rows that a warp holds in registers with rows that stream through
// shared memory.

#pragma once

#include "own.cuh"

#include "ggml-cuda/cp-async.cuh"
#include "ggml-cuda/mma.cuh"

#include <cstdint>

namespace {

using ggml_cuda_mma::tile;

constexpr int   SIDE    = 64;  // a square of the mask has SIDE queries and SIDE keys
constexpr int   THREADS = 256, WARPS_EACH = THREADS / 32;  // block size of the small kernels
constexpr float LOG2E   = 1.4426950408889634f;
constexpr float LOWEST  = -1e30f;  // below all logits; finite, so that LOWEST - LOWEST is not NaN
constexpr float HIGHER  = 10.0f;   // a logit may exceed the running maximum by HIGHER (base 2) before the maximum is raised

enum Seen : uint8_t { NOTHING, ALL, SOME };  // what a square of the mask shows; ALL: every entry is 0

struct Job {
    const float * q;
    const char *  k;
    const half *  mask;
    const float * sinks;
    float *       columns;
    float *       squares;
    float *       entropy;
    void *        queries;  // [H][n][D] scaled queries in the keys' type
    uint8_t *     seen;     // [down][across] Seen of each square
    float4 *      rows;     // [splits_rows][H][n] of logits x in base 2: largest logit m, sum of 2^(x - m), sum of (x - m) 2^(x - m)
    float *       logs;     // [H][padded] log2 of the sum of a query's 2^x
    float *       parts;    // [splits_keys][2][Hkv][keys] partial columns and squares, if splits_keys > 1
    int64_t       q_row, q_head, k_row, k_head, mask_row, columns_head, squares_head;  // strides: k in bytes, others in numbers
    int           n, shown, from, heads_kv, share, d, down, across, padded, splits_rows, splits_keys;
    bool          wants_entropy;
    float         scale, softcap;

    __device__ int heads() const { return heads_kv * share; }
    __device__ int first_key() const { return from / SIDE * SIDE; }
};

template <typename T> struct Pair;
template <> struct Pair<half> {
    using Two = half2;
    static __device__ __forceinline__ Two of(float x, float y) { return __floats2half2_rn(x, y); }
};
template <> struct Pair<nv_bfloat16> {
    using Two = nv_bfloat162;
    static __device__ __forceinline__ Two of(float x, float y) { return __floats2bfloat162_rn(x, y); }
};

// tanh by an exponential, because with fast math tanhf is exact to 11 bits only.
__device__ __forceinline__ float tanh_of(float x) { return 1.0f - 2.0f / (1.0f + exp2f(2.0f * LOG2E * x)); }

// Rows that stream through shared memory. A row takes an odd number of 16 bytes, so that 8 rows lie in different banks.
template <typename T, int D, int N> struct alignas(16) Stage {
    T     rows[N][D + 8];
    float logs[N];
};

__device__ __forceinline__ void copy_sixteen(void * to, const void * from) {
#ifdef CP_ASYNC_AVAILABLE
    cp_async_cg_16<64>(ggml_cuda_cvta_generic_to_shared(to), from);
#else
    *(uint4 *) to = *(const uint4 *) from;
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#ifdef CP_ASYNC_AVAILABLE
    cp_async_wait_all();
#endif
    __syncthreads();
}

// Loads N rows from row `first` on; repeats row `last` beyond it. Leaves the numbers of a row beyond d unchanged.
template <int WARPS, typename T, int D, int N>
__device__ __forceinline__ void load(Stage<T, D, N> & to, const char * rows, int64_t row, int first, int last, int d) {
    constexpr int EACH = D / 8;
    const char *  from = rows + first * row;
    const int     most = last - first, step = (int) row;
#pragma unroll
    for (int i = 0; i < N * EACH; i += 32 * WARPS) {
        const int at = i + (int) (threadIdx.y * 32 + threadIdx.x), r = at / EACH, c = at % EACH * 8;
        if (N * EACH % (32 * WARPS) == 0 || at < N * EACH) {
            if (c < d) {
                copy_sixteen(&to.rows[r][c], from + min(r, most) * step + c * (int) sizeof(T));
            }
        }
    }
}

template <int WARPS, typename T, int D, int N> __device__ __forceinline__ void clear(Stage<T, D, N> & stage, int d) {
    for (int at = threadIdx.y * 32 + threadIdx.x; d < D && at < N * (D / 8); at += 32 * WARPS) {
        if (at % (D / 8) * 8 >= d) {
            *(uint4 *) &stage.rows[at / (D / 8)][at % (D / 8) * 8] = uint4{ 0, 0, 0, 0 };
        }
    }
}

// Loads 16 numbers of 16 streamed rows: of the first 8 rows (low) and of the other 8 (high). ggml's load of the same size scatters each
// half over registers, which costs copies before a product.
template <typename T, typename Two, int W>
__device__ __forceinline__ void load_both(tile<8, 8, Two> & low, tile<8, 8, Two> & high, const T (*rows)[W], int column) {
#ifdef TURING_MMA_AVAILABLE
    const int      lane = threadIdx.x;
    const unsigned from = (unsigned) __cvta_generic_to_shared(&rows[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]) + column * (unsigned) sizeof(T);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(((int *) low.x)[0]), "=r"(((int *) low.x)[1]), "=r"(((int *) high.x)[0]), "=r"(((int *) high.x)[1])
                 : "r"(from));
#else
#pragma unroll
    for (int l = 0; l < 2; l++) {
        low.x[l]  = ((const Two *) &rows[threadIdx.x / 4][column])[4 * l + threadIdx.x % 4];
        high.x[l] = ((const Two *) &rows[threadIdx.x / 4 + 8][column])[4 * l + threadIdx.x % 4];
    }
#endif
}

// 16 * M rows that a warp holds in registers.
template <typename T, int D, int M> struct Held {
    using Two = typename Pair<T>::Two;
    tile<16, 8, Two> x[M][D / 16];

    __device__ __forceinline__ void load(const char * rows, int64_t row, int first, int last, int d) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
#pragma unroll
                for (int l = 0; l < x[m][i].ne; l++) {
                    const int r = min(first + 16 * m + x[m][i].get_i(l), last), c = 2 * (8 * i + x[m][i].get_j(l));
                    ((uint32_t *) x[m][i].x)[l] = c < d ? *(const uint32_t *) (rows + r * row + c * sizeof(T)) : 0u;
                }
            }
        }
    }

    // Adds products with one half of the streamed rows to sums [16 * M, N / 2]. Calls between(i) at each of D / 16 steps, to overlap work.
    template <int N, class F>
    __device__ __forceinline__ void multiply(const Stage<T, D, N> & stage, int half, tile<16, 8, float> (&sums)[M][N / 16], const F & between) const {
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
#pragma unroll
            for (int j = 0; j < N / 32; j++) {
                tile<8, 8, Two> low, high;
                load_both(low, high, &stage.rows[half * (N / 2) + 16 * j], 16 * i);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    ggml_cuda_mma::mma(sums[m][2 * j], x[m][i], low);
                    ggml_cuda_mma::mma(sums[m][2 * j + 1], x[m][i], high);
                }
            }
            between(i);
        }
    }
};

// Calls f(m, j, l) for the i-th of STEPS equal parts of the products with one half of the streamed rows.
template <int M, int N, int STEPS, class F> __device__ __forceinline__ void for_part(int i, const F & f) {
    constexpr int ALL = M * N / 4;
#pragma unroll
    for (int e = 0; e < ALL; e++) {
        if (e >= i * ALL / STEPS && e < (i + 1) * ALL / STEPS) {
            f(e / (N / 4), e % (N / 4) / 4, e % 4);
        }
    }
}

// Returns the first tile in [t, end) for which is_seen is true, else `end`. All threads of a warp call this.
template <class F> __device__ __forceinline__ int next(int t, int end, const F & is_seen) {
    for (; t < end; t += 32) {
        const int      at   = t + (int) threadIdx.x;
        const unsigned seen = __ballot_sync(0xffffffff, at < end && is_seen(at));
        if (seen) {
            return t + __ffs((int) seen) - 1;
        }
    }
    return end;
}

__device__ __forceinline__ float bias_of(const Job & job, int query, int key) {
    return query < job.n && key < job.shown ? LOG2E * __half2float(job.mask[query * job.mask_row + key]) : -INFINITY;
}

// Raises a query's running maximum where a logit exceeds it by more than HIGHER, and rescales the sums. Each lane has its own maximum.
template <int M, int N>
__device__ __forceinline__ void raise(tile<16, 8, float> (&x)[M][N / 16], float (&most)[M][2], float (&sum)[M][2], float (&turn)[M][2]) {
    float top[M][2];
    bool  higher = false;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            top[m][i] = LOWEST;
#pragma unroll
            for (int j = 0; j < N / 16; j++) {
                top[m][i] = fmaxf(top[m][i], fmaxf(x[m][j].x[2 * i], x[m][j].x[2 * i + 1]));
            }
            higher |= top[m][i] > HIGHER || (most[m][i] == LOWEST && top[m][i] > LOWEST);
        }
    }
    if (!__any_sync(0xffffffff, higher)) {
        return;
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool none = most[m][i] == LOWEST;
            if (top[m][i] > HIGHER || (none && top[m][i] > LOWEST)) {
                const float by = top[m][i], less = exp2f(-by);
                turn[m][i] = none ? 0.0f : less * (turn[m][i] - by * sum[m][i]);
                sum[m][i]  = none ? 0.0f : less * sum[m][i];
                most[m][i] = none ? by : most[m][i] + by;
#pragma unroll
                for (int j = 0; j < N / 16; j++) {
                    x[m][j].x[2 * i] -= by;
                    x[m][j].x[2 * i + 1] -= by;
                }
            }
        }
    }
}

}  // namespace
