// What the kernels ask of the compiler.

#pragma once

// For the loops over accumulators: an array that is not unrolled away lives in memory, and every step writes it there.
#if defined(__clang__)
#    define KVEDGE_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#    define KVEDGE_UNROLL _Pragma("GCC unroll 16")
#else
#    define KVEDGE_UNROLL
#endif

// Asks for the line of cache at p, which need not be readable.
#if defined(__GNUC__)
#    define KVEDGE_PREFETCH(p) __builtin_prefetch(p, 0, 3)
#else
#    define KVEDGE_PREFETCH(p) ((void) (p))
#endif

// A value that is used several times: loading it with every use would cost as many loads as there are products.
#if defined(__GNUC__)
#    define KVEDGE_IN_REGISTER(x, constraint) __asm__("" : "+" constraint(x))
#else
#    define KVEDGE_IN_REGISTER(x, constraint) ((void) 0)
#endif
