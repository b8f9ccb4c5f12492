// OWN_POINTS and OWN_DEVIATION on CUDA: the high pass of highpass.h, over half-precision rows in the cache tensors.
//
//   src[0], [1]  keys, values [d, rows, heads], or [d, rows] of all heads; f16 or bf16
//   src[5] list  [n] or [n, heads] i32: the row of each token
//   op_params    behind OWN_KIND: heads, boxes, width, rank (highpass.h); for OWN_DEVIATION also the factor of a row itself (f32)
//
// OWN_POINTS reduces each box to its points:
//   src[2]       gather matrix [width, rank] in fragments (own.h), rank padded to a multiple of 32
//   dst          [rank * boxes, channels] f32: channels of all keys, then of all values
// OWN_DEVIATION computes the high pass of each row:
//   src[2]       own and scatter matrices [width + padded rank, width] in fragments
//   src[3]       [rank * boxes, channels] f32: the contribution of other boxes to the points; NULL: there is one box
//   dst          f32: [n, heads] mean square over the channels of a key's high pass, plus that of its value; then [boxes, heads, 2]
//                sums of squares of the high pass of keys, of values
//
// A block handles one box of one head, 64 channels at a time, in shared memory. It stores half of each row minus the middle row, so that
// differences fit in half precision. A row of 64 channels takes 8 words of 16 bytes, in an order that depends on row % 8, so that 8
// rows can be read without bank conflicts.

#include "own.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32, CHANNELS = 64, WORDS = CHANNELS / 8;
constexpr int STEP = 32;  // width and padded rank are multiples of STEP

struct Job {
    const char *  rows[2];
    int64_t       row[2], head[2];  // bytes
    int           d[2];
    const int *   list;
    int           list_head;  // list entries of each head; 0: all heads share the list
    const uint4 * matrix;
    const float * others;
    float *       dst;
    int           n, heads, boxes, width, rank;
    float         own;  // factor of the row itself, from which its low pass is subtracted

    __device__ int first(int box) const { return (int) ((int64_t) box * n / boxes); }
    __device__ int padded() const { return (rank + STEP - 1) / STEP * STEP; }
    __device__ int64_t column(int of, int head) const { return (of == 1 ? (int64_t) heads * d[0] : 0) + (int64_t) head * d[of]; }
};

// Returns half of x - origin, in half precision.
__device__ __forceinline__ uint4 centered(uint4 x, uint4 origin, const half *) {
    uint4         out;
    const half2   by = __float2half2_rn(0.5f), *a = (const half2 *) &x, *b = (const half2 *) &origin;
    half2 * const to = (half2 *) &out;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[i] = __hfma2(a[i], by, __hneg2(__hmul2(b[i], by)));
    }
    return out;
}

__device__ __forceinline__ float2 wide(unsigned pair) { return { __uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u) }; }

__device__ __forceinline__ float within(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }

__device__ __forceinline__ uint4 centered(uint4 x, uint4 origin, const nv_bfloat16 *) {
    uint4            out;
    const unsigned * a = (const unsigned *) &x, *b = (const unsigned *) &origin;
    half2 * const    to = (half2 *) &out;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 u = wide(a[i]), v = wide(b[i]);
        to[i]          = __floats2half2_rn(within(0.5f * (u.x - v.x)), within(0.5f * (u.y - v.y)));
    }
    return out;
}

__device__ __forceinline__ int word_at(int row, int word) { return row * WORDS + (word ^ (row & (WORDS - 1))); }

// Loads the rows of a box from `channel` on into the tile. Writes zeros behind the last token and the last channel.
template <typename T> __device__ __forceinline__ void load_rows(const Job & job, int of, int head, int box, int channel, uint4 * tile) {
    constexpr int AT_ONCE = 4, TEAMS = THREADS / WORDS;
    const int     word = threadIdx.x % WORDS, first = job.first(box), size = job.first(box + 1) - first;
    const bool    inside = channel + 8 * word < job.d[of];
    const int *   list = job.list + (int64_t) head * job.list_head;
    const char *  from = job.rows[of] + head * job.head[of] + (channel + 8 * word) * sizeof(T);
    const uint4   none = { 0, 0, 0, 0 };
    const auto    read = [&](int token) { return *(const uint4 *) (from + (int64_t) __ldg(list + token) * job.row[of]); };
    const uint4   origin = inside ? read(job.n / 2) : none;
    for (int at = threadIdx.x / WORDS; at < job.width; at += AT_ONCE * TEAMS) {
        uint4 x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            x[i] = inside && at + i * TEAMS < size ? read(first + at + i * TEAMS) : origin;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (at + i * TEAMS < job.width) {
                tile[word_at(at + i * TEAMS, word)] = centered(x[i], origin, (const T *) nullptr);
            }
        }
    }
}

// Loads the contribution of other boxes to the points into the tile, behind the rows of the box.
__device__ __forceinline__ void load_others(const Job & job, int of, int head, int box, int channel, uint4 * tile) {
    constexpr int LANES = THREADS / CHANNELS;
    const int     c = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const float * from = job.others + (job.column(of, head) + channel + c) * job.rank * job.boxes + box * job.rank;
    for (int p = lane * 4; p < job.padded(); p += LANES * 4) {  // rank is a multiple of 8
        const bool   there = channel + c < job.d[of] && p < job.rank;
        const float4 x     = there ? *(const float4 *) (from + p) : float4{ 0.0f, 0.0f, 0.0f, 0.0f };
        const float  four[4] = { x.x, x.y, x.z, x.w };
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ((half *) (tile + word_at(job.width + p + i, c / 8)))[c % 8] = __float2half_rn(within(four[i]));
        }
    }
}

// Reads columns [8 * word, 8 * word + 16) of rows [row, row + 16) of the tile as second factors of multiply(): out[0], out[1] for the
// first 8 columns, out[2], out[3] for the other 8.
__device__ __forceinline__ void read_tile(const uint4 * tile, int row, int word, unsigned (&out)[4]) {
    const int      lane = threadIdx.x % 32;
    const unsigned at   = (unsigned) __cvta_generic_to_shared(tile + word_at(row + lane % 16, word + lane / 16));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at));
}

// sum [16 x 8] += a [16 x 16] b [16 x 8]
__device__ __forceinline__ void multiply(float (&sum)[4], const uint4 & a, unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a.x), "r"(a.y), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a.z), "r"(a.w), "r"(b1));
#endif
}

// OWN_POINTS. Grid: boxes, heads, and 64 channels of keys or values. A warp computes 16 channels of half of the points.
template <typename T> __global__ void __launch_bounds__(THREADS) points_of(const Job job) {
#if __CUDA_ARCH__ >= 750
    extern __shared__ uint4 tile[];
    const int of_keys = (job.d[0] + CHANNELS - 1) / CHANNELS, of = (int) blockIdx.z >= of_keys;
    const int channel = ((int) blockIdx.z - (of ? of_keys : 0)) * CHANNELS, box = blockIdx.x, head = blockIdx.y;
    load_rows<T>(job, of, head, box, channel, tile);
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = job.width / 16, word = warp % 4 * 2;
    for (int m = warp / 4; m < job.padded() / 16; m += WARPS / 4) {
        const uint4 * a         = job.matrix + (int64_t) m * tiles * 32 + lane;
        float         sum[2][4] = {};
        for (int k = 0; k < tiles; k += 2) {
            unsigned    b[4], c[4];
            const uint4 first = __ldg(a + k * 32), second = __ldg(a + k * 32 + 32);
            read_tile(tile, k * 16, word, b);
            read_tile(tile, k * 16 + 16, word, c);
            multiply(sum[0], first, b[0], b[1]);
            multiply(sum[1], first, b[2], b[3]);
            multiply(sum[0], second, c[0], c[1]);
            multiply(sum[1], second, c[2], c[3]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int p = m * 16 + lane / 4 + i % 4 / 2 * 8, c = channel + word * 8 + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (p < job.rank && c < job.d[of]) {
                job.dst[(job.column(of, head) + c) * job.rank * job.boxes + box * job.rank + p] = sum[i / 4][i % 4];
            }
        }
    }
#else
    NO_DEVICE_CODE;
#endif
}

// OWN_DEVIATION. Grid: boxes, heads. A warp computes 16 * M rows at a time, of all channels in shared memory.
template <typename T, int M> __global__ void __launch_bounds__(THREADS, 2) deviation_of(const Job job) {
#if __CUDA_ARCH__ >= 750
    extern __shared__ uint4 tile[];
    __shared__ float        parts[2][WARPS];
    const int     box = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int     columns = job.width + (job.others ? job.padded() : 0), tiles = columns / 16;
    const int     first = job.first(box), size = job.first(box + 1) - first;
    float * const means     = (float *) (tile + columns * WORDS);  // [width]
    float         energy[2] = {};
    for (int i = threadIdx.x; i < job.width; i += THREADS) {
        means[i] = 0.0f;
    }
#pragma unroll
    for (int of = 0; of < 2; of++) {
        const float by = 4.0f / (float) job.d[of];  // rows were halved
        for (int channel = 0; channel < job.d[of]; channel += CHANNELS) {
            __syncthreads();
            load_rows<T>(job, of, head, box, channel, tile);
            if (job.others) {
                load_others(job, of, head, box, channel, tile);
            }
            __syncthreads();
            for (int m = warp * M; m < job.width / 16; m += WARPS * M) {
                const uint4 * a                 = job.matrix + (int64_t) m * tiles * 32 + lane;
                float         sum[M][WORDS][4];  // low pass of a row minus the row
                uint4         next[M];
#pragma unroll
                for (int i = 0; i < 2 * M; i++) {
#pragma unroll
                    for (int word = 0; word < WORDS; word++) {
                        const int    row = (m + i / 2) * 16 + i % 2 * 8 + lane / 4;
                        const float2 x   = __half22float2(((const half2 *) (tile + word_at(row, word)))[lane % 4]);
                        sum[i / 2][word][i % 2 * 2] = -job.own * x.x, sum[i / 2][word][i % 2 * 2 + 1] = -job.own * x.y;
                    }
                }
#pragma unroll
                for (int i = 0; i < M; i++) {
                    next[i] = __ldg(a + (int64_t) i * tiles * 32);
                }
                for (int k = 0; k < tiles; k++) {
                    uint4 now[M];
#pragma unroll
                    for (int i = 0; i < M; i++) {
                        now[i]  = next[i];
                        next[i] = __ldg(a + ((int64_t) i * tiles + min(k + 1, tiles - 1)) * 32);
                    }
#pragma unroll
                    for (int word = 0; word < WORDS; word += 2) {
                        unsigned b[4];
                        read_tile(tile, k * 16, word, b);
#pragma unroll
                        for (int i = 0; i < M; i++) {
                            multiply(sum[i][word], now[i], b[0], b[1]);
                            multiply(sum[i][word + 1], now[i], b[2], b[3]);
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < 2 * M; i++) {  // rows lane / 4 and lane / 4 + 8
                    float square = 0.0f;
#pragma unroll
                    for (int word = 0; word < WORDS; word++) {
                        const float x = sum[i / 2][word][i % 2 * 2], y = sum[i / 2][word][i % 2 * 2 + 1];
                        square += x * x + y * y;
                    }
                    square += __shfl_xor_sync(0xffffffff, square, 1);
                    square += __shfl_xor_sync(0xffffffff, square, 2);
                    const int row = (m + i / 2) * 16 + i % 2 * 8 + lane / 4;
                    if (lane % 4 == 0 && row < size) {
                        means[row] += by * square;
                        energy[of] += 4.0f * square;
                    }
                }
            }
        }
    }
    for (int of = 0; of < 2; of++) {
        const float sum = warp_reduce_sum(energy[of]);
        if (lane == 0) {
            parts[of][warp] = sum;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += THREADS) {
        job.dst[(int64_t) head * job.n + first + i] = means[i];
    }
    if (threadIdx.x < 2) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            sum += parts[threadIdx.x][w];
        }
        job.dst[(int64_t) job.heads * job.n + ((int64_t) threadIdx.x * job.heads + head) * job.boxes + box] = sum;
    }
#else
    NO_DEVICE_CODE;
#endif
}

static Job job_of(const ggml_tensor * dst) {
    const ggml_tensor *k = dst->src[0], *v = dst->src[1], *list = dst->src[5];
    const auto         data = [](const ggml_tensor * x) { return x ? x->data : nullptr; };
    const int *        with = dst->op_params + OWN_KIND + 1;
    return { { (const char *) k->data, (const char *) v->data }, { (int64_t) k->nb[1], (int64_t) v->nb[1] },
             { k->ne[2] > 1 ? (int64_t) k->nb[2] : 0, v->ne[2] > 1 ? (int64_t) v->nb[2] : 0 }, { (int) k->ne[0], (int) v->ne[0] },
             (const int *) list->data, list->ne[1] > 1 ? (int) list->ne[0] : 0, (const uint4 *) dst->src[2]->data,
             (const float *) data(dst->src[3]), (float *) dst->data, (int) list->ne[0], with[0], with[1], with[2], with[3],
             *(const float *) (with + 4) };
}

// Returns the bytes of shared memory of a block: the rows of the tile, and their sums.
static size_t memory_of(const Job & job, bool others) {
    const int rows = job.width + (others ? (job.rank + STEP - 1) / STEP * STEP : 0);
    return (size_t) rows * WORDS * sizeof(uint4) + (size_t) job.width * sizeof(float);
}

constexpr size_t MOST_MEMORY = (448 + 2 * STEP) * WORDS * sizeof(uint4) - 2048;  // every supported device has this much

static bool fits(const ggml_tensor * dst) {
    const ggml_tensor *k = dst->src[0], *v = dst->src[1];
    const Job          job = job_of(dst);
    const auto rows = [](const ggml_tensor * x) { return x->ne[0] % 8 == 0 && x->nb[1] % 16 == 0 && x->nb[2] % 16 == 0; };
    for (int id = 0; id < ggml_cuda_info().device_count; id++) {
        if (!turing_mma_available(ggml_cuda_info().devices[id].cc)) {
            return false;
        }
    }
    return rows(k) && rows(v) && (k->type == GGML_TYPE_F16 || k->type == GGML_TYPE_BF16) && v->type == k->type && job.heads < 65536 &&
           memory_of(job, dst->src[3]) <= MOST_MEMORY;
}

template <class Kernel> void launch(Kernel kernel, dim3 grid, size_t memory, const Job & job, cudaStream_t stream) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) MOST_MEMORY));
    kernel<<<grid, THREADS, memory, stream>>>(job);
    CUDA_CHECK(cudaGetLastError());
}

}  // namespace

bool kvedge_cuda_points(ggml_backend_cuda_context * ctx, const ggml_tensor * dst) {
    if (!ctx || !fits(dst)) {
        return fits(dst);
    }
    const Job  job = job_of(dst);
    const auto of  = [&](int i) { return (unsigned) ((job.d[i] + CHANNELS - 1) / CHANNELS); };
    const dim3 grid(job.boxes, job.heads, of(0) + of(1));
    launch(dst->src[0]->type == GGML_TYPE_F16 ? points_of<half> : points_of<nv_bfloat16>, grid, memory_of(job, false), job, ctx->stream());
    return true;
}

bool kvedge_cuda_deviation(ggml_backend_cuda_context * ctx, const ggml_tensor * dst) {
    if (!ctx || !fits(dst)) {
        return fits(dst);
    }
    const Job  job  = job_of(dst);
    const bool half_precision = dst->src[0]->type == GGML_TYPE_F16, few = job.width / 32 < 2 * WARPS && job.width % (32 * WARPS) != 0;
    const auto kernel = half_precision ? (few ? deviation_of<half, 1> : deviation_of<half, 2>)
                                       : (few ? deviation_of<nv_bfloat16, 1> : deviation_of<nv_bfloat16, 2>);
    launch(kernel, dim3(job.boxes, job.heads), memory_of(job, dst->src[3]), job, ctx->stream());
    return true;
}
