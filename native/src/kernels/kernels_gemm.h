// Prefill: many query rows against packed keys, and their weights against widened values. Part of kernels_impl.h, under its
// rules.

#pragma once

#include "kernels_decode.h"
#include "kernels_quant.h"

namespace kvedge {
namespace {

constexpr int NR = 2 * V::W;

// Row c of NR rows [..][d] becomes column c of the panel.
inline void transpose_panel(const float * rows, int32_t d, float * panel) {
    int32_t i = 0;
    for (; i + V::W <= d; i += V::W) {
        for (int32_t c = 0; c < NR; c += V::W) {
            V x[V::W];
            KVEDGE_UNROLL
            for (int32_t j = 0; j < V::W; j++) {
                x[j] = V::load(rows + (size_t) (c + j) * (size_t) d + i);
            }
            V::transpose(x);
            KVEDGE_UNROLL
            for (int32_t j = 0; j < V::W; j++) {
                x[j].store(panel + (size_t) (i + j) * NR + c);
            }
        }
    }
    for (; i < d; i++) {
        for (int32_t c = 0; c < NR; c++) {
            panel[(size_t) i * NR + c] = rows[(size_t) c * (size_t) d + i];
        }
    }
}

void k_pack(Rows k, int32_t n, int32_t d, float * out) {
    float rows[NR * MAX_ROW];
    for (int32_t c = 0; c < n; c += NR) {
        const int32_t w = n - c < NR ? n - c : NR;
        k_widen(k.from(c), w, d, rows, (size_t) d);
        for (int32_t i = w * d; i < NR * d; i++) {
            rows[i] = 0.0f;
        }
        transpose_panel(rows, d, out + (size_t) c * d);
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

void k_gemm_qk(FloatIn q, int32_t m, const float * packed, int32_t n, int32_t d, FloatOut s) {
    for (int32_t c0 = 0; c0 < n; c0 += NR) {
        const float * panel = packed + (size_t) c0 * d;
        int32_t       r     = 0;
        for (; r + V::MR <= m; r += V::MR) {
            qk_micro<V::MR>(q.row(r), q.ld, panel, d, s.row(r) + c0, s.ld);
        }
        for (; r + 4 <= m; r += 4) {
            qk_micro<4>(q.row(r), q.ld, panel, d, s.row(r) + c0, s.ld);
        }
        for (; r < m; r++) {
            qk_micro<1>(q.row(r), q.ld, panel, d, s.row(r) + c0, s.ld);
        }
    }
}

template <int D> void pv_columns(FloatIn p, int32_t m, int32_t n, FloatIn v, float * o) {
    const Rows rows = { (const uint8_t *) v.data, v.ld * sizeof(float), Type::f32 };
    int32_t    r    = 0;
    for (; r + V::PR <= m; r += V::PR) {
        axpy_micro<Type::f32, V::PR, D>(p.at(r), rows, 0, n, { o + r * v.ld, v.ld }, nullptr);
    }
    for (; r < m; r++) {
        axpy_micro<Type::f32, 1, D>(p.at(r), rows, 0, n, { o + r * v.ld, v.ld }, nullptr);
    }
}

void k_gemm_pv(FloatIn p, int32_t m, int32_t n, FloatIn v, int32_t d, float * o) {
    int32_t i = 0;
    for (; i + V::PD * V::W <= (int32_t) v.ld && i < d; i += V::PD * V::W) {
        pv_columns<V::PD>(p, m, n, v.at(0, i), o + i);
    }
    for (; i < d; i += V::W) {
        pv_columns<1>(p, m, n, v.at(0, i), o + i);
    }
}

}  // namespace
}  // namespace kvedge
