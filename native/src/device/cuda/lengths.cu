// OWN_SUM and OWN_LENGTHS on CUDA: lengths and directions of half-precision rows in the cache tensors.
//
//   src[0], [1]  keys, values [d, rows, heads], or [d, rows] of all heads; f16 or bf16
//   src[5] list  [n] or [n, heads] i32: the row of each token
//   op_params    behind OWN_KIND: heads; parts, into which a head's tokens are divided; and a third number
//
// OWN_SUM adds up keys. Third number: 1 to normalise keys (to length 1; a key shorter than SHORTEST is not), 0 to add them as stored.
//   src[3]       [n] f32: 1 for tokens to count, else 0; NULL: all count
//   dst          [d, parts, heads] f32 sums of keys
// OWN_LENGTHS computes the quantities of OwnLengths in the third number. dst holds them in this order:
//   src[3]       the result of OWN_SUM, if PRODUCTS is wanted
//   dst          f32: [n, heads] squared lengths of keys; of values; products of each normalised key with the sum over all parts;
//                then [d, heads] that sum; [parts, heads, 2] sums of the squares of keys, of values

#include "own.cuh"

namespace {

constexpr int   THREADS = 256, AT_ONCE = 4;
constexpr float SHORTEST = 1e-12f;

struct Job {
    const char *  rows[2];
    int64_t       row[2], head[2];  // bytes
    int           d[2];
    const int *   list;
    int           list_head;  // list entries of each head; 0: all heads share the list
    const float * other;
    float *       dst;
    int           n, heads, parts, how;
};

__device__ __forceinline__ void widen(const uint4 & x, float (&out)[8], const half *) {
    const half2 * pairs = (const half2 *) &x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = __half22float2(pairs[i]);
        out[2 * i] = two.x, out[2 * i + 1] = two.y;
    }
}

__device__ __forceinline__ void widen(const uint4 & x, float (&out)[8], const nv_bfloat16 *) {
    const unsigned * pairs = (const unsigned *) &x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __uint_as_float(pairs[i] << 16), out[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
}

template <int LANES> __device__ __forceinline__ float sum_of(float x) {
#pragma unroll
    for (int o = LANES / 2; o > 0; o /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, o);
    }
    return x;
}

__device__ __forceinline__ float dot(const float (&a)[8], const float (&b)[8]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

__device__ __forceinline__ float inverse(float square) { return 1.0f / fmaxf(sqrtf(square), SHORTEST); }

// Calls visit(token, eight numbers of its row, token < job.n) for all tokens of a block's part. All threads of the block call this.
// LANES lanes hold a row.
template <typename T, int LANES, class F> __device__ __forceinline__ void each_row(const Job & job, int of, const F & visit) {
    constexpr int TEAMS = THREADS / LANES;
    const int     lane = threadIdx.x % LANES, head = blockIdx.y, step = job.parts * TEAMS;
    const bool    inside = 8 * lane < job.d[of];
    const int *   list = job.list + (int64_t) head * job.list_head;
    const char *  from = job.rows[of] + head * job.head[of] + 8 * lane * sizeof(T);
    for (int base = blockIdx.x * TEAMS; base < job.n; base += AT_ONCE * step) {
        const int first = base + threadIdx.x / LANES;
        uint4     x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int t = first + i * step;
            x[i]        = uint4{ 0, 0, 0, 0 };
            if (inside && t < job.n) {
                x[i] = *(const uint4 *) (from + (int64_t) __ldg(list + t) * job.row[of]);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float row[8];
            widen(x[i], row, (const T *) nullptr);
            visit(first + i * step, row, first + i * step < job.n);
        }
    }
}

template <typename T, int LANES> __global__ void __launch_bounds__(THREADS) sum_rows(const Job job) {
    __shared__ float sums[THREADS][9];
    float            sum[8] = {};
    each_row<T, LANES>(job, 0, [&](int t, const float (&row)[8], bool there) {
        const float square = sum_of<LANES>(dot(row, row));
        const float by     = (!there ? 0.0f : job.other ? job.other[t] : 1.0f) * (job.how ? inverse(square) : 1.0f);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sum[i] += by * row[i];
        }
    });
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sums[threadIdx.x][i] = sum[i];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < job.d[0]; c += THREADS) {
        float all = 0.0f;
        for (int team = 0; team < THREADS / LANES; team++) {
            all += sums[team * LANES + c / 8][c % 8];
        }
        job.dst[((int64_t) blockIdx.y * job.parts + blockIdx.x) * job.d[0] + c] = all;
    }
}

template <typename T, int LANES> __global__ void __launch_bounds__(THREADS) lengths_of(const Job job) {
    __shared__ float parts[THREADS / 32];
    const int        lane = threadIdx.x % LANES, head = blockIdx.y;
    const int64_t    all = (int64_t) job.n * job.heads;
    float *          out = job.dst;
    float            sum[8] = {}, energy[2] = {};
    const bool       products = job.how & PRODUCTS;
    float * const    key_squares   = job.how & KEY_SQUARES ? out : nullptr;
    out += key_squares ? all : 0;
    float * const value_squares = job.how & VALUE_SQUARES ? out : nullptr;
    out += value_squares ? all : 0;
    float * const cosines = products ? out : nullptr;
    out += cosines ? all : 0;
    if (products) {
        if (8 * lane < job.d[0]) {
            const float4 * from = (const float4 *) (job.other + (int64_t) head * job.parts * job.d[0] + 8 * lane);
            for (int p = 0; p < job.parts; p++) {
                const float4 a = __ldg(from + (int64_t) p * job.d[0] / 4), b = __ldg(from + (int64_t) p * job.d[0] / 4 + 1);
                sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
                sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
            }
            for (int i = 0; i < 8 && blockIdx.x == 0 && threadIdx.x < LANES; i++) {
                out[(int64_t) head * job.d[0] + 8 * lane + i] = sum[i];
            }
        }
        out += (int64_t) job.heads * job.d[0];
    }
    const int64_t at = (int64_t) head * job.n;
    if (job.how & (KEY_SQUARES | PRODUCTS | ENERGIES)) {
        each_row<T, LANES>(job, 0, [&](int t, const float (&row)[8], bool there) {
            const float square = sum_of<LANES>(dot(row, row)), product = products ? sum_of<LANES>(dot(row, sum)) : 0.0f;
            if (lane == 0 && there) {
                if (key_squares) {
                    key_squares[at + t] = square;
                }
                if (cosines) {
                    cosines[at + t] = product * inverse(square);
                }
                energy[0] += square;
            }
        });
    }
    if (job.how & (VALUE_SQUARES | ENERGIES)) {
        each_row<T, LANES>(job, 1, [&](int t, const float (&row)[8], bool there) {
            const float square = sum_of<LANES>(dot(row, row));
            if (lane == 0 && there) {
                if (value_squares) {
                    value_squares[at + t] = square;
                }
                energy[1] += square;
            }
        });
    }
    for (int of = 0; of < 2 && job.how & ENERGIES; of++) {
        const float one = warp_reduce_sum(energy[of]);
        __syncthreads();
        if (threadIdx.x % 32 == 0) {
            parts[threadIdx.x / 32] = one;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            float all_warps = 0.0f;
            for (int w = 0; w < THREADS / 32; w++) {
                all_warps += parts[w];
            }
            out[((int64_t) of * job.heads + head) * job.parts + blockIdx.x] = all_warps;
        }
    }
}

template <typename T> void launch(bool sum, const Job & job, cudaStream_t stream) {
    const dim3 grid(job.parts, job.heads);
    const int  d = max(job.d[0], job.d[1]);
    if (d <= 64) {
        (sum ? sum_rows<T, 8> : lengths_of<T, 8>)<<<grid, THREADS, 0, stream>>>(job);
    } else if (d <= 128) {
        (sum ? sum_rows<T, 16> : lengths_of<T, 16>)<<<grid, THREADS, 0, stream>>>(job);
    } else {
        (sum ? sum_rows<T, 32> : lengths_of<T, 32>)<<<grid, THREADS, 0, stream>>>(job);
    }
    CUDA_CHECK(cudaGetLastError());
}

}  // namespace

static bool compute(ggml_backend_cuda_context * ctx, const ggml_tensor * dst, bool sum) {
    const ggml_tensor *k = dst->src[0], *v = dst->src[1], *list = dst->src[5];
    const int *        with = dst->op_params + OWN_KIND + 1;
    const auto         rows = [](const ggml_tensor * x) {
        return x->ne[0] % 8 == 0 && x->ne[0] <= 256 && x->nb[1] % 16 == 0 && x->nb[2] % 16 == 0;
    };
    const bool fits = rows(k) && rows(v) && (k->type == GGML_TYPE_F16 || k->type == GGML_TYPE_BF16) && v->type == k->type && with[0] < 65536;
    if (!ctx || !fits) {
        return fits;
    }
    const Job job = { { (const char *) k->data, (const char *) v->data }, { (int64_t) k->nb[1], (int64_t) v->nb[1] },
                      { k->ne[2] > 1 ? (int64_t) k->nb[2] : 0, v->ne[2] > 1 ? (int64_t) v->nb[2] : 0 },
                      { (int) k->ne[0], (int) v->ne[0] }, (const int *) list->data, list->ne[1] > 1 ? (int) list->ne[0] : 0,
                      (const float *) (dst->src[3] ? dst->src[3]->data : nullptr), (float *) dst->data, (int) list->ne[0], with[0],
                      with[1], with[2] };
    k->type == GGML_TYPE_F16 ? launch<half>(sum, job, ctx->stream()) : launch<nv_bfloat16>(sum, job, ctx->stream());
    return true;
}

bool kvedge_cuda_sum(ggml_backend_cuda_context * ctx, const ggml_tensor * dst) { return compute(ctx, dst, true); }

bool kvedge_cuda_lengths(ggml_backend_cuda_context * ctx, const ggml_tensor * dst) { return compute(ctx, dst, false); }
