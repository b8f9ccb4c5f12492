// Decode over quantised rows. One query row multiplies the codes while they are widened. Several query rows share one widening: in
// registers if vectors can read the rows (kernels_decode.h), else in the first-level cache.
// Part of kernels_impl.h, under its rules.

#pragma once

#include "kernels_gemm.h"

namespace kvedge {
namespace {

// Prefetches n bytes that are needed next; NULL: none.
inline void fetch(const uint8_t * next, size_t n) {
    for (size_t at = 0; next && at < n; at += LINE) {
        prefetch(next + at);
    }
}

template <int C> inline void store_sums(const V (&acc)[C], float * s) {
    if constexpr (C == 4) {
        V::hsum4(acc[0], acc[1], acc[2], acc[3], s);
    } else {
        s[0] = acc[0].hsum();
    }
}

// s[c] = q . k[c] for C rows of blocks.
template <Type T, int C> inline void dot_blocks(const float * q, const uint8_t * k, size_t stride, int32_t d, float * s) {
    V acc[C];
    KVEDGE_UNROLL
    for (int c = 0; c < C; c++) {
        acc[c] = V::zero();
    }
    for (int32_t i = 0; i < d; i += GROUP, q += GROUP, k += block_bytes(T)) {
        KVEDGE_UNROLL
        for (int c = 0; c < C; c++) {
            const uint8_t * p = k + (size_t) c * stride;
            V               x[CV];
            block_codes<T>(p + 2, x);
            V sum = V::mul(x[0], V::load(q));
            KVEDGE_UNROLL
            for (int j = 1; j < CV; j++) {
                sum = V::fma(x[j], V::load(q + j * V::W), sum);
            }
            acc[c] = V::fma(sum, V::set1_f16(p), acc[c]);
        }
    }
    store_sums(acc, s);
}

template <Type T> KVEDGE_APART void rows_dot_blocks(const float * q, Rows k, int32_t n, int32_t d, float * s, const uint8_t * next) {
    int32_t c = 0;
    for (; c + 4 <= n; c += 4) {
        fetch(later(next, (size_t) c * k.stride), 4 * k.stride);
        dot_blocks<T, 4>(q, k.data + (size_t) c * k.stride, k.stride, d, s + c);
    }
    for (; c < n; c++) {
        dot_blocks<T, 1>(q, k.data + (size_t) c * k.stride, k.stride, d, s + c);
    }
}

// s[c] = base + q . codes[c] for C rows of a group; q is scaled by the channels' scales already.
template <Type T, int C> inline void dot_codes(const float * q, const uint8_t * codes, int32_t d, float base, float * s) {
    const size_t stride = (size_t) (d / GROUP) * code_bytes(T);
    V            acc[C];
    KVEDGE_UNROLL
    for (int c = 0; c < C; c++) {
        acc[c] = V::zero();
    }
    for (int32_t i = 0; i < d; i += GROUP, q += GROUP, codes += code_bytes(T)) {
        KVEDGE_UNROLL
        for (int c = 0; c < C; c++) {
            V x[CV];
            block_codes<T>(codes + (size_t) c * stride, x);
            KVEDGE_UNROLL
            for (int j = 0; j < CV; j++) {
                acc[c] = V::fma(x[j], V::load(q + j * V::W), acc[c]);
            }
        }
    }
    store_sums(acc, s);
    KVEDGE_UNROLL
    for (int c = 0; c < C; c++) {
        s[c] += base;
    }
}

template <Type T> KVEDGE_APART void rows_dot_groups(const float * q, Rows k, int32_t n, int32_t d, float * s, const uint8_t * next) {
    float scaled[MAX_ROW];
    while (n > 0) {
        const int32_t w   = n < GROUP - k.skip ? n : GROUP - k.skip;
        V             sum = V::zero();
        for (int32_t i = 0; i < d; i += V::W) {
            const V x = V::load(q + i);
            V::mul(x, V::template load16<Type::f16>(k.data + 2 * (size_t) i)).store(scaled + i);
            sum = V::fma(x, V::template load16<Type::f16>(k.data + 2 * (size_t) (d + i)), sum);
        }
        const float base = sum.hsum();
        int32_t     c    = 0;
        for (; c + 4 <= w; c += 4) {
            fetch(later(next, (size_t) c * k.stride), 4 * k.stride);
            dot_codes<T, 4>(scaled, group_codes<T>(k.data, d, k.skip + c), d, base, s + c);
        }
        for (; c < w; c++) {
            dot_codes<T, 1>(scaled, group_codes<T>(k.data, d, k.skip + c), d, base, s + c);
        }
        k    = k.from(w);
        next = later(next, (size_t) w * k.stride);
        n -= w;
        s += w;
    }
}

// o[i] += sum_c p[c] * v[c][i] for B blocks of each row.
template <Type T, int B> inline void axpy_blocks(
    const float * p, const uint8_t * v, size_t stride, int32_t n, float * o, const uint8_t * next) {
    V acc[B][CV], low[B];
    KVEDGE_UNROLL
    for (int b = 0; b < B; b++) {
        low[b] = V::zero();
        KVEDGE_UNROLL
        for (int j = 0; j < CV; j++) {
            acc[b][j] = V::load(o + b * GROUP + j * V::W);
        }
    }
    for (int32_t c = 0; c < n; c++, v += stride) {
        fetch(later(next, (size_t) c * stride), stride);
        const V a = V::set1(p[c]);
        KVEDGE_UNROLL
        for (int b = 0; b < B; b++) {
            const uint8_t * block = v + (size_t) b * block_bytes(T);
            const V         scale = V::mul(a, V::set1_f16(block));
            if constexpr (has_minimum(T)) {
                low[b] = V::fma(a, V::set1_f16(block + 2), low[b]);
            }
            V x[CV];
            block_codes<T>(block + code_offset(T), x);
            KVEDGE_UNROLL
            for (int j = 0; j < CV; j++) {
                acc[b][j] = V::fma(scale, x[j], acc[b][j]);
            }
        }
    }
    KVEDGE_UNROLL
    for (int b = 0; b < B; b++) {
        KVEDGE_UNROLL
        for (int j = 0; j < CV; j++) {
            V::add(acc[b][j], low[b]).store(o + b * GROUP + j * V::W);
        }
    }
}

template <Type T> KVEDGE_APART void rows_axpy_blocks(const float * p, Rows v, int32_t n, int32_t d, float * o, const uint8_t * next) {
    constexpr int B = V::W == 16 ? 4 : V::W == 8 ? 2 : 1;  // as many as leave registers for codes and scales
    int32_t       i = 0;
    for (; i + B * GROUP <= d; i += B * GROUP) {
        axpy_blocks<T, B>(p, v.data + (size_t) (i / GROUP) * block_bytes(T), v.stride, n, o + i, i == 0 ? next : nullptr);
    }
    for (; i < d; i += GROUP) {
        axpy_blocks<T, 1>(p, v.data + (size_t) (i / GROUP) * block_bytes(T), v.stride, n, o + i, i == 0 ? next : nullptr);
    }
}

// Widens a few rows at a time into the first-level cache, and calls use() for them.
template <class F> inline void each_widened(Rows rows, int32_t n, int32_t d, const uint8_t * next, const F & use) {
    float         buf[8 * MAX_ROW];
    const int32_t most = 8 * MAX_ROW / d;
    for (int32_t c = 0; c < n; c += most) {
        const int32_t w = n - c < most ? n - c : most;
        fetch(later(next, (size_t) c * rows.stride), (size_t) w * rows.stride);
        k_widen(rows.from(c), w, d, buf, (size_t) d);
        use(Rows{ (const uint8_t *) buf, (size_t) d * sizeof(float), Type::f32 }, c, w);
    }
}

void wide_rows_dot(FloatIn q, int32_t m, Rows k, int32_t n, int32_t d, FloatOut s, const uint8_t * next) {
    each_widened(k, n, d, next, [&](Rows wide, int32_t c, int32_t w) {
        rows_dot_t<Type::f32>(q, m, wide, w, d, s.at(0, c), nullptr);
    });
}

void wide_rows_axpy(FloatIn p, int32_t m, Rows v, int32_t n, int32_t d, FloatOut o, const uint8_t * next) {
    each_widened(v, n, d, next, [&](Rows wide, int32_t c, int32_t w) {
        rows_axpy_t<Type::f32>(p.at(0, c), m, wide, w, d, o, nullptr);
    });
}

template <Type T> void any_rows_dot(FloatIn q, int32_t m, Rows k, int32_t n, int32_t d, FloatOut s, const uint8_t * next) {
    if constexpr (Traits<T>::residual) {
        if (m == 1 && is_grouped(k.type)) {
            return rows_dot_groups<T>(q.data, k, n, d, s.data, next);
        }
    } else if constexpr (is_quantised(T) && !has_minimum(T)) {
        if (m == 1) {
            return rows_dot_blocks<T>(q.data, k, n, d, s.data, next);
        }
    }
    if constexpr (in_vectors(T)) {
        rows_dot_t<T>(q, m, k, n, d, s, next);
    } else {
        wide_rows_dot(q, m, k, n, d, s, next);
    }
}

template <Type T> void any_rows_axpy(FloatIn p, int32_t m, Rows v, int32_t n, int32_t d, FloatOut o, const uint8_t * next) {
    if constexpr (is_quantised(T)) {
        if (m == 1 && !is_grouped(v.type)) {
            return rows_axpy_blocks<T>(p.data, v, n, d, o.data, next);
        }
    }
    if constexpr (in_vectors(T)) {
        rows_axpy_t<T>(p, m, v, n, d, o, next);
    } else {
        wide_rows_axpy(p, m, v, n, d, o, next);
    }
}

// Whether m query rows are enough to pack or widen n rows for them. A single panel needs twice as many query rows.
inline bool are_many(int32_t m, int32_t n, Type type) {
    return is_quantised(type) ? m > MOST_ROWS : m > V::FEW && (n > NR || m / 2 > V::FEW);
}

void k_any_rows_dot(FloatIn q, int32_t m, Rows k, int32_t n, int32_t d, FloatOut s, const uint8_t * next) {
    if (are_many(m, n, k.type)) {
        return many_rows_dot(q, m, k, n, d, s, next);
    }
    with_type(k.type, [&](auto of) { any_rows_dot<of.value>(q, m, k, n, d, s, next); });
}

void k_any_rows_axpy(FloatIn p, int32_t m, Rows v, int32_t n, int32_t d, FloatOut o, const uint8_t * next) {
    if (are_many(m, n, v.type)) {
        return many_rows_axpy(p, m, v, n, d, o, next);
    }
    with_type(v.type, [&](auto of) { any_rows_axpy<of.value>(p, m, v, n, d, o, next); });
}

}  // namespace
}  // namespace kvedge
