// Dense building blocks of attention, one table per instruction set, chosen once at run time.
// All matrices are row-major. Rows of K and V lie head-contiguous in their storage type; everything else is float32.

#pragma once

#include <cstddef>
#include <cstdint>

namespace kvedge {

// How rows of keys or values lie in memory. f16 and what follows up to f32 are plain numbers. Of the others:
//   q8_0, q4_0          llama.cpp's blocks: 32 values of a row, a half-precision scale d, then the codes; x = d * code
//   kivi4_v, kivi2_v    KIVI's values: 32 values of a row, scale and minimum in half precision, then codes without sign;
//                       x = scale * code + minimum
//   kivi4_k, kivi2_k    KIVI's keys: of GROUP rows, scale[d] and minimum[d] in half precision, one of each per channel,
//                       and then the codes of each row
// Codes of four bits: byte j of a block holds value j (low) and j + 16; of two bits: values j, j + 8, j + 16, j + 24.
enum class Type : int32_t { f16 = 0, bf16, f32, q8_0, q4_0, kivi4_v, kivi2_v, kivi4_k, kivi2_k };

constexpr int32_t GROUP = 32;  // values that share a scale

constexpr bool is_quantised(Type t) { return t > Type::f32; }
constexpr bool is_grouped(Type t) { return t == Type::kivi4_k || t == Type::kivi2_k; }  // rows share scales with others

constexpr size_t type_size(Type t) { return t == Type::f32 ? 4 : 2; }  // of a plain number

// Bytes of GROUP codes.
constexpr size_t code_bytes(Type t) {
    return t == Type::q8_0 ? 32 : t == Type::kivi2_v || t == Type::kivi2_k ? 8 : 16;
}

// Bytes of 32 values with what they need to be read: of a row's block, or of a row's share of a group.
constexpr size_t block_bytes(Type t) { return code_bytes(t) + (t == Type::q8_0 || t == Type::q4_0 ? 2 : 4); }

// Bytes of a row of d values; of a grouped type, of a row and its share of what the group has in common.
constexpr size_t row_bytes(Type t, int32_t d) {
    return is_quantised(t) ? (size_t) (d / GROUP) * block_bytes(t) : (size_t) d * type_size(t);
}

// Rows of one head: row r starts at data + r * stride bytes. Of a grouped type: a group of GROUP rows takes GROUP * stride
// bytes, the first begins at data, and its first `skip` rows are not meant.
struct Rows {
    const uint8_t * data;
    size_t          stride;
    Type            type;
    int32_t         skip = 0;

    Rows from(int32_t row) const {  // without the first `row` rows
        if (!is_grouped(type)) {
            return { data + (size_t) row * stride, stride, type, 0 };
        }
        const int32_t at = skip + row;
        return { data + (size_t) (at / GROUP) * GROUP * stride, stride, type, at % GROUP };
    }
};

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

    // Any type: n rows of d values into out [n][ld].
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

    // One read of k for all m query rows: s[r][c] = q[r] . k[c], for m <= 16. next: n * k.stride bytes that are needed after
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
