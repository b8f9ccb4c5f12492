// The kernels, written once over a vector type V that the including file defines in its unnamed namespace:
//   V::W lanes, V::MR rows of the q k^T micro-kernel, V::PR rows of the p v one, V::ACC registers for sums; load/store/set1/
//   kept (in a register: not loaded anew for every use)/zero/fma/fnma (c - a * b)/add/sub/mul/max/floor/pow2 (2^x of an
//   integral-valued x)/hsum/hsum4/hmax; load16(Type, ptr) widens W stored values; store16 narrows them;
//   codes(Type, ptr, x) widens GROUP codes into GROUP / W vectors; set1_f16(ptr) a stored scale into all lanes.
// Nothing here may come from std:: templates: the linker would merge copies compiled for different processors.

#pragma once

#include "kernels.h"

namespace kvedge {
namespace {

constexpr float NEG_INF = -__builtin_huge_valf();

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

template <Type T> inline V load_as(const uint8_t * p, size_t i) {
    if constexpr (T == Type::f32) {
        return V::load((const float *) p + i);
    } else {
        return V::template load16<T>(p + 2 * i);
    }
}

template <Type T> void to_f32_t(const uint8_t * src, float * dst, size_t n) {
    size_t i = 0;
    for (; i + V::W <= n; i += V::W) {
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

// ---------------------------------------------------------------------------------------------------------

}  // namespace
}  // namespace kvedge

#include "kernels_quant.h"

namespace kvedge {
namespace {

constexpr int NR = 2 * V::W;

void k_pack(Rows k, int32_t n, int32_t d, float * out) {
    for (int32_t c0 = 0; c0 < n; c0 += NR) {
        float * panel = out + (size_t) c0 * d;
        for (int32_t c = 0; c < NR; c++) {
            if (c0 + c >= n) {
                for (int32_t i = 0; i < d; i++) {
                    panel[(size_t) i * NR + c] = 0.0f;
                }
                continue;
            }
            float buf[MAX_ROW];
            k_widen(k.from(c0 + c), 1, d, buf, 0);
            for (int32_t i = 0; i < d; i++) {
                panel[(size_t) i * NR + c] = buf[i];
            }
        }
    }
}

template <int M> inline void qk_micro(const float * q, size_t ldq, const float * panel, int32_t d, float * s, size_t lds) {
    V acc[M][2];
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        acc[r][0] = V::zero();
        acc[r][1] = V::zero();
    }
    for (int32_t i = 0; i < d; i++) {
        const V b0 = V::load(panel + (size_t) i * NR);
        const V b1 = V::load(panel + (size_t) i * NR + V::W);
        KVEDGE_UNROLL
        for (int r = 0; r < M; r++) {
            const V a = V::set1(q[r * ldq + i]).kept();
            acc[r][0] = V::fma(a, b0, acc[r][0]);
            acc[r][1] = V::fma(a, b1, acc[r][1]);
        }
    }
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        acc[r][0].store(s + r * lds);
        acc[r][1].store(s + r * lds + V::W);
    }
}

void k_gemm_qk(const float * q, size_t ldq, int32_t m, const float * packed, int32_t n, int32_t d, float * s, size_t lds) {
    for (int32_t c0 = 0; c0 < n; c0 += NR) {
        const float * panel = packed + (size_t) c0 * d;
        int32_t       r     = 0;
        for (; r + V::MR <= m; r += V::MR) {
            qk_micro<V::MR>(q + r * ldq, ldq, panel, d, s + r * lds + c0, lds);
        }
        for (; r + 4 <= m; r += 4) {
            qk_micro<4>(q + r * ldq, ldq, panel, d, s + r * lds + c0, lds);
        }
        for (; r < m; r++) {
            qk_micro<1>(q + r * ldq, ldq, panel, d, s + r * lds + c0, lds);
        }
    }
}

template <int M, int D> inline void pv_micro(const float * p, size_t ldp, int32_t n, const float * v, size_t ldv, float * o) {
    V acc[M][D];
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        KVEDGE_UNROLL
        for (int j = 0; j < D; j++) {
            acc[r][j] = V::load(o + r * ldv + j * V::W);
        }
    }
    for (int32_t c = 0; c < n; c++) {
        V b[D];
        KVEDGE_UNROLL
        for (int j = 0; j < D; j++) {
            b[j] = V::load(v + c * ldv + j * V::W);
        }
        KVEDGE_UNROLL
        for (int r = 0; r < M; r++) {
            const V a = V::set1(p[r * ldp + c]).kept();
            KVEDGE_UNROLL
            for (int j = 0; j < D; j++) {
                acc[r][j] = V::fma(a, b[j], acc[r][j]);
            }
        }
    }
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        KVEDGE_UNROLL
        for (int j = 0; j < D; j++) {
            acc[r][j].store(o + r * ldv + j * V::W);
        }
    }
}

template <int D> void pv_columns(const float * p, size_t ldp, int32_t m, int32_t n, const float * v, size_t ldv, float * o) {
    int32_t r = 0;
    for (; r + V::PR <= m; r += V::PR) {
        pv_micro<V::PR, D>(p + r * ldp, ldp, n, v, ldv, o + r * ldv);
    }
    for (; r < m; r++) {
        pv_micro<1, D>(p + r * ldp, ldp, n, v, ldv, o + r * ldv);
    }
}

void k_gemm_pv(const float * p, size_t ldp, int32_t m, int32_t n, const float * v, size_t ldv, int32_t d, float * o) {
    int32_t i = 0;
    for (; i + V::PD * V::W <= (int32_t) ldv && i < d; i += V::PD * V::W) {
        pv_columns<V::PD>(p, ldp, m, n, v + i, ldv, o + i);
    }
    for (; i < d; i += V::W) {
        pv_columns<1>(p, ldp, m, n, v + i, ldv, o + i);
    }
}

// ---------------------------------------------------------------------------------------------------------

float k_max(const float * x, size_t n) {
    float  m = NEG_INF;
    size_t i = 0;
    if (n >= (size_t) V::W) {
        V a = V::load(x);
        for (i = V::W; i + V::W <= n; i += V::W) {
            a = V::max(a, V::load(x + i));
        }
        m = a.hmax();
    }
    for (; i < n; i++) {
        m = x[i] > m ? x[i] : m;
    }
    return m;
}

// exp by 2^n * 2^f with |f| <= 1/2, f's Taylor series in ln 2 to degree 7: relative error below 3e-7 for x <= 0.
inline V v_exp(V x) {
    x          = V::max(x, V::set1(-87.0f));
    const V n  = V::floor(V::fma(x, V::set1(1.44269504f), V::set1(0.5f)));
    V       r  = V::fma(n, V::set1(-0.693359375f), x);
    r          = V::fma(n, V::set1(2.12194440e-4f), r);
    V       p  = V::set1(1.0f / 5040);
    p          = V::fma(p, r, V::set1(1.0f / 720));
    p          = V::fma(p, r, V::set1(1.0f / 120));
    p          = V::fma(p, r, V::set1(1.0f / 24));
    p          = V::fma(p, r, V::set1(1.0f / 6));
    p          = V::fma(p, r, V::set1(0.5f));
    p          = V::fma(p, r, V::set1(1.0f));
    p          = V::fma(p, r, V::set1(1.0f));
    return V::mul(p, V::pow2(n));
}

float k_exp_sum(float * x, size_t n, float shift) {
    const V sh  = V::set1(-shift);
    V       sum = V::zero();
    size_t  i   = 0;
    for (; i + V::W <= n; i += V::W) {
        const V e = v_exp(V::add(V::load(x + i), sh));
        e.store(x + i);
        sum = V::add(sum, e);
    }
    float total = sum.hsum();
    if (i < n) {
        float buf[V::W];
        for (size_t j = 0; j < (size_t) V::W; j++) {
            buf[j] = i + j < n ? x[i + j] - shift : 0.0f;
        }
        v_exp(V::load(buf)).store(buf);
        for (; i < n; i++) {
            x[i] = buf[i % V::W];
            total += x[i];
        }
    }
    return total;
}

float k_exp_dot(float * x, size_t n, float shift, float * dot) {
    const V sh  = V::set1(-shift);
    V       sum = V::zero(), weighted = V::zero();
    size_t  i   = 0;
    for (; i + V::W <= n; i += V::W) {
        const V s = V::add(V::load(x + i), sh);
        const V e = v_exp(s);
        e.store(x + i);
        sum      = V::add(sum, e);
        weighted = V::fma(e, s, weighted);
    }
    float total = sum.hsum(), product = weighted.hsum();
    if (i < n) {
        float s[V::W], e[V::W];
        for (size_t j = 0; j < (size_t) V::W; j++) {
            s[j] = i + j < n ? x[i + j] - shift : 0.0f;
        }
        v_exp(V::load(s)).store(e);
        for (size_t j = 0; i < n; i++, j++) {
            x[i] = e[j];
            total += e[j];
            product += e[j] * s[j];
        }
    }
    *dot = product;
    return total;
}

void k_softcap(float * x, size_t n, float cap) {
    for (size_t i = 0; i < n; i++) {
        x[i] = cap * __builtin_tanhf(x[i] / cap);
    }
}

void k_axpy(float a, const float * x, float * y, size_t n) {
    const V va = V::set1(a);
    size_t  i  = 0;
    for (; i + V::W <= n; i += V::W) {
        V::fma(va, V::load(x + i), V::load(y + i)).store(y + i);
    }
    for (; i < n; i++) {
        y[i] += a * x[i];
    }
}

void k_add_moments(float a, const float * x, float * y, float * y2, size_t n) {
    const V va = V::set1(a);
    size_t  i  = 0;
    for (; i + V::W <= n; i += V::W) {
        const V v = V::mul(va, V::load(x + i));
        V::add(V::load(y + i), v).store(y + i);
        V::fma(v, v, V::load(y2 + i)).store(y2 + i);
    }
    for (; i < n; i++) {
        const float v = a * x[i];
        y[i] += v;
        y2[i] += v * v;
    }
}

float k_dot(const float * x, const float * y, size_t n) {
    V      acc = V::zero();
    size_t i   = 0;
    for (; i + V::W <= n; i += V::W) {
        acc = V::fma(V::load(x + i), V::load(y + i), acc);
    }
    float sum = acc.hsum();
    for (; i < n; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

}  // namespace
}  // namespace kvedge

#include "kernels_decode.h"
#include "kernels_fft.h"
#include "kernels_quant_decode.h"

namespace kvedge {
namespace {

constexpr Kernels make_table(const char * name) {
    return { name,      NR,        k_to_f32,  k_from_f32, k_widen,       k_pack, k_gemm_qk,      k_gemm_pv,       k_max,
             k_exp_sum, k_exp_dot, k_softcap, k_axpy,     k_add_moments, k_dot,  k_any_rows_dot, k_any_rows_axpy, k_band_load,
             k_band_filter };
}

}  // namespace
}  // namespace kvedge
