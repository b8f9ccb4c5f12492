// NEON with products of integer matrices (i8mm) besides sums of four (dotprod).

#include "kernels_neon.h"
#include "kernels_neondot_q.h"

namespace kvedge {

const Kernels * kernels_neoni8mm() {
    static constexpr Kernels table = make_table("neoni8mm", k_codes_rows_dot, k_codes_rows_axpy);
    return &table;
}

}  // namespace kvedge
