// OWN_NEAREST (own.h) on CUDA: finds the nearest kept key of each evicted key. A block holds NEAREST_TILE evicted rows of a head in
// registers, as fragments for tensor cores. It reads the head's kept rows tile by tile in shared memory while the next tile loads.
// Each thread keeps its best score; products are never stored.
//
// A score is product * scale + offset. By distance: the product minus half of the kept key's square. By angle: the product over the
// kept key's length. A kept key with a number that is not finite is never chosen, and by angle no kept key of length 0.

#include "own.cuh"

namespace {

struct Job {
    const char *    rows;
    const int *     kept;
    const int *     heads;
    const float2 *  scales;   // scale and offset of the score of each kept row
    int *           targets;  // the result, or NULL: the result is `small`
    short *         small;
    float *         shares;   // the similarities, or NULL
    int             n_heads, d, row_bytes;
    float           reach;

    __device__ __forceinline__ const char * row(int slot) const { return rows + (int64_t) slot * row_bytes; }
};

// ---------------------------------------------------------------------------------------------------------
// Instructions

__device__ __forceinline__ void copy_16(void * to, const void * from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned) __cvta_generic_to_shared(to)), "l"(from));
#endif
}

template <int BYTES> __device__ __forceinline__ void copy_small(void * to, const void * from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((unsigned) __cvta_generic_to_shared(to)), "l"(from), "n"(BYTES));
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Loads four 8 x 8 matrices. Each thread passes the address of one row; threads 8 i to 8 i + 7 pass the rows of matrix i.
__device__ __forceinline__ void load_matrices(unsigned (&out)[4], const void * row) {
#if __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"((unsigned) __cvta_generic_to_shared(row)));
#endif
}

// c [16, 8] += a [16, 16] * b [16, 8]
template <typename T> __device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (std::is_same_v<T, half>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------

template <typename T> __device__ __forceinline__ float2 widen(unsigned two) {
    if constexpr (std::is_same_v<T, half>) {
        return __half22float2(*(const half2 *) &two);
    } else {
        return { __uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u) };
    }
}

template <typename T> __device__ __forceinline__ float square(unsigned two) {
    const float2 x = widen<T>(two);
    return x.x * x.x + x.y * x.y;
}

// Writes scales [n] of the kept rows. A warp computes one row.
template <typename T> __global__ void scale_kept(const Job job, int n, float2 * scales) {
    const int i = (int) (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32), lane = threadIdx.x % 32;
    if (i >= n) {
        return;
    }
    float own = 0.0f;
    if (lane < job.d / 8) {
        const uint4 x = *(const uint4 *) (job.row(job.kept[i]) + lane * 16);
        own = square<T>(x.x) + square<T>(x.y) + square<T>(x.z) + square<T>(x.w);
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
        own += __shfl_xor_sync(0xffffffff, own, o);
    }
    if (lane == 0) {
        scales[i] = job.reach > 0.0f ? float2{ 1.0f, -0.5f * own } : own > 0.0f ? float2{ rsqrtf(own), 0.0f } : float2{ 0.0f, -INFINITY };
    }
}

// Returns the slot of a head's i-th evicted row. kept: slots of its kept rows, ascending. first: slot of its first pending row.
__device__ __forceinline__ int evicted_row(const int * kept, int n_kept, int first, int i) {
    int low = 0, high = n_kept;  // bounds of the number of kept rows before the evicted row
    while (low < high) {
        const int middle = (low + high) / 2;
        if (kept[middle] - first - middle <= i) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return first + i + low;
}

// Kept rows in shared memory. A row takes an odd number of 16 bytes, so that 8 rows lie in different banks.
template <int STEPS, int N> struct Tile {
    static constexpr int ROW = 32 * STEPS + 16;

    float2 scales[N];
    char   rows[N * ROW];
};

// A row has STEPS * 16 numbers, a warp PER_WARP * 16 evicted rows, a tile N kept rows; AT_ONCE * 8 kept rows are multiplied at a time.
template <typename T, int STEPS, int PER_WARP, int N, int AT_ONCE, int LEAST_BLOCKS>
__global__ void __launch_bounds__(32 * NEAREST_TILE / (16 * PER_WARP), LEAST_BLOCKS) find_nearest(const Job job) {
    constexpr int THREADS = 32 * NEAREST_TILE / (16 * PER_WARP), ROW = Tile<STEPS, N>::ROW;
    static_assert(THREADS >= N && THREADS >= 128 && N % (8 * AT_ONCE) == 0 && AT_ONCE % 2 == 0, "");
    __shared__ __align__(16) Tile<STEPS, N> tiles[2];
    __shared__ int                          places[2][N], evicted[NEAREST_TILE];
    __shared__ float                        squares[NEAREST_TILE];  // squared lengths of the evicted rows

    // find the head of this block's results: heads are in the order of their results
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, quad = lane / 4, in_quad = lane % 4;
    const int begin  = (int) blockIdx.x * NEAREST_TILE;
    int       head   = -1;
    for (int base = 0; base < job.n_heads; base += 32) {
        const bool before = base + lane < job.n_heads && job.heads[(base + lane) * NEAREST_HEAD + NEAREST_AT] <= begin;
        head += __popc(__ballot_sync(0xffffffff, before));
    }
    const int * about = job.heads + head * NEAREST_HEAD;
    const int   first = about[NEAREST_FIRST], n_kept = about[NEAREST_KEPT], from = begin - about[NEAREST_AT];
    const int   n = min(NEAREST_TILE, about[NEAREST_EVICTED] - from);
    if (n <= 0) {
        return;
    }
    const int *    kept   = job.kept + about[NEAREST_KEPT_AT];
    const float2 * scales = job.scales + about[NEAREST_KEPT_AT];
    const int      chunks = job.d / 8;  // of 16 bytes

    const auto list = [&](int first_kept, int at) {
        if (thread < N && first_kept + thread < n_kept) {
            copy_small<4>(&places[at][thread], kept + first_kept + thread);
        }
    };
    const auto load = [&](int first_kept, int at) {
        for (int i = thread; i < N * 2 * STEPS; i += THREADS) {
            const int row = i / (2 * STEPS), chunk = i % (2 * STEPS);
            if (first_kept + row < n_kept && chunk < chunks) {
                copy_16(tiles[at].rows + row * ROW + chunk * 16, job.row(places[at][row]) + chunk * 16);
            }
        }
        if (thread < N) {
            if (first_kept + thread < n_kept) {
                copy_small<8>(&tiles[at].scales[thread], scales + first_kept + thread);
            } else {
                tiles[at].scales[thread] = { 0.0f, -INFINITY };
            }
        }
    };

    list(0, 0);
    list(N, 1);
    if (thread < NEAREST_TILE) {
        evicted[thread] = evicted_row(kept, n_kept, first, from + min(thread, n - 1));
    }
    if (chunks < 2 * STEPS) {  // pad rows with zeros
        for (int i = thread; i < 2 * N; i += THREADS) {
            for (int chunk = chunks; chunk < 2 * STEPS; chunk++) {
                *(uint4 *) (tiles[i / N].rows + i % N * ROW + chunk * 16) = { 0, 0, 0, 0 };
            }
        }
    }
    wait_for_copies();
    __syncthreads();
    load(0, 0);

    // this thread's evicted rows: 16 (PER_WARP warp + m) + quad, and that row + 8
    unsigned a[PER_WARP][STEPS][4];
    float    best[PER_WARP][2];
    int      which[PER_WARP][2];
#pragma unroll
    for (int m = 0; m < PER_WARP; m++) {
        const int    i = 16 * (PER_WARP * warp + m) + quad;
        const char * rows[2];
        float        own[2] = { 0.0f, 0.0f };
#pragma unroll
        for (int r = 0; r < 2; r++) {
            rows[r]     = job.row(evicted[i + 8 * r]) + 4 * in_quad;
            best[m][r]  = -INFINITY;
            which[m][r] = -1;
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
#pragma unroll
            for (int x = 0; x < 4; x++) {
                const int chunk = 2 * s + x / 2;
                a[m][s][x]      = chunk < chunks ? *(const unsigned *) (rows[x % 2] + chunk * 16) : 0;
                own[x % 2] += square<T>(a[m][s][x]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            own[r] += __shfl_xor_sync(0xffffffff, own[r], 1);
            own[r] += __shfl_xor_sync(0xffffffff, own[r], 2);
            if (in_quad == 0) {
                squares[i + 8 * r] = own[r];
            }
        }
    }

    int at = 0;
    for (int tile = 0; tile < n_kept; tile += N, at ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (tile + N < n_kept) {
            load(tile + N, at ^ 1);
            list(tile + 2 * N, at);
        }
        int found[PER_WARP][2];
#pragma unroll
        for (int i = 0; i < 2 * PER_WARP; i++) {
            found[i / 2][i % 2] = -1;
        }
        const char *   row = tiles[at].rows + (lane / 16 * 8 + lane % 8) * ROW + lane / 8 % 2 * 16;
        const float4 * by  = (const float4 *) tiles[at].scales + in_quad;
#pragma unroll
        for (int part = 0; part < N / 8; part += AT_ONCE) {
            float c[PER_WARP][AT_ONCE][4];
#pragma unroll
            for (int m = 0; m < PER_WARP; m++) {
#pragma unroll
                for (int i = 0; i < AT_ONCE * 4; i++) {
                    c[m][i / 4][i % 4] = 0.0f;
                }
            }
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
#pragma unroll
                for (int j = 0; j < AT_ONCE; j += 2) {
                    unsigned b[4];
                    load_matrices(b, row + (part + j) * 8 * ROW + s * 32);
#pragma unroll
                    for (int m = 0; m < PER_WARP; m++) {
                        multiply<T>(c[m][j], a[m][s], b[0], b[1]);
                        multiply<T>(c[m][j + 1], a[m][s], b[2], b[3]);
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const float4 x = by[(part + j) * 4];
#pragma unroll
                for (int m = 0; m < PER_WARP; m++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float score = i % 2 == 0 ? c[m][j][i] * x.x + x.y : c[m][j][i] * x.z + x.w;
                        const bool  more  = score > best[m][i / 2];
                        best[m][i / 2]    = more ? score : best[m][i / 2];
                        found[m][i / 2]   = more ? (part + j) * 8 + i % 2 : found[m][i / 2];
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * PER_WARP; i++) {
            const int x = found[i / 2][i % 2];
            which[i / 2][i % 2] = x >= 0 ? tile + 2 * in_quad + x : which[i / 2][i % 2];
        }
    }

    // join the results of the four threads that share a row
#pragma unroll
    for (int m = 0; m < PER_WARP; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float score  = best[m][r];
            int   target = which[m][r];
#pragma unroll
            for (int o = 1; o < 4; o *= 2) {
                const float other = __shfl_xor_sync(0xffffffff, score, o);
                const int   its   = __shfl_xor_sync(0xffffffff, target, o);
                if (its >= 0 && (target < 0 || other > score || (other == score && its < target))) {
                    score  = other;
                    target = its;
                }
            }
            const int i = 16 * (PER_WARP * warp + m) + quad + 8 * r;
            if (in_quad == 0 && i < n) {
                const float square = squares[i];  // written by this thread, so no barrier is needed
                const bool  far    = job.reach > 0.0f;
                const bool  known  = square < INFINITY && (far ? square - 2.0f * score <= job.reach * job.reach * square : square > 0.0f);
                if (job.small) {
                    job.small[begin + i] = (short) (known ? target : -1);
                } else {
                    job.targets[begin + i] = known ? target : -1;
                }
                if (job.shares) {
                    job.shares[begin + i] = score * rsqrtf(square);
                }
            }
        }
    }
}

template <typename T, int STEPS, int PER_WARP, int N, int AT_ONCE, int LEAST_BLOCKS> void launch(const Job & job, int blocks, cudaStream_t stream) {
    find_nearest<T, STEPS, PER_WARP, N, AT_ONCE, LEAST_BLOCKS><<<blocks, 32 * NEAREST_TILE / (16 * PER_WARP), 0, stream>>>(job);
}

template <typename T> void launch(const Job & job, int blocks, cudaStream_t stream) {
    const int steps = (job.d + 15) / 16;
    if (steps <= 2) {
        launch<T, 2, 2, 64, 4, 3>(job, blocks, stream);
    } else if (steps <= 4) {
        launch<T, 4, 2, 64, 4, 3>(job, blocks, stream);
    } else if (steps <= 6) {
        launch<T, 6, 2, 64, 4, 3>(job, blocks, stream);
    } else if (steps <= 8) {
        launch<T, 8, 2, 64, 8, 3>(job, blocks, stream);
    } else {
        launch<T, 16, 1, 32, 4, 1>(job, blocks, stream);
    }
}

static bool fits(const ggml_tensor * dst) {
    const ggml_tensor *rows = dst->src[0], *kept = dst->src[3], *heads = dst->src[5];
    const bool types = (rows->type == GGML_TYPE_F16 || rows->type == GGML_TYPE_BF16) && kept->type == GGML_TYPE_I32 && heads->type == GGML_TYPE_I32;
    bool       able  = types && rows->ne[0] % 8 == 0 && rows->ne[0] <= 256 && rows->nb[1] % 16 == 0 && dst->ne[0] % NEAREST_TILE == 0;
    for (int i = 0; i < ggml_cuda_info().device_count; i++) {
        able = able && ampere_mma_available(ggml_cuda_info().devices[i].cc);
    }
    return able;
}

}  // namespace

bool kvedge_cuda_nearest(ggml_backend_cuda_context * ctx, const ggml_tensor * dst) {
    if (!ctx || !fits(dst)) {
        return fits(dst);
    }
    const ggml_tensor *            rows = dst->src[0], *heads = dst->src[5];
    const int                      n = (int) ggml_nelements(dst->src[3]);
    const bool                     small = dst->type == GGML_TYPE_I16;
    const float                    reach = *(const float *) (dst->op_params + OWN_KIND + 1);
    ggml_cuda_pool_alloc<float2>   scales(ctx->pool(), (size_t) n);
    const Job job = { (const char *) rows->data, (const int *) dst->src[3]->data, (const int *) heads->data, scales.ptr,
                      small ? nullptr : (int *) dst->data, small ? (short *) dst->data : nullptr,
                      dst->ne[1] == 2 ? (float *) dst->data + dst->ne[0] : nullptr, (int) heads->ne[1], (int) rows->ne[0], (int) rows->nb[1], reach };
    constexpr int WARPS = 8;
    const int     blocks = (int) dst->ne[0] / NEAREST_TILE;
    if (rows->type == GGML_TYPE_F16) {
        scale_kept<half><<<(n + WARPS - 1) / WARPS, 32 * WARPS, 0, ctx->stream()>>>(job, n, scales.ptr);
        launch<half>(job, blocks, ctx->stream());
    } else {
        scale_kept<nv_bfloat16><<<(n + WARPS - 1) / WARPS, 32 * WARPS, 0, ctx->stream()>>>(job, n, scales.ptr);
        launch<nv_bfloat16>(job, blocks, ctx->stream());
    }
    return true;
}
