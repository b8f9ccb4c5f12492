#include "kernels.h"

#include <vector>

#if defined(_MSC_VER) && defined(KVEDGE_HAVE_X86)
#    include <intrin.h>
#endif

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
#    if defined(_MSC_VER)
    int r[4];
    __cpuidex(r, 1, 0);
    const bool fma_f16c = (r[2] & (1 << 12)) && (r[2] & (1 << 29)) && (r[2] & (1 << 27));
    const auto xcr      = (r[2] & (1 << 27)) ? _xgetbv(0) : 0;
    __cpuidex(r, 7, 0);
    const bool avx2   = fma_f16c && (xcr & 6) == 6 && (r[1] & (1 << 5));
    const int  need   = (1 << 16) | (1 << 17) | (1 << 30) | (int) (1u << 31);
    return { avx2, avx2 && (xcr & 0xe6) == 0xe6 && (r[1] & need) == need, (r[2] & (1 << 11)) != 0 };
#    else
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return { avx2, avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"),
             (bool) __builtin_cpu_supports("avx512vnni") };
#    endif
}
#endif

// What this processor can run, the best first; never empty.
std::vector<const Kernels *> usable() {
#if defined(KVEDGE_KERNELS)
    return { KVEDGE_KERNELS() };  // a build that measures one table
#else
    std::vector<const Kernels *> tables;
#    if defined(KVEDGE_HAVE_X86)
    const Cpu cpu = detect();
    if (cpu.avx512 && cpu.vnni) {
        tables.push_back(kernels_avx512vnni());
    }
    if (cpu.avx512) {
        tables.push_back(kernels_avx512());
    }
    if (cpu.avx2) {
        tables.push_back(kernels_avx2());
    }
#    elif defined(KVEDGE_HAVE_NEON)
    tables.push_back(kernels_neon());
#    endif
    tables.push_back(kernels_generic());
    return tables;
#endif
}

const std::vector<const Kernels *> & tables() {
    static const std::vector<const Kernels *> found = usable();
    return found;
}

}  // namespace

const Kernels & kernels() {
    static const Kernels * const chosen = tables().front();
    return *chosen;
}

const Kernels * usable_kernels(int32_t i) { return (size_t) i < tables().size() ? tables()[(size_t) i] : nullptr; }

}  // namespace kvedge
