// Decode: few query rows, every K and V row read once from memory. Part of kernels_impl.h, under its rules.

#pragma once

#include "kernels.h"

namespace kvedge {
namespace {

template <Type T, int M, int C> inline void dot_micro(
    const float * q, size_t ldq, const uint8_t * k, size_t stride, int32_t d, float * s, size_t lds) {
    V acc[M][C];
    for (int r = 0; r < M; r++) {
        for (int c = 0; c < C; c++) {
            acc[r][c] = V::zero();
        }
    }
    int32_t i = 0;
    for (; i + V::W <= d; i += V::W) {
        V kv[C];
        for (int c = 0; c < C; c++) {
            kv[c] = load_as<T>(k + c * stride, (size_t) i);
        }
        for (int r = 0; r < M; r++) {
            const V qv = V::load(q + r * ldq + i);
            for (int c = 0; c < C; c++) {
                acc[r][c] = V::fma(qv, kv[c], acc[r][c]);
            }
        }
    }
    for (int r = 0; r < M; r++) {
        float * row = s + r * lds;
        if constexpr (C % 4 == 0) {
            for (int c = 0; c < C; c += 4) {
                V::hsum4(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3], row + c);
            }
        } else {
            for (int c = 0; c < C; c++) {
                row[c] = acc[r][c].hsum();
            }
        }
        for (int32_t j = i; j < d; j++) {
            for (int c = 0; c < C; c++) {
                row[c] += q[r * ldq + j] * scalar_load(T, k + c * stride, (size_t) j);
            }
        }
    }
}

template <Type T, int M> inline void dot_rows(
    const float * q, size_t ldq, const uint8_t * k, size_t stride, int32_t n, int32_t d, float * s, size_t lds) {
    constexpr int C = M == 1 ? 8 : 4;
    int32_t       c = 0;
    for (; c + C <= n; c += C) {
        dot_micro<T, M, C>(q, ldq, k + c * stride, stride, d, s + c, lds);
    }
    for (; c < n; c++) {
        dot_micro<T, M, 1>(q, ldq, k + c * stride, stride, d, s + c, lds);
    }
}

template <Type T> void rows_dot_t(
    const float * q, size_t ldq, int32_t m, const uint8_t * k, size_t stride, int32_t n, int32_t d, float * s, size_t lds) {
    constexpr int32_t B = 32;  // rows of K that stay in L1 while every group of query rows passes over them
    for (int32_t c = 0; c < n; c += B) {
        const int32_t   w = n - c < B ? n - c : B;
        const uint8_t * kc = k + (size_t) c * stride;
        int32_t         r = 0;
        for (; r + 4 <= m; r += 4) {
            dot_rows<T, 4>(q + r * ldq, ldq, kc, stride, w, d, s + r * lds + c, lds);
        }
        for (; r + 2 <= m; r += 2) {
            dot_rows<T, 2>(q + r * ldq, ldq, kc, stride, w, d, s + r * lds + c, lds);
        }
        for (; r < m; r++) {
            dot_rows<T, 1>(q + r * ldq, ldq, kc, stride, w, d, s + r * lds + c, lds);
        }
    }
}

void k_rows_dot(const float * q, size_t ldq, int32_t m, Rows k, int32_t n, int32_t d, float * s, size_t lds) {
    switch (k.type) {
        case Type::f16:  rows_dot_t<Type::f16>(q, ldq, m, k.data, k.stride, n, d, s, lds); break;
        case Type::bf16: rows_dot_t<Type::bf16>(q, ldq, m, k.data, k.stride, n, d, s, lds); break;
        case Type::f32:  rows_dot_t<Type::f32>(q, ldq, m, k.data, k.stride, n, d, s, lds); break;
    }
}

template <Type T, int M, int D> inline void axpy_micro(
    const float * p, size_t ldp, const uint8_t * v, size_t stride, int32_t n, float * o, size_t ldo) {
    V acc[M][D];
    for (int r = 0; r < M; r++) {
        for (int j = 0; j < D; j++) {
            acc[r][j] = V::load(o + r * ldo + j * V::W);
        }
    }
    for (int32_t c = 0; c < n; c++) {
        V a[M];
        for (int r = 0; r < M; r++) {
            a[r] = V::set1(p[r * ldp + c]);
        }
        for (int j = 0; j < D; j++) {
            const V b = load_as<T>(v + c * stride, (size_t) j * V::W);
            for (int r = 0; r < M; r++) {
                acc[r][j] = V::fma(a[r], b, acc[r][j]);
            }
        }
    }
    for (int r = 0; r < M; r++) {
        for (int j = 0; j < D; j++) {
            acc[r][j].store(o + r * ldo + j * V::W);
        }
    }
}

template <Type T, int D> inline void axpy_rows(
    const float * p, size_t ldp, int32_t m, const uint8_t * v, size_t stride, int32_t n, float * o, size_t ldo) {
    int32_t r = 0;
    if constexpr (D % 2 == 0) {  // twice the rows on half the columns: v is widened half as often
        for (; r + 4 <= m; r += 4) {
            for (int half = 0; half < 2; half++) {
                const size_t at = (size_t) half * (D / 2) * V::W;
                axpy_micro<T, 4, D / 2>(p + r * ldp, ldp, v + at * type_size(T), stride, n, o + r * ldo + at, ldo);
            }
        }
    }
    for (; r + 2 <= m; r += 2) {
        axpy_micro<T, 2, D>(p + r * ldp, ldp, v, stride, n, o + r * ldo, ldo);
    }
    for (; r < m; r++) {
        axpy_micro<T, 1, D>(p + r * ldp, ldp, v, stride, n, o + r * ldo, ldo);
    }
}

template <Type T> void rows_axpy_t(
    const float * p, size_t ldp, int32_t m, const uint8_t * v, size_t stride, int32_t n, int32_t d, float * o, size_t ldo) {
    constexpr int32_t B = 32;
    for (int32_t c = 0; c < n; c += B) {
        const int32_t   w  = n - c < B ? n - c : B;
        const uint8_t * vc = v + (size_t) c * stride;
        int32_t         i  = 0;
        for (; i + V::AD * V::W <= d; i += V::AD * V::W) {
            axpy_rows<T, V::AD>(p + c, ldp, m, vc + (size_t) i * type_size(T), stride, w, o + i, ldo);
        }
        for (; i + V::W <= d; i += V::W) {
            axpy_rows<T, 1>(p + c, ldp, m, vc + (size_t) i * type_size(T), stride, w, o + i, ldo);
        }
        for (; i < d; i++) {
            for (int32_t r = 0; r < m; r++) {
                for (int32_t j = 0; j < w; j++) {
                    o[r * ldo + i] += p[r * ldp + c + j] * scalar_load(T, vc + j * stride, (size_t) i);
                }
            }
        }
    }
}

void k_rows_axpy(const float * p, size_t ldp, int32_t m, Rows v, int32_t n, int32_t d, float * o, size_t ldo) {
    switch (v.type) {
        case Type::f16:  rows_axpy_t<Type::f16>(p, ldp, m, v.data, v.stride, n, d, o, ldo); break;
        case Type::bf16: rows_axpy_t<Type::bf16>(p, ldp, m, v.data, v.stride, n, d, o, ldo); break;
        case Type::f32:  rows_axpy_t<Type::f32>(p, ldp, m, v.data, v.stride, n, d, o, ldo); break;
    }
}

}  // namespace
}  // namespace kvedge
