#include "kernels.h"

namespace kvedge {

#if !defined(KVEDGE_HAVE_X86)
const Kernels * kernels_avx2() { return nullptr; }
const Kernels * kernels_avx512() { return nullptr; }
const Kernels * kernels_avx512vnni() { return nullptr; }
#endif
#if !defined(KVEDGE_HAVE_NEON)
const Kernels * kernels_neon() { return nullptr; }
#endif

namespace {

#if defined(KVEDGE_HAVE_X86) && !defined(KVEDGE_KERNELS)
struct Cpu {
    bool avx2, avx512, vnni;
};

Cpu detect() {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return { avx2, avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"),
             (bool) __builtin_cpu_supports("avx512vnni") };
}
#endif

const Kernels * choose() {
#if defined(KVEDGE_KERNELS)
    return KVEDGE_KERNELS();  // a build that measures one table
#elif defined(KVEDGE_HAVE_X86)
    const Cpu cpu = detect();
    if (cpu.avx512) {
        return cpu.vnni ? kernels_avx512vnni() : kernels_avx512();
    }
    if (cpu.avx2) {
        return kernels_avx2();
    }
#elif defined(KVEDGE_HAVE_NEON)
    return kernels_neon();
#endif
    return kernels_generic();
}

}  // namespace

const Kernels & kernels() {
    static const Kernels * const chosen = choose();
    return *chosen;
}

}  // namespace kvedge
