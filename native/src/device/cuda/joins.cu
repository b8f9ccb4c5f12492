// OWN_JOINS on CUDA: adds evicted rows to kept rows. Each result is a sum of old rows times factors, written to a slot of new tensors.
//
//   src[0], [1]  old K [d_k, rows], V [d_v, rows] f16, bf16 or f32
//   src[2]       new V [d_v, slots] of the same type, written
//   src[5]       lists [2, sums + 1 + members] i32. For each sum: its slot in the new tensors, and the number of members of all sums
//                before. Then 0 and the total number of members. Then for each member: its old row, and its factor (bits of an f32)
//   dst          new K [d_k, slots] of the same type, written; a view
//   op_params[OWN_KIND + 1]  number of sums
//
// A warp adds up one sum; all warps of a block share a sum with many members. Sums are f32, in an order that depends only on the number
// of members.

#include "eight.cuh"
#include "own.cuh"

namespace {

constexpr int WARPS = 8, AHEAD = 4;  // AHEAD: members that a team of lanes loads at a time
constexpr int MANY  = 64;            // a sum with more members is shared by all warps of a block

struct Rows {
    const char * from;
    char *       to;
    int64_t      from_row, to_row;  // bytes
    int          d;
};

struct Job {
    Rows         of[2];  // keys, values
    const int2 * sums;
    const int2 * members;
    int          n;
};

// Adds members first, first + step, ... before `end` to sum: eight numbers from `column` on.
template <typename T>
__device__ __forceinline__ void add_members(const Rows & rows, const int2 * members, int first, int end, int step, int column, float (&sum)[8]) {
    for (int at = first; at < end; at += AHEAD * step) {
        Eight<T> x[AHEAD];
        float    factor[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            x[a]      = Eight<T>{};
            factor[a] = 0.0f;
            if (at + a * step < end) {
                const int2 member = members[at + a * step];
                factor[a]         = __int_as_float(member.y);
                x[a]              = *(const Eight<T> *) (rows.from + member.x * rows.from_row + column * sizeof(T));
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            float row[8];
            widen(x[a], row);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sum[i] += factor[a] * row[i];
            }
        }
    }
}

// LANES lanes (a team) hold a row, eight numbers each.
template <typename T, int LANES> __global__ void __launch_bounds__(32 * WARPS) add_joins(const Job job) {
    constexpr int    TEAMS = 32 / LANES;
    __shared__ float shared[WARPS][8][LANES];
    const Rows       rows = blockIdx.y == 0 ? job.of[0] : job.of[1];
    const int        warp = threadIdx.x / 32, lane = threadIdx.x % LANES, team = threadIdx.x % 32 / LANES;
    for (int base = 0; base < rows.d; base += 8 * LANES) {
        const int  column = base + 8 * lane;
        const bool inside = column < rows.d;
        const auto add    = [&](int first, int end, int step, float (&sum)[8]) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sum[i] = 0.0f;
            }
            if (inside) {
                add_members<T>(rows, job.members, first, end, step, column, sum);
            }
#pragma unroll
            for (int o = LANES; o < 32; o *= 2) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    sum[i] += __shfl_xor_sync(0xffffffff, sum[i], o);
                }
            }
        };
        const auto write = [&](int slot, const float (&sum)[8]) {
            if (inside && team == 0) {
                Eight<T> out;
                narrow(sum, out);
                *(Eight<T> *) (rows.to + slot * rows.to_row + column * sizeof(T)) = out;
            }
        };
        for (int w = 0; w < WARPS; w++) {
            const int i = blockIdx.x * WARPS + w;
            if (i >= job.n) {
                break;
            }
            const int2 own  = job.sums[i];
            const int  end  = job.sums[i + 1].y;
            const bool many = end - own.y > MANY;
            float      sum[8];
            if (!many && w == warp) {
                add(own.y + team, end, TEAMS, sum);
                write(own.x, sum);
            }
            if (!many) {
                continue;
            }
            add(own.y + warp * TEAMS + team, end, WARPS * TEAMS, sum);
            if (team == 0) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    shared[warp][j][lane] = sum[j];
                }
            }
            __syncthreads();
            if (warp == 0) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sum[j] = 0.0f;
#pragma unroll
                    for (int other = 0; other < WARPS; other++) {
                        sum[j] += shared[other][j][lane];
                    }
                }
                write(own.x, sum);
            }
            __syncthreads();
        }
    }
}

template <typename T> void launch(const Job & job, cudaStream_t stream) {
    const dim3 blocks((job.n + WARPS - 1) / WARPS, 2);
    const int  d = max(job.of[0].d, job.of[1].d);
    if (d <= 64) {
        add_joins<T, 8><<<blocks, 32 * WARPS, 0, stream>>>(job);
    } else if (d <= 128) {
        add_joins<T, 16><<<blocks, 32 * WARPS, 0, stream>>>(job);
    } else {
        add_joins<T, 32><<<blocks, 32 * WARPS, 0, stream>>>(job);
    }
    CUDA_CHECK(cudaGetLastError());
}

static bool fits(const ggml_tensor * dst) {
    const ggml_tensor *k = dst->src[0], *v = dst->src[1], *to_v = dst->src[2], *lists = dst->src[5];
    bool good = k->type == GGML_TYPE_F16 || k->type == GGML_TYPE_BF16 || k->type == GGML_TYPE_F32;
    for (const ggml_tensor * x : { k, v, to_v, dst }) {
        good = good && x->type == k->type && x->ne[0] % 8 == 0 && x->nb[1] % 16 == 0 && x->ne[2] == 1 && x->ne[3] == 1;
    }
    return good && dst->ne[0] == k->ne[0] && to_v->ne[0] == v->ne[0] && lists->type == GGML_TYPE_I32 && ggml_is_contiguous(lists);
}

}  // namespace

bool kvedge_cuda_joins(ggml_backend_cuda_context * ctx, const ggml_tensor * dst) {
    if (!ctx || !fits(dst)) {
        return fits(dst);
    }
    const ggml_tensor *k = dst->src[0], *v = dst->src[1], *to_v = dst->src[2];
    const auto *       lists = (const int2 *) dst->src[5]->data;
    const int          n     = dst->op_params[OWN_KIND + 1];
    const auto rows = [](const ggml_tensor * from, const ggml_tensor * to) {
        return Rows{ (const char *) from->data, (char *) to->data, (int64_t) from->nb[1], (int64_t) to->nb[1], (int) from->ne[0] };
    };
    const Job job = { { rows(k, dst), rows(v, to_v) }, lists, lists + n + 1, n };
    switch (k->type) {
        case GGML_TYPE_F16: launch<half>(job, ctx->stream()); break;
        case GGML_TYPE_BF16: launch<nv_bfloat16>(job, ctx->stream()); break;
        default: launch<float>(job, ctx->stream());
    }
    return true;
}
