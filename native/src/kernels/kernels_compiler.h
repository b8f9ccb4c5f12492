// What the kernels ask of the compiler, GCC or Clang.

#pragma once

#include <cstddef>

// For the loops over accumulators: an array that is not unrolled away lives in memory, and every step writes it there.
#if defined(__clang__)
#    define KVEDGE_UNROLL _Pragma("unroll")
#else
#    define KVEDGE_UNROLL _Pragma("GCC unroll 16")
#endif

// The kernels of one type: inlined where the type is looked up, all of them would be one function that is too large for GCC to
// inline what they are made of.
#define KVEDGE_APART __attribute__((noinline))

// Asks for the line of cache at p, which need not be readable.
#define KVEDGE_PREFETCH(p) __builtin_prefetch(p, 0, 3)

// A value that is used several times: loading it with every use would cost as many loads as there are products.
#define KVEDGE_IN_REGISTER(x, constraint) __asm__("" : "+" constraint(x))

namespace {

// a * b + c as vectors have it: fused where the processor can, whatever the compiler makes of products and sums.
inline float scalar_fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// The first n lanes of a vector without masks, by way of memory.
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
