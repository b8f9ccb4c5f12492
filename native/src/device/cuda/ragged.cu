// OWN_RAGGED on CUDA: attention of one token over KV heads with different numbers of rows.
//
//   src[0] q      [d_k, 1, H] f32
//   src[1], [2]   K [d_k, slots], V [d_v, slots] f16, bf16 or f32, both of one type: the rows of all KV heads
//   src[3] bias   [slots] f16, added to the logits, or NULL
//   src[4] sinks  [H] f32, or NULL
//   src[5] spans  [2 + H / Hkv, Hkv] i32: first slot and number of rows of each KV head, then counters of the kernel, which begin and
//                 end at 0. The host must write spans, not the graph, because the kernel reads spans before earlier kernels end.
//   src[6], [7]   [d_k, Hkv], [d_v, Hkv] f32: the token's own rows, which the kernel writes to K and V first; or NULL
//   src[8]        [Hkv] i64: slots of the token's own rows
//   dst           [d_v, H, 1] f32
//
// The rows of all KV heads, head by head, are divided into as many equal parts as there are blocks. A block attends to its part. If
// several blocks share a head, the last block to finish, known by a counter, joins their results. The device reads the lengths, so
// that one CUDA graph serves all tokens. If more than 4 query heads share a KV head, they form bundles of at most 4. Each bundle reads
// the rows; later bundles read them from the L2 cache. For f16 rows ragged_mma.cu has bundles of 8.
//
// op_params[OWN_KIND + 1], for benchmarks: 0, or the fewest rows of a block; negative: minus that number, and never ragged_mma.cu.

#include "eight.cuh"
#include "ragged.cuh"

using namespace kvedge_ragged;

namespace {

// Shared memory of a block: the results of its warps for the query heads of a bundle.
template <int LANES, int G> struct Shared {
    int    first[MOST_HEADS + 1];  // number of rows before each bundle
    float4 sums[WARPS][G][2 * LANES];
    float2 marks[WARPS][G];
    bool   last;
};

// Attends to n rows from `slot` on, with all threads of a block. Each warp writes its result to shared memory. LANES lanes (a team) hold
// a row, eight numbers each. A team takes every TEAMS-th row, ROWS rows at a time; the next keys load while values are added.
template <typename T, int LANES, int G>
__device__ __forceinline__ void attend(const Job & job, const float * q_heads, int heads, int64_t slot, int n, Shared<LANES, G> & shared) {
    constexpr int TEAMS = THREADS / LANES, ROWS = G * sizeof(T) <= 4 ? 4 : 2;
    const int     lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
    const float   factor = job.softcap == 0.0f ? job.scale * LOG2E : job.scale / job.softcap;
    const bool    in_k = 8 * lane < job.d_k, in_v = 8 * lane < job.d_v;
    float         q[G][8], acc[G][8], most[G], weight[G];

    const auto load = [&](Eight<T> (&to)[ROWS], const char * rows, int64_t row, bool inside, int at) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int i = at + r * TEAMS + team;
            to[r]       = Eight<T>{};
            if (inside && i < n) {
                to[r] = *(const Eight<T> *) (rows + (slot + i) * row + lane * 8 * sizeof(T));
            }
        }
    };
    Eight<T> keys[ROWS], values[ROWS];
    load(keys, job.k, job.k_row, in_k, 0);
#pragma unroll
    for (int g = 0; g < G; g++) {
        most[g]   = LOWEST;
        weight[g] = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            float4 x = { 0.0f, 0.0f, 0.0f, 0.0f };
            if (in_k && g < heads) {
                x = *(const float4 *) (q_heads + g * job.q_head + 8 * lane + j);
            }
            q[g][j] = factor * x.x, q[g][j + 1] = factor * x.y, q[g][j + 2] = factor * x.z, q[g][j + 3] = factor * x.w;
            acc[g][j] = acc[g][j + 1] = acc[g][j + 2] = acc[g][j + 3] = 0.0f;
        }
    }
    for (int at = 0; at < n; at += ROWS * TEAMS) {
        load(values, job.v, job.v_row, in_v, at);
        float logits[ROWS][G];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float row[8];
            widen(keys[r], row);
#pragma unroll
            for (int g = 0; g < G; g++) {
                logits[r][g] = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    logits[r][g] += q[g][j] * row[j];
                }
            }
        }
        load(keys, job.k, job.k_row, in_k, at + ROWS * TEAMS);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int   i    = at + r * TEAMS + team;
            const float bias = job.bias && i < n ? LOG2E * __half2float(job.bias[slot + i]) : 0.0f;
#pragma unroll
            for (int g = 0; g < G; g++) {
                float x = logits[r][g];
#pragma unroll
                for (int o = LANES / 2; o > 0; o /= 2) {
                    x += __shfl_xor_sync(0xffffffff, x, o);
                }
                x            = job.softcap == 0.0f ? x : LOG2E * job.softcap * tanh_of(x);
                logits[r][g] = i < n ? x + bias : -INFINITY;
            }
        }
#pragma unroll
        for (int g = 0; g < G; g++) {
            float top = most[g];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                top = fmaxf(top, logits[r][g]);
            }
            const float old = exp2f(most[g] - top);
            most[g]         = top;
            weight[g] *= old;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                acc[g][j] *= old;
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                logits[r][g] = exp2f(logits[r][g] - top);
                weight[g] += logits[r][g];
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float row[8];
            widen(values[r], row);
#pragma unroll
            for (int g = 0; g < G; g++) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    acc[g][j] += logits[r][g] * row[j];
                }
            }
        }
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
#pragma unroll
        for (int o = LANES; o < 32; o *= 2) {
            const float other = __shfl_xor_sync(0xffffffff, most[g], o), top = fmaxf(most[g], other), old = exp2f(most[g] - top);
            weight[g] *= old;
            weight[g] += __shfl_xor_sync(0xffffffff, weight[g], o);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                acc[g][j] *= old;
                acc[g][j] += __shfl_xor_sync(0xffffffff, acc[g][j], o);
            }
            most[g] = top;
        }
        const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32;
        if (in_warp < LANES) {
            shared.sums[warp][g][2 * lane]     = { acc[g][0], acc[g][1], acc[g][2], acc[g][3] };
            shared.sums[warp][g][2 * lane + 1] = { acc[g][4], acc[g][5], acc[g][6], acc[g][7] };
        }
        if (in_warp == 0) {
            shared.marks[warp][g] = { most[g], weight[g] };
        }
    }
}

template <int LANES, int G> __device__ __forceinline__ Sum join(const Shared<LANES, G> & shared, int n, int g, int i) {
    Sum sum;
    sum.add<WARPS>(n, [&](int w) { return shared.marks[w][g]; }, [&](int w) { return shared.sums[w][g][i]; });
    return sum;
}

template <typename T, int LANES, int G> __global__ void __launch_bounds__(THREADS, BLOCKS) attend_ragged(const Job job) {
    __shared__ Shared<LANES, G> shared;
    const int                   n_all = job.heads_kv * job.bundles;
    ggml_cuda_pdl_lc();
    if (threadIdx.x < 32) {
        number_rows(job, shared.first);
    }
    __syncthreads();

    // a thread computes four neighbouring numbers of a head's output; spare threads share the partial sums
    const int quarter = job.d_v / 4, columns = G * quarter, sharing = min(WARPS, THREADS / columns);
    const int column = threadIdx.x % columns, sharer = threadIdx.x / columns, g = column / quarter, i = column % quarter;
    const int rows = max(job.fewest, (shared.first[n_all] + (int) gridDim.x - 1) / (int) gridDim.x);  // rows of a block
    const int end  = min(shared.first[n_all], ((int) blockIdx.x + 1) * rows);
    int       row  = blockIdx.x * rows;
    int       b    = 0;  // bundle

    const auto finish = [&](int head, bool there, const Sum & sum) {
        if (there) {
            const float sunk = job.sinks ? exp2f(LOG2E * job.sinks[head + g] - sum.most) : 0.0f;
            const float by   = sum.weight > 0.0f ? 1.0f / (sum.weight + sunk) : 0.0f;
            *(float4 *) (job.dst + (int64_t) (head + g) * job.d_v + 4 * i) = { by * sum.values.x, by * sum.values.y, by * sum.values.z,
                                                                              by * sum.values.w };
        }
    };
    const auto head_of  = [&](int bundle) { return bundle / job.bundles * job.share + bundle % job.bundles * G; };
    const auto heads_of = [&](int bundle) { return min(G, job.share - bundle % job.bundles * G); };

    for (int base = 0; base < n_all && row < end; base += 32) {
        const int at = base + (int) threadIdx.x % 32;
        b += __popc(__ballot_sync(0xffffffff, at < n_all && shared.first[at + 1] <= row));
    }
    if (row < end) {
        fetch_ahead(job, (int64_t) job.spans[b / job.bundles * job.span] + row - shared.first[b], min(end, shared.first[b + 1]) - row);
    }
    ggml_cuda_pdl_sync();
    for (int empty = blockIdx.x; empty < n_all; empty += gridDim.x) {
        if (shared.first[empty] == shared.first[empty + 1]) {
            finish(head_of(empty), sharer == 0 && g < heads_of(empty), Sum());
        }
    }
    for (; row < end; b++) {
        const int before = shared.first[b], behind = shared.first[b + 1], stop = min(end, behind);
        if (stop <= row) {
            continue;
        }
        const int kv = b / job.bundles, head = head_of(b), heads = heads_of(b);
        int *     span = job.spans + kv * job.span;
        write_fresh<T>(job, kv, (int64_t) span[0] + row - before, stop - row);
        attend<T, LANES, G>(job, job.q + head * job.q_head, heads, (int64_t) span[0] + row - before, stop - row, shared);
        row = stop;
        __syncthreads();
        const bool mine  = sharer == 0 && g < heads;
        const int  from  = before / rows, parts = (behind - 1) / rows - from + 1;
        Sum        sum;
        if (mine) {
            sum = join(shared, WARPS, g, i);
        }
        if (parts == 1) {
            finish(head, mine, sum);
        } else {
            if (mine) {
                const int64_t at = (int64_t) ((int) blockIdx.x + b) * G + g;
                *(float4 *) (job.parts + at * job.d_v + 4 * i) = sum.values;
                if (i == 0) {
                    job.marks[at] = { sum.most, sum.weight };
                }
                __threadfence();
            }
            __syncthreads();
            if (threadIdx.x == 0) {  // the counter goes up to parts - 1, then back to 0
                shared.last = atomicInc((unsigned *) span + 2 + b % job.bundles, (unsigned) parts - 1) == (unsigned) parts - 1;
            }
            __syncthreads();
            if (shared.last) {
                __threadfence();
                sum = Sum();
                if (sharer < sharing && g < heads) {
                    for (int p = sharer; p < parts; p += sharing * WARPS) {
                        const auto at = [&](int w) { return (int64_t) (from + p + w * sharing + b) * G + g; };
                        sum.add<WARPS>((parts - p + sharing - 1) / sharing, [&](int w) { return __ldcg(job.marks + at(w)); },
                                       [&](int w) { return __ldcg((const float4 *) (job.parts + at(w) * job.d_v + 4 * i)); });
                    }
                    shared.sums[sharer][g][i] = sum.values;
                    if (i == 0) {
                        shared.marks[sharer][g] = { sum.most, sum.weight };
                    }
                }
                __syncthreads();
                finish(head, mine, mine ? join(shared, sharing, g, i) : sum);
            }
        }
        __syncthreads();
    }
}

template <typename T, int LANES> void launch(const Job & job, int g, int blocks, cudaStream_t stream) {
    const ggml_cuda_kernel_launch_params params(dim3(blocks), dim3(THREADS), 0, stream);
    switch (g) {
        case 1: ggml_cuda_kernel_launch(attend_ragged<T, LANES, 1>, params, job); break;
        case 2: ggml_cuda_kernel_launch(attend_ragged<T, LANES, 2>, params, job); break;
        case 3: ggml_cuda_kernel_launch(attend_ragged<T, LANES, 3>, params, job); break;
        default: ggml_cuda_kernel_launch(attend_ragged<T, LANES, 4>, params, job);
    }
}

template <typename T> void launch(const Job & job, int g, int blocks, cudaStream_t stream) {
    const int d = max(job.d_k, job.d_v);
    if (d <= 64) {
        launch<T, 8>(job, g, blocks, stream);
    } else if (d <= 128) {
        launch<T, 16>(job, g, blocks, stream);
    } else {
        launch<T, 32>(job, g, blocks, stream);
    }
}

// Returns whether the token's own rows are all absent, or all present and supported.
static bool has_fresh(const ggml_tensor * dst) {
    const ggml_tensor *k = dst->src[6], *v = dst->src[7], *at = dst->src[8];
    return (!k && !v && !at) || (k && v && at && k->type == GGML_TYPE_F32 && v->type == GGML_TYPE_F32 && at->type == GGML_TYPE_I64 &&
                                 ggml_is_contiguous(k) && ggml_is_contiguous(v) && ggml_is_contiguous(at));
}

static bool fits(const ggml_tensor * dst) {
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2], *bias = dst->src[3], *sinks = dst->src[4], *spans = dst->src[5];
    const bool sizes = k->ne[0] % 8 == 0 && k->ne[0] <= 256 && v->ne[0] % 8 == 0 && v->ne[0] <= 256 && q->ne[1] == 1 && q->ne[3] == 1 &&
                       k->ne[2] == 1 && v->ne[2] == 1 && q->ne[2] % spans->ne[1] == 0 && spans->ne[0] >= 2 + q->ne[2] / spans->ne[1] &&
                       q->ne[2] <= MOST_HEADS;
    const bool types = (k->type == GGML_TYPE_F16 || k->type == GGML_TYPE_BF16 || k->type == GGML_TYPE_F32) && v->type == k->type &&
                       q->type == GGML_TYPE_F32 && spans->type == GGML_TYPE_I32 && (!bias || bias->type == GGML_TYPE_F16) &&
                       (!sinks || sinks->type == GGML_TYPE_F32);
    const bool alibi = ((const float *) dst->op_params)[1] != 0.0f;
    return sizes && types && !alibi && q->nb[2] % 16 == 0 && k->nb[1] % 16 == 0 && v->nb[1] % 16 == 0 && spans->nb[0] == sizeof(int) &&
           (!bias || bias->ne[0] >= k->ne[1]) && has_fresh(dst);
}

// Returns whether ragged_mma.cu supports the operation.
bool has_mma(const ggml_tensor * dst, int device) {
    const ggml_tensor *k = dst->src[1], *v = dst->src[2];
    return k->type == GGML_TYPE_F16 && k->ne[0] == v->ne[0] && (k->ne[0] == 64 || k->ne[0] == 128) &&
           ggml_cuda_info().devices[device].cc >= GGML_CUDA_CC_AMPERE;
}

}  // namespace

bool kvedge_cuda_ragged(ggml_backend_cuda_context * ctx, const ggml_tensor * dst) {
    if (!ctx || !fits(dst)) {
        return fits(dst);
    }
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2], *spans = dst->src[5];
    const int          heads_kv = (int) spans->ne[1], share = (int) q->ne[2] / heads_kv, way = dst->op_params[OWN_KIND + 1];
    const bool         mma      = (way > 0 || (way == 0 && share > 2)) && has_mma(dst, ctx->device);
    const int          most     = mma ? MMA_HEADS : 4, bundles = (share + most - 1) / most;
    const int          g        = mma ? MMA_HEADS : (share + bundles - 1) / bundles;
    const int          blocks   = (mma ? 1 : BLOCKS) * ggml_cuda_info().devices[ctx->device].nsm;
    const size_t       parts    = (size_t) (blocks + heads_kv * bundles) * (size_t) g;

    ggml_cuda_pool_alloc<float>  sums(ctx->pool(), parts * (size_t) v->ne[0]);
    ggml_cuda_pool_alloc<float2> marks(ctx->pool(), parts);
    const auto *                 params = (const float *) dst->op_params;
    const auto                   data   = [](const ggml_tensor * x) { return x ? x->data : nullptr; };

    const Job job = { (char *) k->data, (char *) v->data, (const float *) q->data, (const half *) data(dst->src[3]),
                      (const float *) data(dst->src[4]), (int *) spans->data, (float *) dst->data, sums.ptr, marks.ptr,
                      (int64_t) k->nb[1], (int64_t) v->nb[1], (int64_t) (q->nb[2] / sizeof(float)), (int) k->ne[0], (int) v->ne[0],
                      heads_kv, share, bundles, (int) (spans->nb[1] / sizeof(int)), params[0], params[2],
                      way != 0 ? abs(way) : mma ? 128 : 32,
                      (const float *) data(dst->src[6]), (const float *) data(dst->src[7]), (const int64_t *) data(dst->src[8]) };
    if (mma) {
        attend_mma(job, blocks, ctx->stream());
        return true;
    }
    switch (k->type) {
        case GGML_TYPE_F16: launch<half>(job, g, blocks, ctx->stream()); break;
        case GGML_TYPE_BF16: launch<nv_bfloat16>(job, g, blocks, ctx->stream()); break;
        default: launch<float>(job, g, blocks, ctx->stream());
    }
    return true;
}
