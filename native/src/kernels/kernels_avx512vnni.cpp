// AVX-512 with sums of integer products (VNNI), for q8_0.

#include "kernels_avx512.h"
#include "kernels_avx512vnni_q8.h"

namespace kvedge {

const Kernels * kernels_avx512vnni() {
    static constexpr Kernels table = make_table("avx512vnni", k_pairs_rows_dot, k_pairs_rows_axpy);
    return &table;
}

}  // namespace kvedge
