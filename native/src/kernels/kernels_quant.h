// Reads quantised rows (kernels.h: Type). Part of kernels_impl.h, under its rules.

#pragma once

#include "kernels_numbers.h"
#include "kernels_rotate.h"

namespace kvedge {
namespace {

constexpr int32_t MAX_ROW = 512;         // largest head size
constexpr int     CV      = GROUP / V::W;  // vectors of a block's codes

// Reads the codes of a block with code() alone, for types without a faster way.
template <Type T, class X> inline void plain_codes(const uint8_t * p, X * x) {
    uint8_t codes[GROUP];
    for (int half = 0; half < GROUP; half += GROUP / 2) {
        KVEDGE_UNROLL
        for (int i = 0; i < GROUP / 2; i++) {  // with i known, shifts and masks are constants
            codes[half + i] = (uint8_t) Traits<T>::code(p, half + i);
        }
    }
    for (int j = 0; j < CV; j++) {
        x[j] = X::load_i8(codes + j * X::W);
    }
}

// Reads levels of 3-bit codes. Vectors of eight or more lanes have their own look-up.
template <Type T, class X> inline void level_codes(const uint8_t * p, X * x) {
    if constexpr (X::W >= 8) {
        X::template levels<Traits<T>>(p, x);
    } else {
        plain_codes<T>(p, x);
    }
}

// Reads the codes of a block.
template <Type T> inline void block_codes(const uint8_t * p, V * x) {
    if constexpr (Traits<T>::bits > 0) {
        V::template codes<Traits<T>::bits>(p, x);
        if constexpr (Traits<T>::zero != 0) {
            for (int j = 0; j < CV; j++) {
                x[j] = V::add(x[j], V::set1((float) -Traits<T>::zero));
            }
        }
    } else if constexpr (Traits<T>::looked_up) {
        level_codes<T>(p, x);
    } else {
        plain_codes<T>(p, x);
    }
}

template <Type T> void widen_block(const uint8_t * p, float * out) {
    V x[CV];
    block_codes<T>(p + code_offset(T), x);
    const V scale = V::set1_f16(p), minimum = has_minimum(T) ? V::set1_f16(p + 2) : V::zero();
    for (int j = 0; j < CV; j++) {
        V::fma(x[j], scale, minimum).store(out + j * V::W);
    }
}

template <Type T> void widen_blocks(Rows rows, int32_t n, int32_t d, float * out, size_t ld) {
    for (int32_t r = 0; r < n; r++) {
        for (int32_t b = 0; b < d / GROUP; b++) {
            widen_block<T>(rows.data + (size_t) r * rows.stride + (size_t) b * block_bytes(T), out + (size_t) r * ld + b * GROUP);
        }
    }
}

// Returns the codes of row r of a group that starts at p.
template <Type T> inline const uint8_t * group_codes(const uint8_t * p, int32_t d, int32_t r) {
    return p + 4 * (size_t) d + (size_t) r * (size_t) (d / GROUP) * code_bytes(T);
}

template <Type T> void widen_groups(Rows rows, int32_t n, int32_t d, float * out, size_t ld) {
    for (int32_t r = 0; r < n; r++) {
        const Rows      at    = rows.from(r);
        const uint8_t * codes = group_codes<T>(at.data, d, at.skip);
        for (int32_t i = 0; i < d; i += GROUP, codes += code_bytes(T)) {
            V x[CV];
            block_codes<T>(codes, x);
            for (int j = 0; j < CV; j++) {
                const size_t c = (size_t) (i + j * V::W);
                const V      scale = V::template load16<Type::f16>(at.data + 2 * c);
                const V      minimum = V::template load16<Type::f16>(at.data + 2 * ((size_t) d + c));
                V::fma(x[j], scale, minimum).store(out + (size_t) r * ld + c);
            }
        }
    }
}

template <Type T> void widen_rows(Rows rows, int32_t n, int32_t d, float * out, size_t ld) {
    if constexpr (Traits<T>::residual) {
        if (is_grouped(rows.type)) {
            return widen_groups<T>(rows, n, d, out, ld);
        }
    }
    if constexpr (is_quantised(T)) {
        widen_blocks<T>(rows, n, d, out, ld);
    } else {
        for (int32_t r = 0; r < n; r++) {
            to_f32_t<T>(rows.data + (size_t) r * rows.stride, out + (size_t) r * ld, (size_t) d);
        }
    }
}

void k_widen(Rows rows, int32_t n, int32_t d, float * out, size_t ld) {
    with_type(rows.type, [&](auto of) { widen_rows<of.value>(rows, n, d, out, ld); });
    if (is_rotated(rows.type)) {
        k_rotate({ out, ld }, n, d, rotation(rows.type, d));
    }
}

}  // namespace
}  // namespace kvedge
