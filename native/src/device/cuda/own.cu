// Calls the function of each of kvedge's operations (own.h), and gives this dispatcher to ggml's CUDA backend.

#include "own.cuh"

#include "ggml-cuda/fattn.cuh"

static bool compute(ggml_backend_cuda_context * ctx, const ggml_tensor * dst) {
    switch (dst->op_params[OWN_KIND]) {
        case OWN_RAGGED: return kvedge_cuda_ragged(ctx, dst);
        case OWN_NEAREST: return kvedge_cuda_nearest(ctx, dst);
        case OWN_JOINS: return kvedge_cuda_joins(ctx, dst);
        case OWN_SUMS: return kvedge_cuda_sums(ctx, dst);
        case OWN_POINTS: return kvedge_cuda_points(ctx, dst);
        case OWN_DEVIATION: return kvedge_cuda_deviation(ctx, dst);
        case OWN_SUM: return kvedge_cuda_sum(ctx, dst);
        case OWN_LENGTHS: return kvedge_cuda_lengths(ctx, dst);
        default: return false;
    }
}

static const bool set = (ggml_cuda_ragged = compute) != nullptr;
