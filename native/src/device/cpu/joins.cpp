// OWN_JOINS (../cuda/joins.cu describes it) on the CPU. Adds the members of a sum in their order.

#include "own.h"

#include "ggml-cpu/vec.h"

#include <cstdint>
#include <cstring>
#include <vector>

void kvedge_cpu_joins(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * lists     = dst->src[5];
    const auto *        sums      = (const int32_t *) lists->data;
    const int           n         = dst->op_params[OWN_KIND + 1];
    const auto *        members   = sums + 2 * (n + 1);
    const ggml_tensor * pairs[][2] = { { dst->src[0], dst }, { dst->src[1], dst->src[2] } };
    for (const auto & [from, to] : pairs) {
        const auto         widen  = ggml_get_type_traits(from->type)->to_float;
        const auto         narrow = ggml_get_type_traits_cpu(to->type)->from_float;
        const int64_t      d      = from->ne[0];
        std::vector<float> row((size_t) d), sum((size_t) d);
        for (int i = params->ith; i < n; i += params->nth) {
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (int m = sums[2 * i + 1]; m < sums[2 * i + 3]; m++) {
                const char * x = (const char *) from->data + (size_t) members[2 * m] * from->nb[1];
                float        factor;
                std::memcpy(&factor, &members[2 * m + 1], sizeof(float));
                if (widen) {
                    widen(x, row.data(), d);
                } else {
                    std::memcpy(row.data(), x, row.size() * sizeof(float));
                }
                ggml_vec_mad_f32((int) d, sum.data(), row.data(), factor);
            }
            narrow(sum.data(), (char *) to->data + (size_t) sums[2 * i] * to->nb[1], d);
        }
    }
}
