#include "kernels_avx512.h"
#include "kernels_impl.h"

namespace kvedge {

const Kernels * kernels_avx512() {
    static constexpr Kernels table = make_table("avx512");
    return &table;
}

}  // namespace kvedge
