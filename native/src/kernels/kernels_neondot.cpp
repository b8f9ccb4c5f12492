// NEON with sums of four integer products (dotprod), for q8_0 and q4_0.

#include "kernels_neon.h"
#include "kernels_neondot_q.h"

namespace kvedge {

const Kernels * kernels_neondot() {
    static constexpr Kernels table = make_table("neondot", k_codes_rows_dot, k_codes_rows_axpy);
    return &table;
}

}  // namespace kvedge
