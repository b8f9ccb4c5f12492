// Dense kernels of attention: one table for each instruction set, chosen once at run time. All matrices are row-major. The rows of K and V
// of a head are contiguous, in their storage type; everything else is float32.

#pragma once

#include "rows/rows.h"

#include <cstddef>
#include <cstdint>

namespace kvedge {

// Rows of float32 to read or to write: row r starts at data + r * ld.
template <class F> struct Lines {
    F *    data;
    size_t ld;

    F *   row(int32_t r) const { return data + (size_t) r * ld; }
    Lines at(int32_t r, int32_t column = 0) const { return { row(r) + column, ld }; }
};
using FloatIn = Lines<const float>;
using FloatOut = Lines<float>;

// A linear filter along the rows of up to 2 * BAND_PAIRS channels, computed by an FFT of length n.
// x [n][2 * BAND_PAIRS]: channel c and channel c + BAND_PAIRS are the parts of one complex number.
constexpr int32_t BAND_PAIRS = 16;

struct FftStage {
    int32_t       radix;    // 2, 3, 4, 5 or 8
    int32_t       m;        // rows of each of the `radix` parts that the stage splits a block into
    const float * twiddle;  // [m][radix - 1] complex
};

// Mixes the frequency in row a and its mirror in row b: a = same * a + (re + i im) * b, and b likewise with -im.
struct BandMix {
    int32_t a, b;
    float   same, re, im;
};

struct BandFilter {
    int32_t         n_rows;  // rows that hold the signal, the first of n; the others are zero
    int32_t         n_stages, n_mixes;
    FftStage        stages[32];
    const BandMix * mixes;  // frequencies in no mix stay unchanged
};

// Rows of a softmax whose columns come in parts: the largest logit so far, the sum of all weights relative to that logit, and
// the sums of what the weights weigh.
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

    // Any type: widens n rows of d values to out [n][ld]; rotated rows are rotated back.
    void (*widen)(Rows rows, int32_t n, int32_t d, float * out, size_t ld);

    // out[p][i][c] = k[p * nr + c][i] for panels p of nr rows, zero past n; out holds ceil(n / nr) * d * nr floats
    void (*pack)(Rows k, int32_t n, int32_t d, float * out);

    // s[r][c] = sum_i q[r][i] * k[c][i] for m rows r; k packed, ceil(n / nr) * nr columns of s written
    void (*gemm_qk)(FloatIn q, int32_t m, const float * packed, int32_t n, int32_t d, FloatOut s);

    // o[r][i] += sum_c p[r][c] * v[c][i] for m rows r, n rows c and d columns i; o [m][v.ld], v.ld a multiple of 16 >= d
    void (*gemm_pv)(FloatIn p, int32_t m, int32_t n, FloatIn v, int32_t d, float * o);

    float (*max)(const float * x, size_t n);                       // -inf for n = 0
    float (*exp_sum)(float * x, size_t n, float shift);            // x = exp(x - shift); returns the sum
    // m rows of n more logits: s = exp(s - top) with the new top; earlier sums shrink accordingly
    void (*softmax_step)(float * s, size_t lds, int32_t m, int32_t n, const SoftmaxRows & rows);
    // like exp_sum, and *dot = sum of exp(x - shift) * (x - shift), for an entropy
    float (*exp_dot)(float * x, size_t n, float shift, float * dot);
    void (*softcap)(float * x, size_t n, float cap);               // x = cap * tanh(x / cap)
    void (*axpy)(float a, const float * x, float * y, size_t n);   // y += a * x
    void (*add_moments)(float a, const float * x, float * y, float * y2, size_t n);  // y += a * x; y2 += (a * x)^2
    float (*dot)(const float * x, const float * y, size_t n);

    // Both take rows as they are stored: a rotated type counts as the same type without rotation. One read of k for all m query rows:
    // s[r][c] = q[r] . k[c]. next: n * k.stride bytes that are needed after these, prefetched meanwhile; need not be readable; NULL: none
    void (*rows_dot)(FloatIn q, int32_t m, Rows k, int32_t n, int32_t d, FloatOut s, const uint8_t * next);
    // One read of v for all m rows: o[r] += sum_c p[r][c] * v[c]; o.ld a multiple of 16 >= d. next: n * v.stride bytes
    void (*rows_axpy)(FloatIn p, int32_t m, Rows v, int32_t n, int32_t d, FloatOut o, const uint8_t * next);

    // Widens rows [n] of d <= 2 * BAND_PAIRS channels, subtracts origin [2 * BAND_PAIRS], and writes row r to row place[r] of x [..][2 *
    // BAND_PAIRS]. With one of the rows as the origin, constant channels become exactly zero. x and origin must be zero past d. Returns the
    // sum of squares of the rows before the subtraction.
    double (*band_load)(Rows rows, int32_t n, int32_t d, const int32_t * place, const float * origin, float * x);

    // Filters x, which is overwritten. squares [n_rows][BAND_PAIRS] += squares of both parts of the result, times the squared length of the
    // FFT.
    void (*band_filter)(const BandFilter & filter, float * x, float * squares);

    // Multiplies each `block` values of n rows of d by the Hadamard matrix of that size over its square root (types.h: rotation), with the
    // fast transform. block: a power of two of at least 16 that divides d. Every table gives the same bits.
    void (*rotate)(FloatOut x, int32_t n, int32_t d, int32_t block);

    // Most query rows for which rows_dot and rows_axpy read plain rows as they are stored; for more query rows, rows are packed or widened
    // first. A query row gets the same bits for any number of query rows.
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
