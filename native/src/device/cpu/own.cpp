// Calls the function of each of kvedge's operations (own.h), and gives this dispatcher to ggml's CPU backend.

#include "own.h"

#include "ggml-cpu/ops.h"

static void compute(const ggml_compute_params * params, ggml_tensor * dst) {
    switch (dst->op_params[OWN_KIND]) {
        case OWN_RAGGED: return kvedge_cpu_ragged(params, dst);
        case OWN_NEAREST: return kvedge_cpu_nearest(params, dst);
        case OWN_JOINS: return kvedge_cpu_joins(params, dst);
        case OWN_SUMS: return kvedge_cpu_sums(params, dst);
        case OWN_POINTS: return kvedge_cpu_points(params, dst);
        case OWN_DEVIATION: return kvedge_cpu_deviation(params, dst);
        case OWN_SUM: return kvedge_cpu_sum(params, dst);
        case OWN_LENGTHS: return kvedge_cpu_lengths(params, dst);
        default: GGML_ABORT("unknown operation");
    }
}

static const bool set = (ggml_cpu_ragged = compute) != nullptr;
