// Converts plain stored numbers (kernels.h: Type) to float32 and back. Part of kernels_impl.h, under its rules.

#pragma once

#include "kernels.h"
#include "kernels_compiler.h"

namespace kvedge {
namespace {

inline float scalar_from_f16(uint16_t h) {
    const uint32_t sign = (uint32_t) (h & 0x8000) << 16;
    uint32_t       exp  = (h >> 10) & 0x1f;
    uint32_t       man  = h & 0x3ff;
    uint32_t       bits;
    if (exp == 0x1f) {
        bits = sign | 0x7f800000 | (man << 13);
    } else if (exp != 0) {
        bits = sign | ((exp + 112) << 23) | (man << 13);
    } else if (man == 0) {
        bits = sign;
    } else {
        exp = 113;
        while (!(man & 0x400)) {
            man <<= 1;
            exp--;
        }
        bits = sign | (exp << 23) | ((man & 0x3ff) << 13);
    }
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}

inline uint16_t scalar_to_f16(float f) {
    uint32_t x;
    __builtin_memcpy(&x, &f, 4);
    const uint32_t sign = (x >> 16) & 0x8000;
    x &= 0x7fffffff;
    if (x >= 0x47800000) {  // too large, infinite or NaN
        return (uint16_t) (sign | (x > 0x7f800000 ? 0x7e00 : 0x7c00));
    }
    if (x < 0x38800000) {  // subnormal in half precision
        const float scaled = [&] { float a; __builtin_memcpy(&a, &x, 4); return a * 16777216.0f; }();  // in units of 2^-24
        uint32_t    n      = (uint32_t) scaled;
        const float rest   = scaled - (float) n;
        n += rest > 0.5f || (rest == 0.5f && (n & 1));
        return (uint16_t) (sign | n);
    }
    x += 0xfff + ((x >> 13) & 1);
    return (uint16_t) (sign | ((x - 0x38000000) >> 13));
}

inline float scalar_from_bf16(uint16_t h) {
    const uint32_t bits = (uint32_t) h << 16;
    float          f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}

inline uint16_t scalar_to_bf16(float f) {
    uint32_t x;
    __builtin_memcpy(&x, &f, 4);
    if ((x & 0x7fffffff) > 0x7f800000) {
        return (uint16_t) ((x >> 16) | 0x40);
    }
    return (uint16_t) ((x + 0x7fff + ((x >> 16) & 1)) >> 16);
}

inline float scalar_load(Type t, const uint8_t * p, size_t i) {
    if (t == Type::f32) {
        float f;
        __builtin_memcpy(&f, p + 4 * i, 4);
        return f;
    }
    uint16_t h;
    __builtin_memcpy(&h, p + 2 * i, 2);
    return t == Type::f16 ? scalar_from_f16(h) : scalar_from_bf16(h);
}

// Whether rows of a type are read V::W values at a time: plain numbers, and codes of one byte without a minimum.
constexpr bool in_vectors(Type t) { return !is_quantised(t) || (format(t).bits == 8 && !has_minimum(t)); }

// Loads values i to i + V::W - 1 of a row of a type in_vectors().
template <Type T> inline V load_as(const uint8_t * p, size_t i) {
    if constexpr (is_quantised(T)) {
        const uint8_t * block = p + i / GROUP * block_bytes(T);
        return V::mul(V::load_i8(block + 2 + i % GROUP), V::set1_f16(block));
    } else if constexpr (T == Type::f32) {
        return V::load((const float *) p + i);
    } else {
        return V::template load16<T>(p + 2 * i);
    }
}

// Rows that are widened one after another often lie so in memory, but too far apart in time for the processor to notice.
constexpr size_t WIDEN_AHEAD = 2048;  // bytes

template <Type T> inline void to_f32_t(const uint8_t * src, float * dst, size_t n) {
    size_t i = 0;
    for (; i + 4 * V::W <= n; i += 4 * V::W) {
        KVEDGE_UNROLL
        for (size_t j = i; j < i + 4 * V::W; j += V::W) {
            KVEDGE_PREFETCH(src + j * type_size(T) + WIDEN_AHEAD);
            load_as<T>(src, j).store(dst + j);
        }
    }
    for (; i + V::W <= n; i += V::W) {
        KVEDGE_PREFETCH(src + i * type_size(T) + WIDEN_AHEAD);
        load_as<T>(src, i).store(dst + i);
    }
    for (; i < n; i++) {
        dst[i] = scalar_load(T, src, i);
    }
}

void k_to_f32(Type type, const void * src, float * dst, size_t n) {
    switch (type) {
        case Type::f16:  to_f32_t<Type::f16>((const uint8_t *) src, dst, n); break;
        case Type::bf16: to_f32_t<Type::bf16>((const uint8_t *) src, dst, n); break;
        case Type::f32:  __builtin_memcpy(dst, src, 4 * n); break;
        default:         break;
    }
}

void k_from_f32(Type type, const float * src, void * dst, size_t n) {
    if (type == Type::f32) {
        __builtin_memcpy(dst, src, 4 * n);
        return;
    }
    uint8_t * out = (uint8_t *) dst;
    size_t    i   = 0;
    if (type == Type::f16) {
        for (; i + V::W <= n; i += V::W) {
            V::load(src + i).store_f16(out + 2 * i);
        }
    }
    for (; i < n; i++) {
        const uint16_t h = type == Type::f16 ? scalar_to_f16(src[i]) : scalar_to_bf16(src[i]);
        __builtin_memcpy(out + 2 * i, &h, 2);
    }
}

}  // namespace
}  // namespace kvedge
