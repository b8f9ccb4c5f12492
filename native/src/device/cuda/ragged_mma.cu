// OWN_RAGGED (ragged.cu) on tensor cores, for f16 rows: up to 8 query heads share a KV head, whose rows are read once.
//
// A warp loads 16 rows at a time straight into the registers that mma.m16n8k16 reads. The 16 rows of the first matrix are queries: row g
// is the rounded query of head g, row g + 8 its rounding error, so that logits are as exact as in f32. The weights that multiply
// values are split in the same way. For lane l let g = l / 4 and t = l % 4:
//
//   logits   The second matrix holds 8 keys. Lane l holds numbers 32 j + 8 t to + 7 of key g: mma 2 j takes the first four numbers of
//            each 8, mma 2 j + 1 the other four. The query's numbers are permuted in the same way.
//   values   The second matrix holds 16 rows and 8 columns. Lane l holds numbers 64 h + 8 g to + 7 of the rows of its logits: 2 t,
//            2 t + 1, 2 t + 8 and 2 t + 9. mma 8 h + j takes number j of each 8, so that columns 2 t and 2 t + 1 of the result are
//            numbers 64 h + 16 t + j and 64 h + 16 t + 8 + j.

#include "ragged.cuh"

namespace kvedge_ragged {

namespace {

constexpr int ROWS = 16, HEADS = MMA_HEADS, BATCH = 16;  // BATCH: partial sums that are loaded at a time

template <int D> struct Shared {
    int    first[MOST_HEADS + 1];
    float4 sums[WARPS][HEADS][D / 4];
    float2 marks[WARPS][HEADS];
    bool   last;  // this block is the last block of a bundle to finish
};

__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    NO_DEVICE_CODE;
#endif
}

// Rounds two numbers to half precision (high), and writes their rounding errors (low).
__device__ __forceinline__ void split(float x, float y, unsigned & high, unsigned & low) {
    const half2  rounded = __floats2half2_rn(x, y);
    const float2 back    = __half22float2(rounded);
    const half2  rest    = __floats2half2_rn(x - back.x, y - back.y);
    high                 = *(const unsigned *) &rounded;
    low                  = *(const unsigned *) &rest;
}

__device__ __forceinline__ unsigned word(const uint4 & x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// The state of a warp for the query heads of a bundle: the lanes with g = lane / 4 hold head g.
template <int D> struct Warp {
    unsigned q[D / 16][4];
    float    acc[D / 8][4];
    float    most, weight;  // weight: sum over this lane's rows

    __device__ __forceinline__ void start(const Job & job, const float * heads, int n) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            float4 x = { 0.0f, 0.0f, 0.0f, 0.0f };
            if (g < n) {
                x = *(const float4 *) (heads + g * job.q_head + 32 * (k / 2) + 8 * t + 4 * (k % 2));
            }
            const float by = LOG2E * job.scale;
            split(by * x.x, by * x.y, q[k][0], q[k][1]);
            split(by * x.z, by * x.w, q[k][2], q[k][3]);
        }
#pragma unroll
        for (int k = 0; k < D / 8; k++) {
            acc[k][0] = acc[k][1] = acc[k][2] = acc[k][3] = 0.0f;
        }
        most   = LOWEST;
        weight = 0.0f;
    }

    // Replaces the logits [u][i] of rows 8 u + 2 t + i by weights, and scales the sums to the new `most`.
    __device__ __forceinline__ void weigh(float (&logits)[2][2]) {
        float top = fmaxf(most, fmaxf(fmaxf(logits[0][0], logits[0][1]), fmaxf(logits[1][0], logits[1][1])));
        top       = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
        top       = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
        if (__any_sync(0xffffffff, top > most)) {
            const float old = exp2f(most - top);
            most            = top;
            weight *= old;
#pragma unroll
            for (int k = 0; k < D / 8; k++) {
                acc[k][0] *= old, acc[k][1] *= old, acc[k][2] *= old, acc[k][3] *= old;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            logits[i / 2][i % 2] = exp2f(logits[i / 2][i % 2] - most);
            weight += logits[i / 2][i % 2];
        }
    }

    __device__ __forceinline__ void store(Shared<D> & shared) {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        weight += __shfl_xor_sync(0xffffffff, weight, 1);
        weight += __shfl_xor_sync(0xffffffff, weight, 2);
#pragma unroll
        for (int k = 0; k < D / 8; k += 4) {  // four tiles hold numbers k % 8 to k % 8 + 3 of each 8
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const auto of = [&](int i) { return acc[k + i][c] + acc[k + i][c + 2]; };
                shared.sums[warp][g][(64 * (k / 8) + 16 * t + 8 * c + k % 8) / 4] = { of(0), of(1), of(2), of(3) };
            }
        }
        if (t == 0) {
            shared.marks[warp][g] = { most, weight };
        }
    }
};

// Attends to n rows from `slot` on. Each warp writes its result to shared memory.
template <int D> __device__ __forceinline__ void attend(const Job & job, const float * q_heads, int heads, int64_t slot, int n, Shared<D> & shared) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Warp<D>   warp;
    uint4     keys[2][D / 32], values[4][D / 64];
    const auto load_keys = [&](int at) {
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int i = at + 8 * u + g;
#pragma unroll
            for (int j = 0; j < D / 32; j++) {
                keys[u][j] = i < n ? *(const uint4 *) (job.k + (slot + i) * job.k_row + (32 * j + 8 * t) * sizeof(half)) : uint4{ 0, 0, 0, 0 };
            }
        }
    };
    const int first = threadIdx.x / 32 * ROWS;
    load_keys(first);
    warp.start(job, q_heads, heads);
#pragma unroll 1
    for (int at = first; at < n; at += WARPS * ROWS) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int i = at + 2 * t + r % 2 + 8 * (r / 2);
#pragma unroll
            for (int h = 0; h < D / 64; h++) {
                values[r][h] = i < n ? *(const uint4 *) (job.v + (slot + i) * job.v_row + (64 * h + 8 * g) * sizeof(half)) : uint4{ 0, 0, 0, 0 };
            }
        }
        float logits[2][2];
#pragma unroll
        for (int u = 0; u < 2; u++) {
            float c[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
#pragma unroll
            for (int j = 0; j < D / 32; j++) {
                mma(c, warp.q[2 * j], keys[u][j].x, keys[u][j].y);
                mma(c, warp.q[2 * j + 1], keys[u][j].z, keys[u][j].w);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row  = at + 8 * u + 2 * t + i;
                float     x    = c[i] + c[i + 2];
                x              = job.softcap == 0.0f ? x : LOG2E * job.softcap * tanh_of(x / (LOG2E * job.softcap));
                const float by = job.bias && row < n ? LOG2E * __half2float(job.bias[slot + row]) : 0.0f;
                logits[u][i]   = row < n ? x + by : -INFINITY;
            }
        }
        load_keys(at + WARPS * ROWS);
        warp.weigh(logits);
        unsigned weights[4];
        split(logits[0][0], logits[0][1], weights[0], weights[1]);
        split(logits[1][0], logits[1][1], weights[2], weights[3]);
#pragma unroll
        for (int h = 0; h < D / 64; h++) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const unsigned which = j % 2 == 0 ? 0x5410 : 0x7632;  // the same half of two rows' words
                mma(warp.acc[8 * h + j], weights, __byte_perm(word(values[0][h], j / 2), word(values[1][h], j / 2), which),
                    __byte_perm(word(values[2][h], j / 2), word(values[3][h], j / 2), which));
            }
        }
    }
    warp.store(shared);
}

template <int D> __device__ __forceinline__ void finish(const Job & job, int head, int i, const Sum & sum) {
    const float sunk = job.sinks ? exp2f(LOG2E * job.sinks[head] - sum.most) : 0.0f;
    const float by   = sum.weight > 0.0f ? 1.0f / (sum.weight + sunk) : 0.0f;
    *(float4 *) (job.dst + (int64_t) head * D + 4 * i) = { by * sum.values.x, by * sum.values.y, by * sum.values.z, by * sum.values.w };
}

template <int D> __global__ void __launch_bounds__(THREADS, 1) attend_ragged(const Job job) {
    __shared__ Shared<D> shared;
    constexpr int        QUARTER = D / 4;
    const int            n_all   = job.heads_kv * job.bundles;
    ggml_cuda_pdl_lc();
    if (threadIdx.x < 32) {
        number_rows(job, shared.first);
    }
    __syncthreads();

    const int  rows = max(job.fewest, (shared.first[n_all] + (int) gridDim.x - 1) / (int) gridDim.x);  // rows of a block
    const int  end  = min(shared.first[n_all], ((int) blockIdx.x + 1) * rows);
    const int  g = threadIdx.x / QUARTER, i = threadIdx.x % QUARTER;
    const auto head_of  = [&](int bundle) { return bundle / job.bundles * job.share + bundle % job.bundles * HEADS; };
    const auto heads_of = [&](int bundle) { return min(HEADS, job.share - bundle % job.bundles * HEADS); };
    int        row = blockIdx.x * rows;
    for (int b = 0; b < n_all; b++) {
        const int before = shared.first[b], behind = shared.first[b + 1];
        if (row < end && before <= row && row < behind) {
            fetch_ahead(job, (int64_t) job.spans[b / job.bundles * job.span] + row - before, min(end, behind) - row);
        }
    }
    ggml_cuda_pdl_sync();
    for (int b = 0; b < n_all; b++) {
        const int before = shared.first[b], behind = shared.first[b + 1], stop = min(end, behind);
        const int head = head_of(b), heads = heads_of(b);
        if (before == behind && b % (int) gridDim.x == (int) blockIdx.x && g < heads) {
            finish<D>(job, head + g, i, Sum());
        }
        if (stop <= row) {
            continue;
        }
        int * span = job.spans + b / job.bundles * job.span;
        write_fresh<half>(job, b / job.bundles, (int64_t) span[0] + row - before, stop - row);
        attend<D>(job, job.q + head * job.q_head, heads, (int64_t) span[0] + row - before, stop - row, shared);
        row = stop;
        __syncthreads();
        const int from = before / rows, parts = (behind - 1) / rows - from + 1;
        Sum       sum;
        if (g < heads) {
            sum.add<WARPS>(WARPS, [&](int w) { return shared.marks[w][g]; }, [&](int w) { return shared.sums[w][g][i]; });
            if (parts == 1) {
                finish<D>(job, head + g, i, sum);
            } else {
                const int64_t at = (int64_t) ((int) blockIdx.x + b) * HEADS + g;
                *(float4 *) (job.parts + at * D + 4 * i) = sum.values;
                if (i == 0) {
                    job.marks[at] = { sum.most, sum.weight };
                }
                __threadfence();
            }
        }
        __syncthreads();
        if (parts == 1) {
            continue;
        }
        if (threadIdx.x == 0) {  // the counter goes up to parts - 1, then back to 0
            shared.last = atomicInc((unsigned *) span + 2 + b % job.bundles, (unsigned) parts - 1) == (unsigned) parts - 1;
        }
        __syncthreads();
        if (shared.last && g < heads) {
            __threadfence();
            sum = Sum();
            for (int p = 0; p < parts; p += BATCH) {
                const auto at = [&](int w) { return (int64_t) (from + p + w + b) * HEADS + g; };
                sum.add<BATCH>(parts - p, [&](int w) { return __ldcg(job.marks + at(w)); },
                               [&](int w) { return __ldcg((const float4 *) (job.parts + at(w) * D + 4 * i)); });
            }
            finish<D>(job, head + g, i, sum);
        }
    }
}

}  // namespace

void attend_mma(const Job & job, int blocks, cudaStream_t stream) {
    const ggml_cuda_kernel_launch_params params(dim3(blocks), dim3(THREADS), 0, stream);
    if (job.d_k == 64) {
        ggml_cuda_kernel_launch(attend_ragged<64>, params, job);
    } else {
        ggml_cuda_kernel_launch(attend_ragged<128>, params, job);
    }
}

}  // namespace kvedge_ragged
