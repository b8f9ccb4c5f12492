// The band filter of kernels.h: an in-place mixed-radix FFT over rows of channels. Part of kernels_impl.h, under its rules.

#pragma once

#include "kernels.h"

namespace kvedge {
namespace {

// A row holds the real parts of BAND_PAIRS numbers, then their imaginary parts.
constexpr size_t ROW = 2 * (size_t) BAND_PAIRS;

struct Z {
    V re, im;
};

inline Z operator+(Z a, Z b) { return { V::add(a.re, b.re), V::add(a.im, b.im) }; }
inline Z operator-(Z a, Z b) { return { V::sub(a.re, b.re), V::sub(a.im, b.im) }; }
inline Z minus_i(Z a, Z b) { return { V::add(a.re, b.im), V::sub(a.im, b.re) }; }  // a - i b
inline Z plus_i(Z a, Z b) { return { V::sub(a.re, b.im), V::add(a.im, b.re) }; }   // a + i b
inline Z scaled(Z a, float s) {
    const V v = V::set1(s);
    return { V::mul(a.re, v), V::mul(a.im, v) };
}
inline Z add_scaled(Z a, Z b, float s) {  // a + s b
    const V v = V::set1(s);
    return { V::fma(b.re, v, a.re), V::fma(b.im, v, a.im) };
}
inline Z times(Z a, const float * w) {
    const V c = V::set1(w[0]).kept(), s = V::set1(w[1]).kept();
    return { V::fnma(a.im, s, V::mul(a.re, c)), V::fma(a.im, c, V::mul(a.re, s)) };
}

// x = DFT of x, sum over q of x[q] e^(-2 pi i p q / R)
template <int R> inline void dft(Z * x);

template <> inline void dft<2>(Z * x) {
    const Z a = x[0];
    x[0]      = a + x[1];
    x[1]      = a - x[1];
}

template <> inline void dft<3>(Z * x) {
    const Z t = x[1] + x[2], d = scaled(x[1] - x[2], 0.866025403784f), m = add_scaled(x[0], t, -0.5f);
    x[0]      = x[0] + t;
    x[1]      = minus_i(m, d);
    x[2]      = plus_i(m, d);
}

template <> inline void dft<4>(Z * x) {
    const Z a = x[0] + x[2], b = x[0] - x[2], c = x[1] + x[3], d = x[1] - x[3];
    x[0]      = a + c;
    x[1]      = minus_i(b, d);
    x[2]      = a - c;
    x[3]      = plus_i(b, d);
}

template <> inline void dft<5>(Z * x) {
    constexpr float C1 = 0.309016994375f, C2 = -0.809016994375f, S1 = 0.951056516295f, S2 = 0.587785252292f;
    const Z         t1 = x[1] + x[4], t2 = x[2] + x[3], d1 = x[1] - x[4], d2 = x[2] - x[3];
    const Z         m1 = add_scaled(add_scaled(x[0], t1, C1), t2, C2), m2 = add_scaled(add_scaled(x[0], t1, C2), t2, C1);
    const Z         n1 = add_scaled(scaled(d1, S1), d2, S2), n2 = add_scaled(scaled(d1, S2), d2, -S1);
    x[0]               = x[0] + t1 + t2;
    x[1]               = minus_i(m1, n1);
    x[2]               = minus_i(m2, n2);
    x[3]               = plus_i(m2, n2);
    x[4]               = plus_i(m1, n1);
}

template <> inline void dft<8>(Z * x) {
    constexpr float H    = 0.707106781187f;
    Z               e[4] = { x[0], x[2], x[4], x[6] }, o[4] = { x[1], x[3], x[5], x[7] };
    dft<4>(e);
    dft<4>(o);
    const Z o1 = scaled(minus_i(o[1], o[1]), H), o3 = scaled(plus_i(o[3], o[3]), -H);
    x[0]       = e[0] + o[0];
    x[1]       = e[1] + o1;
    x[2]       = minus_i(e[2], o[2]);
    x[3]       = e[3] + o3;
    x[4]       = e[0] - o[0];
    x[5]       = e[1] - o1;
    x[6]       = plus_i(e[2], o[2]);
    x[7]       = e[3] - o3;
}

// One column of a stage: R rows, `step` floats apart. twiddle [R - 1]: complex factors of rows 1 .. R - 1; NULL: all 1. The inverse
// exchanges the parts of every number, and multiplies by the factors before the DFT.
template <int R, bool INVERSE> inline void butterfly(float * x, size_t step, const float * twiddle) {
    constexpr size_t RE = INVERSE ? BAND_PAIRS : 0, IM = BAND_PAIRS - RE;
    for (size_t i = 0; i < BAND_PAIRS; i += (size_t) V::W) {
        Z z[R];
        KVEDGE_UNROLL
        for (int q = 0; q < R; q++) {
            const float * row = x + (size_t) q * step + i;
            z[q]              = { V::load(row + RE).kept(), V::load(row + IM).kept() };
            if (INVERSE && twiddle && q > 0) {
                z[q] = times(z[q], twiddle + 2 * (q - 1));
            }
        }
        dft<R>(z);
        KVEDGE_UNROLL
        for (int q = 0; q < R; q++) {
            float * row = x + (size_t) q * step + i;
            if (!INVERSE && twiddle && q > 0) {
                z[q] = times(z[q], twiddle + 2 * (q - 1));
            }
            z[q].re.store(row + RE);
            z[q].im.store(row + IM);
        }
    }
}

template <int R, bool INVERSE> void stage_of(const FftStage & s, float * x, int32_t blocks) {
    const size_t step = (size_t) s.m * ROW;
    for (int32_t b = 0; b < blocks; b++, x += R * step) {
        butterfly<R, INVERSE>(x, step, nullptr);
        for (size_t j = 1; j < (size_t) s.m; j++) {
            butterfly<R, INVERSE>(x + j * ROW, step, s.twiddle + j * 2 * (R - 1));
        }
    }
}

template <bool INVERSE> void run_stage(const FftStage & s, float * x, int32_t blocks) {
    switch (s.radix) {
        case 2: stage_of<2, INVERSE>(s, x, blocks); break;
        case 3: stage_of<3, INVERSE>(s, x, blocks); break;
        case 4: stage_of<4, INVERSE>(s, x, blocks); break;
        case 5: stage_of<5, INVERSE>(s, x, blocks); break;
        case 8: stage_of<8, INVERSE>(s, x, blocks); break;
    }
}

// Transforms a block's parts one after another, each while it is in cache. Frequencies come in the order of their reversed digits.
template <bool INVERSE> void fft(const BandFilter & f, int32_t stage, float * x) {
    const FftStage & s = f.stages[stage];
    if (!INVERSE) {
        run_stage<false>(s, x, 1);
    }
    if (stage + 2 == f.n_stages) {
        run_stage<INVERSE>(f.stages[stage + 1], x, s.radix);
    } else if (stage + 1 < f.n_stages) {
        for (int32_t p = 0; p < s.radix; p++) {
            fft<INVERSE>(f, stage + 1, x + (size_t) p * (size_t) s.m * ROW);
        }
    }
    if (INVERSE) {
        run_stage<true>(s, x, 1);
    }
}

inline void mix(const BandMix & m, float * x) {
    float *     a = x + (size_t) m.a * ROW, *b = x + (size_t) m.b * ROW;
    const V     same = V::set1(m.same), re = V::set1(m.re), im = V::set1(m.im);
    for (size_t i = 0; i < BAND_PAIRS; i += (size_t) V::W) {
        const Z p = { V::load(a + i), V::load(a + BAND_PAIRS + i) }, q = { V::load(b + i), V::load(b + BAND_PAIRS + i) };
        V::fma(p.re, same, V::fnma(q.im, im, V::mul(q.re, re))).store(a + i);
        V::fma(p.im, same, V::fma(q.im, re, V::mul(q.re, im))).store(a + BAND_PAIRS + i);
        V::fma(q.re, same, V::fma(p.im, im, V::mul(p.re, re))).store(b + i);
        V::fma(q.im, same, V::fnma(p.re, im, V::mul(p.im, re))).store(b + BAND_PAIRS + i);
    }
}

double k_band_load(Rows rows, int32_t n, int32_t d, const int32_t * place, const float * origin, float * x) {
    constexpr int32_t AHEAD  = 32;  // rows lie too far apart for the processor to guess the next
    constexpr int32_t CHUNK  = 64;  // rows whose squares are summed in float32 before the sum goes on in double
    double            energy = 0.0;
    for (int32_t from = 0; from < n; from += CHUNK) {
        const int32_t end     = from + CHUNK < n ? from + CHUNK : n;
        V             squares = V::zero();
        for (int32_t r = from; r < end; r++) {
            float * row = x + (size_t) place[r] * ROW;
            prefetch(rows.data + (size_t) (r + AHEAD) * rows.stride);
            k_to_f32(rows.type, rows.data + (size_t) r * rows.stride, row, (size_t) d);
            for (size_t i = 0; i < ROW; i += (size_t) V::W) {
                const V v = V::load(row + i);
                squares   = V::fma(v, v, squares);
                V::sub(v, V::load(origin + i)).store(row + i);
            }
        }
        energy += (double) squares.hsum();
    }
    return energy;
}

void k_band_filter(const BandFilter & f, float * x, float * squares) {
    fft<false>(f, 0, x);
    for (int32_t i = 0; i < f.n_mixes; i++) {
        mix(f.mixes[i], x);
    }
    fft<true>(f, 0, x);
    for (size_t r = 0; r < (size_t) f.n_rows; r++) {
        const float * row = x + r * ROW;
        float *       to  = squares + r * (size_t) BAND_PAIRS;
        for (size_t i = 0; i < BAND_PAIRS; i += (size_t) V::W) {
            const V re = V::load(row + i), im = V::load(row + BAND_PAIRS + i);
            V::fma(re, re, V::fma(im, im, V::load(to + i))).store(to + i);
        }
    }
}

}  // namespace
}  // namespace kvedge
