#include "kernels.h"

#if defined(KVEDGE_HAVE_NEON) && defined(__linux__)
#    include <sys/auxv.h>
#elif defined(KVEDGE_HAVE_NEON) && defined(__APPLE__)
#    include <sys/sysctl.h>
#endif

namespace kvedge {

#if !defined(KVEDGE_HAVE_X86)
const Kernels * kernels_avx2() { return nullptr; }
const Kernels * kernels_avx512() { return nullptr; }
const Kernels * kernels_avx512vnni() { return nullptr; }
#endif
#if !defined(KVEDGE_HAVE_NEON)
const Kernels * kernels_neon() { return nullptr; }
const Kernels * kernels_neondot() { return nullptr; }
const Kernels * kernels_neoni8mm() { return nullptr; }
#endif

namespace {

#if defined(KVEDGE_HAVE_X86)
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
#elif defined(KVEDGE_HAVE_NEON)
struct Cpu {
    bool dot, i8mm;
};

Cpu detect() {
#    if defined(__linux__)
    // the kernel's numbers, which older headers lack: HWCAP_ASIMDDP and HWCAP2_I8MM
    return { (getauxval(AT_HWCAP) & (1ul << 20)) != 0, (getauxval(AT_HWCAP2) & (1ul << 13)) != 0 };
#    elif defined(__APPLE__)
    const auto has = [](const char * name) {
        int32_t value = 0;
        size_t  size  = sizeof(value);
        return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
    };
    return { has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_I8MM") };
#    else
    return { false, false };
#    endif
}
#endif

}  // namespace

Tables runnable_kernels() {
    Tables     tables = {};
    const auto add    = [&](bool runs, const Kernels * table) {
        if (runs) {
            tables.table[tables.n++] = table;
        }
    };
#if defined(KVEDGE_HAVE_X86)
    const Cpu cpu = detect();
    add(cpu.avx512 && cpu.vnni, kernels_avx512vnni());
    add(cpu.avx512, kernels_avx512());
    add(cpu.avx2, kernels_avx2());
#elif defined(KVEDGE_HAVE_NEON)
    const Cpu cpu = detect();
    add(cpu.dot && cpu.i8mm, kernels_neoni8mm());
    add(cpu.dot, kernels_neondot());
    add(true, kernels_neon());
#endif
    add(true, kernels_generic());
    return tables;
}

const Kernels & kernels() {
#if defined(KVEDGE_KERNELS)
    return *KVEDGE_KERNELS();  // a build that measures one table
#else
    static const Kernels * const chosen = runnable_kernels().table[0];
    return *chosen;
#endif
}

}  // namespace kvedge
