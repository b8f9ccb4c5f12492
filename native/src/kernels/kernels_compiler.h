// What the kernels need from the compiler, GCC or Clang.

#pragma once

#include <cstddef>

// Unrolls a loop over accumulators: otherwise the array lives in memory, and every step writes it there.
#if defined(__clang__)
#    define KVEDGE_UNROLL _Pragma("unroll")
#else
#    define KVEDGE_UNROLL _Pragma("GCC unroll 16")
#endif

// Keeps the kernels of one type in a function of their own. Inlined where the type is looked up, the kernels of all types would be one
// function, too large for GCC to inline its parts.
#define KVEDGE_APART __attribute__((noinline))

// Prefetches the cache line at p, which need not be readable.
#define KVEDGE_PREFETCH(p) __builtin_prefetch(p, 0, 3)

// Keeps a value that is used several times in a register: loading it for every use would cost as many loads as there are products.
#define KVEDGE_IN_REGISTER(x, constraint) __asm__("" : "+" constraint(x))

namespace {

// Returns a * b + c with the rounding of vectors: fused if the processor can, whatever the compiler makes of products and sums.
inline float scalar_fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// Loads the first n lanes by way of memory, for vectors without masks; the other lanes become `rest`.
template <class V> inline V load_lanes(const float * p, size_t n, float rest) {
    float lanes[V::W];
    for (size_t i = 0; i < V::W; i++) {
        lanes[i] = i < n ? p[i] : rest;
    }
    return V::load(lanes);
}

template <class V> inline void store_lanes(const V & v, float * p, size_t n) {
    float lanes[V::W];
    v.store(lanes);
    for (size_t i = 0; i < n; i++) {
        p[i] = lanes[i];
    }
}

}  // namespace
