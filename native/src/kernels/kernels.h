// Dense building blocks of attention, one table per instruction set, chosen once at run time.
// All matrices are row-major. Rows of K and V lie head-contiguous in their storage type; everything else is float32.

#pragma once

#include "backend/rows.h"

#include <cstddef>
#include <cstdint>

namespace kvedge {

// A linear filter along the rows of up to 2 * BAND_PAIRS channels, which an FFT of length n makes cheap.
// x [n][2 * BAND_PAIRS]: channel c and channel c + BAND_PAIRS are the parts of one complex number.
constexpr int32_t BAND_PAIRS = 16;

struct FftStage {
    int32_t       radix;    // 2, 3, 4, 5 or 8
    int32_t       m;        // rows of each of the `radix` parts that the stage splits a block into
    const float * twiddle;  // [m][radix - 1] complex
};

// What becomes of the frequency in row a and its mirror in row b: a = same * a + (re + i im) * b, b likewise with -im.
struct BandMix {
    int32_t a, b;
    float   same, re, im;
};

struct BandFilter {
    int32_t         n_rows;  // the first of n, those that hold the signal; the others are zero
    int32_t         n_stages, n_mixes;
    FftStage        stages[32];
    const BandMix * mixes;  // frequencies that are in none stay as they are
};

// Rows of a softmax whose columns come in parts: the largest logit so far, the sum of all weights relative to it, and what
// is summed with them.
struct SoftmaxRows {
    float * top;  // [m]
    float * sum;  // [m]
    float * o;    // [m][ldo], ldo a multiple of 16
    size_t  ldo;
};

struct Kernels {
    const char * name;
    int32_t      panel;  // columns of one packed K panel (nr)

    // Plain types only.
    void (*to_f32)(Type type, const void * src, float * dst, size_t n);
    void (*from_f32)(Type type, const float * src, void * dst, size_t n);  // rounds to nearest, ties to even

    // Any type: n rows of d values into out [n][ld].
    void (*widen)(Rows rows, int32_t n, int32_t d, float * out, size_t ld);

    // out[p][i][c] = k[p * nr + c][i] for panels p of nr rows, zero past n; out holds ceil(n / nr) * d * nr floats
    void (*pack)(Rows k, int32_t n, int32_t d, float * out);

    // s[r][c] = sum_i q[r][i] * k[c][i]; q [m][ldq], k packed, s [m][lds] with ceil(n / nr) * nr columns written
    void (*gemm_qk)(const float * q, size_t ldq, int32_t m, const float * packed, int32_t n, int32_t d, float * s, size_t lds);

    // o[r][i] += sum_c p[r][c] * v[c][i]; p [m][ldp], v [n][ldv], o [m][ldv]; d columns, ldv a multiple of 16 >= d
    void (*gemm_pv)(const float * p, size_t ldp, int32_t m, int32_t n, const float * v, size_t ldv, int32_t d, float * o);

    float (*max)(const float * x, size_t n);                       // -inf for n = 0
    float (*exp_sum)(float * x, size_t n, float shift);            // x = exp(x - shift); returns the sum
    // m rows of n more logits: s = exp(s - top) with the top that they make, and what was summed before shrinks accordingly
    void (*softmax_step)(float * s, size_t lds, int32_t m, int32_t n, const SoftmaxRows & rows);
    // as exp_sum, and *dot = sum of exp(x - shift) * (x - shift), what an entropy is made of
    float (*exp_dot)(float * x, size_t n, float shift, float * dot);
    void (*softcap)(float * x, size_t n, float cap);               // x = cap * tanh(x / cap)
    void (*axpy)(float a, const float * x, float * y, size_t n);   // y += a * x
    void (*add_moments)(float a, const float * x, float * y, float * y2, size_t n);  // y += a * x; y2 += (a * x)^2
    float (*dot)(const float * x, const float * y, size_t n);

    // One read of k for all m query rows: s[r][c] = q[r] . k[c], for m <= 16; q [m][ldq]. next: n * k.stride bytes that are
    // needed after these, fetched into cache meanwhile; need not be readable; NULL: none
    void (*rows_dot)(const float * q, size_t ldq, int32_t m, Rows k, int32_t n, int32_t d, float * s, size_t lds,
                     const uint8_t * next);
    // One read of v for all m rows: o[r] += sum_c p[r][c] * v[c]; o [m][ldo], ldo a multiple of 16 >= d. next: n * v.stride
    void (*rows_axpy)(const float * p, size_t ldp, int32_t m, Rows v, int32_t n, int32_t d, float * o, size_t ldo,
                      const uint8_t * next);

    // Rows [n], d <= 2 * BAND_PAIRS channels wide, widened into the rows of x [..][2 * BAND_PAIRS] that `place` says, less
    // origin [2 * BAND_PAIRS]: with one of the rows as the origin, constant channels become exactly zero. x and origin must
    // be zero past d. Returns the sum of squares of the rows as they are.
    double (*band_load)(Rows rows, int32_t n, int32_t d, const int32_t * place, const float * origin, float * x);

    // squares[r][i] += squares of both parts of what the filter makes of x, times the length of the FFT, squared;
    // squares [n_rows][BAND_PAIRS]. Overwrites x.
    void (*band_filter)(const BandFilter & filter, float * x, float * squares);
};

// The best table that this processor can run.
const Kernels & kernels();

// All tables that this processor can run, the best first and the generic one last.
struct Tables {
    const Kernels * table[4];
    int32_t         n;

    const Kernels * const * begin() const { return table; }
    const Kernels * const * end() const { return table + n; }
};
Tables runnable_kernels();

// The tables themselves; NULL where they are not compiled in. For tests.
const Kernels * kernels_generic();
const Kernels * kernels_avx2();
const Kernels * kernels_avx512();
const Kernels * kernels_avx512vnni();
const Kernels * kernels_neon();
const Kernels * kernels_neondot();
const Kernels * kernels_neoni8mm();

constexpr int32_t pad16(int32_t n) { return (n + 15) & ~15; }

}  // namespace kvedge
