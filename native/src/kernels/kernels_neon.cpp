// NEON, which every 64-bit ARM processor has.

#include "kernels_neon.h"

namespace kvedge {

const Kernels * kernels_neon() {
    static constexpr Kernels table = make_table("neon");
    return &table;
}

}  // namespace kvedge
