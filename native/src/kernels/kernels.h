// Dense building blocks of attention, one table per instruction set, chosen once at run time.
// All matrices are row-major. Rows of K and V lie head-contiguous in their storage type; everything else is float32.

#pragma once

#include "rows/rows.h"

#include <cstddef>
#include <cstdint>

namespace kvedge {

// Rows of float32 that are read, or written: row r starts at data + r * ld.
template <class F> struct Lines {
    F *    data;
    size_t ld;

    F *   row(int32_t r) const { return data + (size_t) r * ld; }
    Lines at(int32_t r, int32_t column = 0) const { return { row(r) + column, ld }; }
};
using FloatIn = Lines<const float>;
using FloatOut = Lines<float>;

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

    // Any type: n rows of d values into out [n][ld]; rotated ones as they were before.
    void (*widen)(Rows rows, int32_t n, int32_t d, float * out, size_t ld);

    // out[p][i][c] = k[p * nr + c][i] for panels p of nr rows, zero past n; out holds ceil(n / nr) * d * nr floats
    void (*pack)(Rows k, int32_t n, int32_t d, float * out);

    // s[r][c] = sum_i q[r][i] * k[c][i] for m rows r; k packed, ceil(n / nr) * nr columns of s written
    void (*gemm_qk)(FloatIn q, int32_t m, const float * packed, int32_t n, int32_t d, FloatOut s);

    // o[r][i] += sum_c p[r][c] * v[c][i] for m rows r, n rows c and d columns i; o [m][v.ld], v.ld a multiple of 16 >= d
    void (*gemm_pv)(FloatIn p, int32_t m, int32_t n, FloatIn v, int32_t d, float * o);

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

    // Of rows as they are stored: what is rotated they take for the type without that.
    // One read of k for all m query rows: s[r][c] = q[r] . k[c]. next: n * k.stride bytes that are needed after
    // these, fetched into cache meanwhile; need not be readable; NULL: none
    void (*rows_dot)(FloatIn q, int32_t m, Rows k, int32_t n, int32_t d, FloatOut s, const uint8_t * next);
    // One read of v for all m rows: o[r] += sum_c p[r][c] * v[c]; o.ld a multiple of 16 >= d. next: n * v.stride bytes
    void (*rows_axpy)(FloatIn p, int32_t m, Rows v, int32_t n, int32_t d, FloatOut o, const uint8_t * next);

    // Rows [n], d <= 2 * BAND_PAIRS channels wide, widened into the rows of x [..][2 * BAND_PAIRS] that `place` says, less
    // origin [2 * BAND_PAIRS]: with one of the rows as the origin, constant channels become exactly zero. x and origin must
    // be zero past d. Returns the sum of squares of the rows as they are.
    double (*band_load)(Rows rows, int32_t n, int32_t d, const int32_t * place, const float * origin, float * x);

    // squares[r][i] += squares of both parts of what the filter makes of x, times the length of the FFT, squared;
    // squares [n_rows][BAND_PAIRS]. Overwrites x.
    void (*band_filter)(const BandFilter & filter, float * x, float * squares);

    // Each `block` values of n rows of d, times the Hadamard matrix of that size over its square root (types.h: rotation), by the
    // fast transform. block: a power of two of at least 16 that divides d. Every table gives the same bits.
    void (*rotate)(FloatOut x, int32_t n, int32_t d, int32_t block);

    // Query rows up to which rows_dot and rows_axpy take plain rows as they are stored; for more, rows are packed or widened first.
    // Each query row has the same bits for any number of them.
    int32_t few;
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
