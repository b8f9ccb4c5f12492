// OWN_SUMS on CUDA: sums of attention weights for each key, on tensor cores. No weight leaves the registers.
//
//   src[0] q        [d, H, n] f32
//   src[1] K        [d, shown, Hkv] f16 or bf16
//   src[2] mask     [shown, n] f16, added to the logits
//   src[3] columns  [.., Hkv] f32, or NULL. Entry i - from gets the weights of key i, added up over all queries and query heads of the
//                   KV head. Keys before `from` have no entry.
//   src[4] squares  [.., Hkv] f32, or NULL. As columns, but for each query the square of the sum over the query heads
//   src[5] entropy  [1, Hkv] f32: if op_params[OWN_KIND + 2], gets w ln w added up over all queries and keys (minus the entropy)
//   src[6] sinks    [H] f32, or NULL
//   dst             a view of src[5]
//   op_params       scale in 0, softcap in 2, `from` in OWN_KIND + 1; block sizes for a benchmark in OWN_KIND + 3, or 0
//
// Two passes compute the products. In the first pass a warp holds queries and keys stream by: it finds each query's largest logit and
// sum. In the second pass a warp holds keys and queries stream by: a weight is 2^(logit - log2 of the query's sum), and each lane adds
// up the weights of its keys. The order of all additions is fixed, so that results are reproducible.

#include "sums.cuh"

namespace {

// ---------------------------------------------------------------------------------------------------------
// Preparation: scales the queries, and classifies the squares of the mask

// Sets job.seen of one square of the mask. One warp calls this.
__device__ __forceinline__ void look_at(const Job & job, int square) {
    const int  q = square / job.across * SIDE, k = square % job.across * SIDE + 2 * (int) threadIdx.x;
    bool       seen = false, other = false;
#pragma unroll 16
    for (int i = 0; i < SIDE; i++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const bool  inside = q + i < job.n && k + e < job.shown;
            const float x      = inside ? __half2float(job.mask[(q + i) * job.mask_row + k + e]) : -INFINITY;
            seen |= x > LOWEST;
            other |= x != 0.0f;
        }
    }
    seen  = __any_sync(0xffffffff, seen);
    other = __any_sync(0xffffffff, other);
    if (threadIdx.x == 0) {
        job.seen[square] = !seen ? NOTHING : other ? SOME : ALL;
    }
}

template <typename T, int D> __global__ void prepare(const Job job) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int squares = job.down * job.across, looking = (squares + WARPS_EACH - 1) / WARPS_EACH;
    if ((int) blockIdx.x < looking) {
        const int square = blockIdx.x * WARPS_EACH + threadIdx.y;
        if (square < squares) {
            look_at(job, square);
        }
        return;
    }
    const int64_t at = (int64_t) (blockIdx.x - looking) * THREADS + threadIdx.y * 32 + threadIdx.x;
    const int     i = (int) (at % (D / 8)) * 8, t = (int) (at / (D / 8) % job.n), head = (int) (at / (D / 8) / job.n);
    if (head >= job.heads()) {
        return;
    }
    const float factor = job.softcap == 0.0f ? job.scale * LOG2E : job.scale / job.softcap;
    using Two          = typename Pair<T>::Two;
    Two * const   to   = (Two *) job.queries + (((int64_t) head * job.n + t) * D + i) / 2;
    const float * from = job.q + head * job.q_head + t * job.q_row + i;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const bool inside = i < job.d;
        to[j] = Pair<T>::of(inside ? factor * from[2 * j] : 0.0f, inside ? factor * from[2 * j + 1] : 0.0f);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Passes

// The first pass: writes job.rows. While one half of a tile is multiplied, the powers of the half before are added up.
template <typename T, int D, int WARPS, int M, int N, int BLOCKS, bool ENTROPY>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS) add_rows(const Job job) {
    constexpr int                   ROWS = 16 * M * WARPS;
    __shared__ Stage<T, D, N>       stages[2];
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int    head = blockIdx.y, first = ((int) gridDim.x - 1 - (int) blockIdx.x) * ROWS, mine = first + 16 * M * (int) threadIdx.y;
    const int    tiles = (job.shown + N - 1) / N, split = blockIdx.z;
    const int    begin = (int) ((int64_t) tiles * split / job.splits_rows), end = (int) ((int64_t) tiles * (split + 1) / job.splits_rows);
    const char * keys  = job.k + head / job.share * job.k_head;
    const int    group = threadIdx.x / 4, column = threadIdx.x % 4 * 2;
    const auto   seen  = [&](int query, int t) { return query < job.n ? job.seen[query / SIDE * job.across + t * N / SIDE] : (uint8_t) NOTHING; };
    const auto   any   = [&](int t) {
        bool out = false;
#pragma unroll
        for (int i = 0; i < ROWS; i += SIDE) {
            out |= seen(first + i, t) != NOTHING;
        }
        return out;
    };
    const auto fetch = [&](int stage, int t) { load<WARPS>(stages[stage], keys, job.k_row, t * N, job.shown - 1, job.d); };

    Held<T, D, M> held;
    held.load((const char *) job.queries + (int64_t) head * job.n * D * sizeof(T), D * sizeof(T), mine, job.n - 1, D);
    int t = next(begin, end, any), then = t;
    clear<WARPS>(stages[0], job.d);
    clear<WARPS>(stages[1], job.d);
    if (t < end) {
        fetch(0, t);
        then = next(t + 1, end, any);
    }
    float              most[M][2], sum[M][2], turn[M][2];
    tile<16, 8, float> x[2][M][N / 16];
#pragma unroll
    for (int m = 0; m < M; m++) {
        most[m][0] = most[m][1] = LOWEST;
        sum[m][0] = sum[m][1] = turn[m][0] = turn[m][1] = 0.0f;
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            x[1][m][j].x[0] = x[1][m][j].x[1] = x[1][m][j].x[2] = x[1][m][j].x[3] = -INFINITY;
        }
    }
    const auto add = [&](const tile<16, 8, float> (&half)[M][N / 16], int i) {
        for_part<M, N, D / 16>(i, [&](int m, int j, int l) {
            const float power = exp2f(half[m][j].x[l]);
            sum[m][l / 2] += power;
            if (ENTROPY) {
                turn[m][l / 2] += power * fmaxf(half[m][j].x[l], LOWEST);
            }
        });
    };
    uint8_t is_then = t < end ? seen(mine, t) : (uint8_t) NOTHING;
    for (int stage = 0; t < end; stage = 1 - stage) {
        wait_for_copies();
        const int     now = t;
        const uint8_t is  = is_then;
        t                 = then;
        if (t < end) {
            fetch(1 - stage, t);
            is_then = seen(mine, t);
            then    = next(t + 1, end, any);
        }
        if (is == NOTHING) {
            continue;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int j = 0; j < N / 16; j++) {
#pragma unroll
                    for (int l = 0; l < 4; l++) {
                        x[h][m][j].x[l] = job.softcap != 0.0f || most[m][l / 2] == LOWEST ? 0.0f : -most[m][l / 2];
                    }
                }
            }
            held.multiply(stages[stage], h, x[h], [&](int i) { add(x[1 - h], i); });
            if (job.softcap != 0.0f || is == SOME) {
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int j = 0; j < N / 16; j++) {
#pragma unroll
                        for (int l = 0; l < 4; l++) {
                            float & at = x[h][m][j].x[l];
                            if (job.softcap != 0.0f) {
                                at = LOG2E * job.softcap * tanh_of(at) - (most[m][l / 2] == LOWEST ? 0.0f : most[m][l / 2]);
                            }
                            if (is == SOME) {
                                at += bias_of(job, mine + 16 * m + 8 * (l / 2) + group, now * N + h * (N / 2) + 8 * j + column + l % 2);
                            }
                        }
                    }
                }
            }
            raise<M, N>(x[h], most, sum, turn);
        }
    }
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        add(x[1], i);
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float best = most[m][i];
#pragma unroll
            for (int o = 1; o < 4; o *= 2) {
                best = fmaxf(best, __shfl_xor_sync(0xffffffff, best, o));
            }
            const float by = most[m][i] - best, less = exp2f(by);
            float       all = less * sum[m][i], turns = less * (turn[m][i] + fmaxf(by, LOWEST) * sum[m][i]);
#pragma unroll
            for (int o = 1; o < 4; o *= 2) {
                all += __shfl_xor_sync(0xffffffff, all, o);
                turns += __shfl_xor_sync(0xffffffff, turns, o);
            }
            const int query = mine + 16 * m + 8 * i + group;
            if (column == 0 && query < job.n) {
                job.rows[((int64_t) split * job.heads() + head) * job.n + query] = { best, all, turns, 0.0f };
            }
        }
    }
}

// Joins the splits of job.rows: writes job.logs, and adds to job.entropy if wanted. With entropy, one block serves each KV head.
__global__ void join_rows(const Job job) {
    __shared__ float sums[WARPS_EACH];
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int kv = blockIdx.y, thread = threadIdx.y * 32 + threadIdx.x;
    float     entropy = 0.0f;
    for (int i = blockIdx.x * THREADS + thread; i < job.share * job.padded; i += gridDim.x * THREADS) {
        const int head = kv * job.share + i / job.padded, query = i % job.padded;
        float     most = LOWEST, sum = 0.0f, turn = 0.0f, log = INFINITY;
#pragma unroll 4
        for (int s = 0; s < (query < job.n ? job.splits_rows : 0); s++) {
            const float4 part = job.rows[((int64_t) s * job.heads() + head) * job.n + query];
            const float  top = fmaxf(most, part.x), old = exp2f(most - top), now = exp2f(part.x - top);
            turn = old * (turn + (most - top) * sum) + now * (part.z + (part.x - top) * part.y);
            sum  = old * sum + now * part.y;
            most = top;
        }
        if (sum > 0.0f) {
            const float all = sum + (job.sinks ? exp2f(LOG2E * job.sinks[head] - most) : 0.0f);
            log             = most + log2f(all);
            entropy += (turn + (most - log) * sum) / (LOG2E * all);
        }
        job.logs[(int64_t) head * job.padded + query] = log;
    }
    if (job.wants_entropy) {
#pragma unroll
        for (int o = 16; o > 0; o /= 2) {
            entropy += __shfl_xor_sync(0xffffffff, entropy, o);
        }
        sums[threadIdx.y] = entropy;
        __syncthreads();
        if (thread == 0) {
            for (int w = 1; w < WARPS_EACH; w++) {
                entropy += sums[w];
            }
            job.entropy[kv] += entropy;
        }
    }
}

// The second pass: adds up the weights of each key, and if SQUARES the square of each query's sum over its KV head's query heads.
template <typename T, int D, int WARPS, int M, int N, int BLOCKS, bool SQUARES>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS) add_columns(const Job job) {
    constexpr int             ROWS = 16 * M * WARPS;
    __shared__ Stage<T, D, N> stages[2];
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int  kv = blockIdx.y, first = job.first_key() + (int) blockIdx.x * ROWS, mine = first + 16 * M * (int) threadIdx.y;
    const int  tiles = (job.n + N - 1) / N, split = blockIdx.z;
    const int  begin = (int) ((int64_t) tiles * split / job.splits_keys), end = (int) ((int64_t) tiles * (split + 1) / job.splits_keys);
    const int  group = threadIdx.x / 4, column = threadIdx.x % 4 * 2;
    const auto seen  = [&](int t, int key) { return key < job.shown ? job.seen[t * N / SIDE * job.across + key / SIDE] : (uint8_t) NOTHING; };
    const auto any   = [&](int t) {
        bool out = false;
#pragma unroll
        for (int i = 0; i < ROWS; i += SIDE) {
            out |= seen(t, first + i) != NOTHING;
        }
        return out;
    };
    const auto fetch = [&](int stage, int t, int g) {
        const int64_t head = kv * job.share + g;
        load<WARPS>(stages[stage], (const char *) job.queries + head * job.n * D * sizeof(T), D * sizeof(T), t * N, job.n - 1, D);
        if (threadIdx.y == 0 && threadIdx.x < N / 4) {
            copy_sixteen(&stages[stage].logs[4 * threadIdx.x], job.logs + head * job.padded + t * N + 4 * threadIdx.x);
        }
    };

    Held<T, D, M> held;
    held.load(job.k + kv * job.k_head, job.k_row, mine, job.shown - 1, job.d);
    int t = next(begin, end, any), then = t, g = 0;
    if (t < end) {
        fetch(0, t, g);
        then = next(t + 1, end, any);
    }
    float              columns[M][2] = {}, squares[M][2] = {}, both[2][SQUARES ? M : 1][SQUARES ? N / 4 : 1];
    tile<16, 8, float> x[2][M][N / 16];
    bool               was_first = true, was_last = false;  // whether x[1] is of a KV head's first, or last, query head
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            x[1][m][j].x[0] = x[1][m][j].x[1] = x[1][m][j].x[2] = x[1][m][j].x[3] = -INFINITY;
        }
    }
    const auto add = [&](int h, int i, bool is_first, bool is_last) {
        for_part<M, N, D / 16>(i, [&](int m, int j, int l) {
            const float weight = exp2f(x[h][m][j].x[l]);
            columns[m][l / 2] += weight;
            if (SQUARES) {
                float & sum = both[h][m][4 * j + l];
                sum = is_first ? weight : sum + weight;
                squares[m][l / 2] += is_last ? sum * sum : 0.0f;
            }
        });
    };
    uint8_t is_then = t < end ? seen(t, mine) : (uint8_t) NOTHING;
    for (int stage = 0; t < end; stage = 1 - stage) {
        wait_for_copies();
        const int     now   = t;
        const uint8_t is    = is_then;
        const bool    first_of = g == 0, last_of = g + 1 == job.share;
        g = last_of ? 0 : g + 1;
        t = last_of ? then : now;
        if (t < end) {
            fetch(1 - stage, t, g);
            if (last_of) {
                is_then = seen(t, mine);
                then    = next(t + 1, end, any);
            }
        }
        if (is == NOTHING) {
            continue;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float * logs = stages[stage].logs + h * (N / 2) + column;
#pragma unroll
            for (int j = 0; j < N / 16; j++) {
                const float2 log = *(const float2 *) &logs[8 * j];
#pragma unroll
                for (int m = 0; m < M; m++) {
                    x[h][m][j].x[0] = x[h][m][j].x[2] = job.softcap != 0.0f ? 0.0f : -log.x;
                    x[h][m][j].x[1] = x[h][m][j].x[3] = job.softcap != 0.0f ? 0.0f : -log.y;
                }
            }
            held.multiply(stages[stage], h, x[h], [&](int i) { add(1 - h, i, h == 0 ? was_first : first_of, h == 0 ? was_last : last_of); });
            if (job.softcap != 0.0f || is == SOME) {
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int j = 0; j < N / 16; j++) {
#pragma unroll
                        for (int l = 0; l < 4; l++) {
                            float & at = x[h][m][j].x[l];
                            if (job.softcap != 0.0f) {
                                at = LOG2E * job.softcap * tanh_of(at) - logs[8 * j + l % 2];
                            }
                            if (is == SOME) {
                                at += bias_of(job, now * N + h * (N / 2) + 8 * j + column + l % 2, mine + 16 * m + 8 * (l / 2) + group);
                            }
                        }
                    }
                }
            }
        }
        was_first = first_of, was_last = last_of;
    }
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        add(1, i, was_first, was_last);
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int o = 1; o < 4; o *= 2) {
                columns[m][i] += __shfl_xor_sync(0xffffffff, columns[m][i], o);
                squares[m][i] += __shfl_xor_sync(0xffffffff, squares[m][i], o);
            }
            const int key = mine + 16 * m + 8 * i + group;
            if (column != 0 || key < job.from || key >= job.shown) {
                continue;
            }
            if (job.splits_keys > 1) {
                const int64_t keys = job.shown - job.from, at = ((int64_t) split * 2 * job.heads_kv + kv) * keys + key - job.from;
                job.parts[at]                       = columns[m][i];
                job.parts[at + job.heads_kv * keys] = squares[m][i];
            } else {
                if (job.columns) {
                    job.columns[kv * job.columns_head + key - job.from] += columns[m][i];
                }
                if (SQUARES) {
                    job.squares[kv * job.squares_head + key - job.from] += squares[m][i];
                }
            }
        }
    }
}

__global__ void join_columns(const Job job) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int kv = blockIdx.y, keys = job.shown - job.from, key = blockIdx.x * THREADS + threadIdx.y * 32 + threadIdx.x;
    if (key >= keys) {
        return;
    }
    float columns = 0.0f, squares = 0.0f;
    for (int s = 0; s < job.splits_keys; s++) {
        const int64_t at = ((int64_t) s * 2 * job.heads_kv + kv) * keys + key;
        columns += job.parts[at];
        squares += job.parts[at + (int64_t) job.heads_kv * keys];
    }
    if (job.columns) {
        job.columns[kv * job.columns_head + key] += columns;
    }
    if (job.squares) {
        job.squares[kv * job.squares_head + key] += squares;
    }
}

// ---------------------------------------------------------------------------------------------------------
// On the host

int parts_of(int64_t n, int64_t size) { return (int) ((n + size - 1) / size); }

// Returns the number of parts to split the tiles of each block into for the least time, if `slots` blocks run at a time. Each part
// costs the time of COST tiles in addition.
int splits_of(int blocks, int tiles, int slots) {
    constexpr int MOST = 32, COST = 3;
    int           best = 1;
    int64_t       least = INT64_MAX;
    for (int s = 1; s <= min(tiles, MOST); s++) {
        const int64_t time = (int64_t) parts_of((int64_t) blocks * s, slots) * (parts_of(tiles, s) + COST);
        if (time < least) {
            best = s, least = time;
        }
    }
    return best;
}

// The launches of both passes for one block size: N rows stream by ROWS held rows.
template <typename T, int D, int WARPS, int M, int N, int BLOCKS> struct Sized {
    static constexpr int ROWS = 16 * M * WARPS;

    static void first(Job & job, ggml_backend_cuda_context & ctx, ggml_cuda_pool_alloc<float4> & rows, int sms) {
        const int heads = job.heads_kv * job.share, blocks = parts_of(job.n, ROWS);
        job.splits_rows = splits_of(blocks * heads, parts_of(job.shown, N), BLOCKS * sms);
        job.rows        = rows.alloc((size_t) job.splits_rows * (size_t) heads * (size_t) job.n);
        ggml_cuda_kernel_launch(job.wants_entropy ? add_rows<T, D, WARPS, M, N, BLOCKS, true> : add_rows<T, D, WARPS, M, N, BLOCKS, false>,
                                ggml_cuda_kernel_launch_params(dim3(blocks, heads, job.splits_rows), dim3(32, WARPS), 0, ctx.stream()), job);
    }

    template <bool SQUARES> static void second(Job & job, ggml_backend_cuda_context & ctx, ggml_cuda_pool_alloc<float> & parts, int sms) {
        const int keys = job.shown - job.from, blocks = parts_of(job.shown - job.from / SIDE * SIDE, ROWS), tiles = parts_of(job.n, N);
        job.splits_keys = splits_of(blocks * job.heads_kv, tiles, BLOCKS * sms);
        if (job.splits_keys > 1) {
            job.parts = parts.alloc((size_t) job.splits_keys * 2 * (size_t) job.heads_kv * (size_t) keys);
        }
        ggml_cuda_kernel_launch(add_columns<T, D, WARPS, M, N, BLOCKS, SQUARES>,
                                ggml_cuda_kernel_launch_params(dim3(blocks, job.heads_kv, job.splits_keys), dim3(32, WARPS), 0, ctx.stream()), job);
        if (job.splits_keys > 1) {
            ggml_cuda_kernel_launch(join_columns, ggml_cuda_kernel_launch_params(dim3(parts_of(keys, THREADS), job.heads_kv), dim3(32, WARPS_EACH),
                                    0, ctx.stream()), job);
        }
    }
};

// Runs all steps with block size A for the first pass, B for the second pass, C for the second pass with squares.
template <typename T, int D, class A, class B, class C> void run(ggml_backend_cuda_context & ctx, Job job) {
    const int heads = job.heads_kv * job.share, sms = ggml_cuda_info().devices[ctx.device].nsm;

    ggml_cuda_pool_alloc<T>       queries(ctx.pool(), (size_t) heads * (size_t) job.n * D);
    ggml_cuda_pool_alloc<uint8_t> seen(ctx.pool(), (size_t) job.down * (size_t) job.across);
    ggml_cuda_pool_alloc<float>   logs(ctx.pool(), (size_t) heads * (size_t) job.padded);
    ggml_cuda_pool_alloc<float4>  rows(ctx.pool());
    ggml_cuda_pool_alloc<float>   parts(ctx.pool());
    job.queries = queries.ptr;
    job.seen    = seen.ptr;
    job.logs    = logs.ptr;

    const int blocks = parts_of((int64_t) job.down * job.across, WARPS_EACH) + parts_of((int64_t) heads * job.n * (D / 8), THREADS);
    ggml_cuda_kernel_launch(prepare<T, D>, ggml_cuda_kernel_launch_params(dim3(blocks), dim3(32, WARPS_EACH), 0, ctx.stream()), job);
    A::first(job, ctx, rows, sms);
    const int joining = job.wants_entropy ? 1 : parts_of((int64_t) job.share * job.padded, THREADS);
    ggml_cuda_kernel_launch(join_rows, ggml_cuda_kernel_launch_params(dim3(joining, job.heads_kv), dim3(32, WARPS_EACH), 0, ctx.stream()), job);
    if (job.squares) {
        C::template second<true>(job, ctx, parts, sms);
    } else if (job.columns) {
        B::template second<false>(job, ctx, parts, sms);
    }
}

template <typename T> void run(ggml_backend_cuda_context & ctx, const Job & job, int setting) {
    if (job.d <= 64) {
        run<T, 64, Sized<T, 64, 4, 2, 64, 3>, Sized<T, 64, 4, 2, 64, 2>, Sized<T, 64, 4, 2, 32, 3>>(ctx, job);
    } else if (job.d <= 96) {
        run<T, 96, Sized<T, 96, 4, 2, 64, 2>, Sized<T, 96, 4, 2, 64, 2>, Sized<T, 96, 4, 2, 32, 2>>(ctx, job);
    } else if (job.d <= 128) {
        // with few queries blocks are short; more blocks at a time hide the start of each block
        constexpr int FEW = 1024;
        using Large = Sized<T, 128, 4, 2, 64, 2>;
        using Small = Sized<T, 128, 4, 1, 64, 4>;
        using Both  = Sized<T, 128, 4, 2, 32, 2>;
        switch (setting != 0 ? setting : job.n < FEW ? 4 : 1) {
            case 1: run<T, 128, Large, Large, Both>(ctx, job); break;
            case 2: run<T, 128, Large, Small, Both>(ctx, job); break;
            case 3: run<T, 128, Small, Large, Both>(ctx, job); break;
            default: run<T, 128, Small, Small, Both>(ctx, job);
        }
    } else {
        run<T, 256, Sized<T, 256, 4, 1, 32, 2>, Sized<T, 256, 4, 1, 32, 2>, Sized<T, 256, 4, 1, 32, 2>>(ctx, job);
    }
}

static bool fits(const ggml_tensor * dst) {
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *mask = dst->src[2], *entropy = dst->src[5], *sinks = dst->src[6];
    const auto         sums = [&](const ggml_tensor * x) {
        return !x || (x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && x->ne[0] >= k->ne[1] - dst->op_params[OWN_KIND + 1] && x->ne[1] == k->ne[2]);
    };
    const bool sizes = k->ne[0] == q->ne[0] && k->ne[0] % 8 == 0 && k->ne[0] <= 256 && q->ne[1] % k->ne[2] == 0 && q->ne[3] == 1 && k->ne[3] == 1 &&
                       mask->ne[0] >= k->ne[1] && mask->ne[1] >= q->ne[2] && q->ne[1] < 65536;
    const bool types = (k->type == GGML_TYPE_F16 || k->type == GGML_TYPE_BF16) && q->type == GGML_TYPE_F32 && mask->type == GGML_TYPE_F16 &&
                       entropy->type == GGML_TYPE_F32 && ggml_is_contiguous(entropy) && (!sinks || sinks->type == GGML_TYPE_F32);
    bool tensor_cores = true;
    for (int i = 0; i < ggml_cuda_info().device_count; i++) {
        const int cc = ggml_cuda_info().devices[i].cc;
        tensor_cores = tensor_cores && (k->type == GGML_TYPE_F16 ? turing_mma_available(cc) : ampere_mma_available(cc));
    }
    return sizes && types && tensor_cores && sums(dst->src[3]) && sums(dst->src[4]) && q->nb[0] == sizeof(float) && mask->nb[0] == sizeof(half) &&
           k->nb[1] % 16 == 0 && k->nb[2] % 16 == 0;
}

}  // namespace

bool kvedge_cuda_sums(ggml_backend_cuda_context * ctx, const ggml_tensor * dst) {
    if (!ctx || !fits(dst)) {
        return fits(dst);
    }
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *mask = dst->src[2];
    const auto *       params = (const float *) dst->op_params;
    const auto         data   = [](const ggml_tensor * x) { return x ? (float *) x->data : nullptr; };
    const auto         head   = [](const ggml_tensor * x) { return x ? (int64_t) (x->nb[1] / sizeof(float)) : 0; };
    Job                job    = {};

    job.q             = data(q);
    job.k             = (const char *) k->data;
    job.mask          = (const half *) mask->data;
    job.columns       = data(dst->src[3]);
    job.squares       = data(dst->src[4]);
    job.entropy       = data(dst->src[5]);
    job.sinks         = data(dst->src[6]);
    job.q_head        = (int64_t) (q->nb[1] / sizeof(float));
    job.q_row         = (int64_t) (q->nb[2] / sizeof(float));
    job.k_row         = (int64_t) k->nb[1];
    job.k_head        = (int64_t) k->nb[2];
    job.mask_row      = (int64_t) (mask->nb[1] / sizeof(half));
    job.columns_head  = head(dst->src[3]);
    job.squares_head  = head(dst->src[4]);
    job.n             = (int) q->ne[2];
    job.shown         = (int) k->ne[1];
    job.from          = dst->op_params[OWN_KIND + 1];
    job.heads_kv      = (int) k->ne[2];
    job.share         = (int) (q->ne[1] / k->ne[2]);
    job.d             = (int) k->ne[0];
    job.down          = parts_of(job.n, SIDE);
    job.across        = parts_of(job.shown, SIDE);
    job.padded        = job.down * SIDE;
    job.wants_entropy = dst->op_params[OWN_KIND + 2] != 0;
    job.scale         = params[0];
    job.softcap       = params[2];
    if (k->type == GGML_TYPE_F16) {
        run<half>(*ctx, job, dst->op_params[OWN_KIND + 3]);
    } else {
        run<nv_bfloat16>(*ctx, job, 0);
    }
    return true;
}
