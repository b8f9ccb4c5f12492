// Products of many query rows with packed keys, and of weights with widened values. Part of kernels_impl.h, under its rules.

#pragma once

#include "kernels_decode.h"
#include "kernels_quant.h"

namespace kvedge {
namespace {

constexpr int NR = 2 * V::W;

// Makes row c of NR rows [..][d] column c of the panel.
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

constexpr int32_t PACK_STEPS = 4, WIDEN_STEPS = 2;  // steps of a PacedPrefetch, for eight columns of a panel, and for a row

// Bytes that are needed next; NULL: none.
struct PrefetchRange {
    const uint8_t * at;
    size_t          bytes;

    static PrefetchRange rows(const uint8_t * next, int32_t first, int32_t n, size_t stride) {
        return { later(next, (size_t) first * stride), (size_t) n * stride };
    }
};

// Prefetches the coming bytes in n equal steps, some cache lines several times. idle: bytes in cache, used if nothing is coming.
struct PacedPrefetch {
    const uint8_t * at;
    size_t          step;

    PacedPrefetch(PrefetchRange next, size_t n, const float * idle)
        : at(next.at ? next.at : (const uint8_t *) idle), step(next.at ? (next.bytes + n - 1) / n : 0) {}
    void take() {
        prefetch(at);
        at += step;
    }
    void take(int32_t n) {
        for (; n > 0; n--) {
            take();
        }
    }
};

// Packs NR rows of 16-bit numbers, d a multiple of 8. Transposing before widening takes half as many shuffles.
template <Type T, class X> inline void pack_halves(Rows k, int32_t d, float * panel, PacedPrefetch & pace) {
    alignas(64) uint8_t columns[8 * NR * 2];
    for (int32_t i = 0; i < d; i += 8, panel += 8 * NR) {
        pace.take(PACK_STEPS);
        X::turn_halves(k.data + 2 * (size_t) i, k.stride, columns);
        KVEDGE_UNROLL
        for (int c = 0; c < 16; c++) {
            X::template load16<T>(columns + c * X::W * 2).store(panel + c * X::W);
        }
    }
}

// Packs a panel with pack_halves, if the vectors and the type allow that. Returns whether it did.
template <class X> inline bool pack_turned(Rows k, int32_t d, float * panel, PacedPrefetch & pace) {
    if constexpr (X::TURNS_HALVES) {
        if (d % 8 == 0 && (k.type == Type::f16 || k.type == Type::bf16)) {
            (k.type == Type::f16 ? pack_halves<Type::f16, X> : pack_halves<Type::bf16, X>)(k, d, panel, pace);
            return true;
        }
    }
    return false;
}

// Packs one panel of n <= NR rows.
inline void pack_panel(Rows k, int32_t n, int32_t d, float * panel, PacedPrefetch & pace) {
    if (n == NR && pack_turned<V>(k, d, panel, pace)) {
        return;
    }
    float rows[NR * MAX_ROW];
    k_widen(k, n, d, rows, (size_t) d);
    for (int32_t i = n * d; i < NR * d; i++) {
        rows[i] = 0.0f;
    }
    transpose_panel(rows, d, panel);
}

void k_pack(Rows k, int32_t n, int32_t d, float * out) {
    for (int32_t c = 0; c < n; c += NR) {
        PacedPrefetch none({}, 1, out);
        pack_panel(k.from(c), n - c < NR ? n - c : NR, d, out + (size_t) c * d, none);
    }
}

// Adds the products of column i of M query rows and of a panel to acc.
template <int M> inline void panel_step(FloatIn q, const float * panel, int32_t i, V (&acc)[M][2], PacedPrefetch & pace) {
    pace.take();
    const V b0 = V::load(panel + (size_t) i * NR);
    const V b1 = V::load(panel + (size_t) i * NR + V::W);
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        const V a = V::set1(q.row(r)[i]).kept();
        acc[r][0] = V::fma(a, b0, acc[r][0]);
        acc[r][1] = V::fma(a, b1, acc[r][1]);
    }
}

// Writes the products of M query rows with a panel to acc[r], with the bits of dot_micro. dot_micro has V::W sums for each product, each of
// every V::W-th column; V::hsum4 adds these sums pair by pair in the order of V::LANES. Here a sum waits for its pair, one on each level.
template <int M> inline void sum_by_lanes(FloatIn q, const float * panel, int32_t d, V (&acc)[M][2], PacedPrefetch & pace) {
    constexpr int     LEVELS = V::W == 16 ? 4 : V::W == 8 ? 3 : 2;
    const int32_t     whole  = d / V::W * V::W;
    alignas(64) float waiting[LEVELS][M][NR];
    for (int t = 0; t < V::W; t++) {
        KVEDGE_UNROLL
        for (int r = 0; r < M; r++) {
            acc[r][0] = acc[r][1] = V::zero();
        }
        for (int32_t i = V::LANES[t]; i < whole; i += V::W) {
            panel_step<M>(q, panel, i, acc, pace);
        }
        int level = 0;
        for (; (t >> level & 1) != 0; level++) {
            KVEDGE_UNROLL
            for (int r = 0; r < M; r++) {
                acc[r][0] = V::add(V::load(waiting[level][r]), acc[r][0]);
                acc[r][1] = V::add(V::load(waiting[level][r] + V::W), acc[r][1]);
            }
        }
        KVEDGE_UNROLL
        for (int r = 0; r < M && t < V::W - 1; r++) {
            acc[r][0].store(waiting[level][r]);
            acc[r][1].store(waiting[level][r] + V::W);
        }
    }
    for (int32_t i = whole; i < d; i++) {
        panel_step<M>(q, panel, i, acc, pace);
    }
}

// LANES: with the bits of dot_micro; else column after column, which is faster.
template <int M, bool LANES> inline void qk_micro(FloatIn q, const float * panel, int32_t d, FloatOut s, int32_t w, PacedPrefetch & pace) {
    V acc[M][2];
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        acc[r][0] = acc[r][1] = V::zero();
    }
    if constexpr (LANES) {
        sum_by_lanes<M>(q, panel, d, acc, pace);
    } else {
        for (int32_t i = 0; i < d; i++) {
            panel_step<M>(q, panel, i, acc, pace);
        }
    }
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        if (w == NR) {
            acc[r][0].store(s.row(r));
            acc[r][1].store(s.row(r) + V::W);
        } else {
            acc[r][0].store_first(s.row(r), (size_t) (w < V::W ? w : V::W));
            if (w > V::W) {
                acc[r][1].store_first(s.row(r) + V::W, (size_t) (w - V::W));
            }
        }
    }
}

// Writes s[r][c] for the first w columns of a panel.
template <bool LANES> void panel_dot(FloatIn q, int32_t m, const float * panel, int32_t d, FloatOut s, int32_t w, PacedPrefetch & pace) {
    split_rows<V::MR>(m, [&](int32_t r, auto rows) { qk_micro<decltype(rows)::value, LANES>(q.at(r), panel, d, s.at(r), w, pace); });
}

void k_gemm_qk(FloatIn q, int32_t m, const float * packed, int32_t n, int32_t d, FloatOut s) {
    PacedPrefetch none({}, 1, packed);
    for (int32_t c = 0; c < n; c += NR) {
        panel_dot<false>(q, m, packed + (size_t) c * d, d, s.at(0, c), NR, none);
    }
}

// Packs keys of any type, one panel at a time.
void many_rows_dot(FloatIn q, int32_t m, Rows k, int32_t n, int32_t d, FloatOut s, const uint8_t * next) {
    alignas(64) float panel[NR * MAX_ROW];
    for (int32_t c = 0; c < n; c += NR) {
        const int32_t w = n - c < NR ? n - c : NR;
        const int32_t steps = (m + V::MR - 1) / V::MR * d + d / 8 * PACK_STEPS;
        PacedPrefetch pace(PrefetchRange::rows(next, c, w, k.stride), (size_t) steps, panel);
        pack_panel(k.from(c), w, d, panel, pace);
        panel_dot<true>(q, m, panel, d, s.at(0, c), w, pace);
    }
}

// Vectors of columns that are worked on together.
constexpr int PV_COLUMNS = columns(MOST_ROWS, V::AD);

constexpr int32_t pv_steps(int32_t m, int32_t d) {  // steps of a PacedPrefetch, for a row of values
    return (m + MOST_ROWS - 1) / MOST_ROWS * ((d + PV_COLUMNS * V::W - 1) / (PV_COLUMNS * V::W));
}

// o[r] += p[r] v for n rows v [n][v.ld] and d columns, rounded up to whole vectors.
inline void add_weighted(FloatIn p, int32_t m, int32_t n, FloatIn v, int32_t d, FloatOut o, PacedPrefetch & pace) {
    const Rows rows = { (const uint8_t *) v.data, v.ld * sizeof(float), Type::f32 };
    int32_t    i    = 0;
    each_columns<PV_COLUMNS>((d + V::W - 1) / V::W * V::W, i, [&](auto wide) {
        split_rows(m, [&](int32_t r, auto part) {
            axpy_micro<Type::f32, decltype(part)::value, decltype(wide)::value>(p.at(r), rows, i, n, o.at(r), [&](int32_t) { pace.take(); });
        });
    });
}

void k_gemm_pv(FloatIn p, int32_t m, int32_t n, FloatIn v, int32_t d, float * o) {
    PacedPrefetch none({}, 1, v.data);
    add_weighted(p, m, n, v, d, { o, v.ld }, none);
}

// Widens values of any type into the first-level cache, a few rows at a time.
void many_rows_axpy(FloatIn p, int32_t m, Rows v, int32_t n, int32_t d, FloatOut o, const uint8_t * next) {
    constexpr int32_t AT_ONCE = 16;  // rows that are widened between two steps
    alignas(64) float wide[8 * MAX_ROW];
    const auto        ld   = (size_t) pad16(d);
    const int32_t     most = 8 * MAX_ROW / (int32_t) ld;
    for (int32_t c = 0; c < n; c += most) {
        const int32_t w = n - c < most ? n - c : most;
        PacedPrefetch pace(PrefetchRange::rows(next, c, w, v.stride), (size_t) w * (size_t) (pv_steps(m, d) + WIDEN_STEPS), wide);
        for (int32_t r = 0; r < w; r += AT_ONCE) {
            pace.take(AT_ONCE * WIDEN_STEPS);
            k_widen(v.from(c + r), w - r < AT_ONCE ? w - r : AT_ONCE, d, wide + (size_t) r * ld, ld);
        }
        for (int32_t r = 0; r < w; r++) {
            for (size_t i = (size_t) d; i < ld; i++) {
                wide[(size_t) r * ld + i] = 0.0f;
            }
        }
        add_weighted(p.at(0, c), m, w, { wide, ld }, d, o, pace);
    }
}

}  // namespace
}  // namespace kvedge
