// Decode over q8_0 and q4_0 rows in integers, without widening codes to float32. Query rows and softmax weights are rounded to 16 bits,
// relative to the largest number of a block, as two numbers of 8 bits, high and low; dotprod multiplies them by codes and sums four
// products. With i8mm, high and low are the rows of one matrix, and the codes of two keys the columns of the other. The rounding error is
// at most 2^-15.9 of the largest number; q8_0 itself has an error of 2^-8 of the largest number of its block.
// Part of kernels_neondot.cpp and kernels_neoni8mm.cpp, under the rules of kernels_impl.h.

#pragma once

#include "kernels_impl.h"

namespace kvedge {
namespace {

constexpr int32_t TILE      = 4;         // rows whose sums fill a vector
constexpr int32_t MOST_M    = 16;        // most query rows of a call
constexpr int32_t TOKENS    = 64;        // rows whose weights share a unit; their sums stay below 2^29
constexpr float   MOST_UNIT = 32639.0f;  // 127 * 256 + 127, the largest number with a high and a low part
constexpr float   NO_UNIT   = 1e-30f;    // smaller numbers count as zero: their reciprocals may be infinite

constexpr int32_t MOST_UNITS = MOST_M * MAX_ROW / GROUP;

// Finds the unit of numbers that become integers; the largest number is in some lane of top. unit: what integer 1 is worth. Returns the
// factor that makes integers.
inline float find_unit(float32x4_t top, float & unit) {
    const float most = vmaxvq_f32(top);
    unit             = most / MOST_UNIT;
    return most > NO_UNIT ? MOST_UNIT / most : 0.0f;
}

inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vmaxq_f32(a, vabsq_f32(b)); }

// Rounds a and b times `to` to 16 bits, x = 256 * high + low.
inline void split16(float32x4_t a, float32x4_t b, float to, int8_t * high, int8_t * low) {
    const int16x4_t x = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(a, to)));
    const int16x8_t y = vqmovn_high_s32(x, vcvtnq_s32_f32(vmulq_n_f32(b, to)));
    vst1_s8(high, vrshrn_n_s16(y, 8));
    vst1_s8(low, vmovn_s16(y));
}

// Returns half a block's codes: columns 0 to 15 or 16 to 31.
template <Type T> inline int8x16_t half_codes(const uint8_t * codes, int half) {
    if constexpr (T == Type::q8_0) {
        return vreinterpretq_s8_u8(vld1q_u8(codes + 16 * half));
    } else {
        const uint8x16_t both = vld1q_u8(codes);
        const uint8x16_t code = half ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
        return vsubq_s8(vreinterpretq_s8_u8(code), vdupq_n_s8(8));
    }
}

inline float half_to_float(const uint8_t * p) {
    uint16_t h;
    __builtin_memcpy(&h, p, 2);
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0);
}

// Returns the scales of a block of TILE rows.
inline float32x4_t tile_scales(const uint8_t * p, size_t stride) {
    uint16_t h[TILE];
    KVEDGE_UNROLL
    for (int c = 0; c < TILE; c++) {
        __builtin_memcpy(h + c, p + (size_t) c * stride, 2);
    }
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h)));
}

// The codes of a block of TILE rows. dot() multiplies them by a query row's block of 64 bytes, and returns one sum per row.
#if defined(__ARM_FEATURE_MATMUL_INT8)

constexpr int32_t HIGH = 16, LOW = 8;  // bytes from eight high parts to the next eight, and to the low parts of the same numbers

template <Type T> struct Codes {
    int8x16_t pair[2][4];  // rows 0 and 1, rows 2 and 3: eight columns of both to a vector

    void load(const uint8_t * codes, size_t stride) {
        KVEDGE_UNROLL
        for (int p = 0; p < 2; p++, codes += 2 * stride) {
            KVEDGE_UNROLL
            for (int h = 0; h < 2; h++) {
                const int64x2_t a  = vreinterpretq_s64_s8(half_codes<T>(codes, h));
                const int64x2_t b  = vreinterpretq_s64_s8(half_codes<T>(codes + stride, h));
                pair[p][2 * h]     = vreinterpretq_s8_s64(vzip1q_s64(a, b));
                pair[p][2 * h + 1] = vreinterpretq_s8_s64(vzip2q_s64(a, b));
            }
        }
    }

    int32x4_t dot(const int8_t * q) const {
        int32x4_t sum[2] = { vdupq_n_s32(0), vdupq_n_s32(0) };
        KVEDGE_UNROLL
        for (int j = 0; j < 4; j++) {
            const int8x16_t x = vld1q_s8(q + 16 * j);
            sum[0]            = vmmlaq_s32(sum[0], x, pair[0][j]);
            sum[1]            = vmmlaq_s32(sum[1], x, pair[1][j]);
        }
        const int64x2_t a = vreinterpretq_s64_s32(sum[0]), b = vreinterpretq_s64_s32(sum[1]);
        const int32x4_t high = vreinterpretq_s32_s64(vzip1q_s64(a, b)), low = vreinterpretq_s32_s64(vzip2q_s64(a, b));
        return vaddq_s32(vshlq_n_s32(high, 8), low);
    }
};

#else

constexpr int32_t HIGH = 8, LOW = 32;

template <Type T> struct Codes {
    int8x16_t half[TILE][2];

    void load(const uint8_t * codes, size_t stride) {
        KVEDGE_UNROLL
        for (int c = 0; c < TILE; c++, codes += stride) {
            half[c][0] = half_codes<T>(codes, 0);
            half[c][1] = half_codes<T>(codes, 1);
        }
    }

    int32x4_t dot(const int8_t * q) const {
        const int8x16_t high[] = { vld1q_s8(q), vld1q_s8(q + 16) }, low[] = { vld1q_s8(q + LOW), vld1q_s8(q + LOW + 16) };
        int32x4_t       sum[TILE];
        KVEDGE_UNROLL
        for (int c = 0; c < TILE; c++) {
            sum[c] = vdotq_s32(vdotq_s32(vdupq_n_s32(0), half[c][0], high[0]), half[c][1], high[1]);
            sum[c] = vdotq_s32(vdotq_s32(vshlq_n_s32(sum[c], 8), half[c][0], low[0]), half[c][1], low[1]);
        }
        return vpaddq_s32(vpaddq_s32(sum[0], sum[1]), vpaddq_s32(sum[2], sum[3]));
    }
};

#endif

// Query rows in two parts of 8 bits.
struct Queries16 {
    alignas(16) int8_t x[MOST_UNITS][2 * GROUP];  // [block][row]
    float              unit[MOST_UNITS];          // [block][row]

    void round(FloatIn q, int32_t m, int32_t d) {
        int32_t at = 0;
        for (int32_t i = 0; i < d; i += GROUP) {
            for (int32_t r = 0; r < m; r++, at++) {
                const float * from = q.row(r) + i;
                float32x4_t   top  = vdupq_n_f32(0.0f);
                for (int32_t j = 0; j < GROUP; j += 4) {
                    top = larger(top, vld1q_f32(from + j));
                }
                const float to = find_unit(top, unit[at]);
                for (int32_t j = 0; j < GROUP / 8; j++, from += 8) {
                    int8_t * high = x[at] + j * HIGH;
                    split16(vld1q_f32(from), vld1q_f32(from + 4), to, high, high + LOW);
                }
            }
        }
    }
};

// Writes s[r][c] for M query rows and a tile of w rows of keys; units and x begin with the first row of the first block.
template <Type T, int M> inline void dot_tile(
    const int8_t (*x)[2 * GROUP], const float * units, int32_t m, Rows k, int32_t blocks, FloatOut s, int32_t w) {
    float32x4_t sum[M];
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        sum[r] = vdupq_n_f32(0.0f);
    }
    const uint8_t * block = k.data;
    for (int32_t b = 0; b < blocks; b++, block += block_bytes(T), x += m, units += m) {
        Codes<T> codes;
        codes.load(block + 2, k.stride);
        const float32x4_t scales = tile_scales(block, k.stride);
        KVEDGE_UNROLL
        for (int r = 0; r < M; r++) {
            sum[r] = vfmaq_f32(sum[r], vcvtq_f32_s32(codes.dot(x[r])), vmulq_n_f32(scales, units[r]));
        }
    }
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        V{ sum[r] }.store_first(s.row(r), (size_t) w);
    }
}

template <Type T> void codes_rows_dot(FloatIn q, int32_t m, Rows k, int32_t n, int32_t d, FloatOut s, const uint8_t * next) {
    const int32_t blocks = d / GROUP;
    Queries16     queries;
    uint8_t       rest[TILE * row_bytes(T, MAX_ROW)];
    queries.round(q, m, d);
    for (int32_t c = 0; c < n; c += TILE) {
        const int32_t w    = n - c < TILE ? n - c : TILE;
        Rows          tile = k.from(c);
        fetch(later(next, (size_t) c * k.stride), (size_t) w * k.stride);
        if (w < TILE) {  // no row beyond the last one may be read
            tile = { rest, row_bytes(T, d), T };
            for (int32_t r = 0; r < TILE; r++) {
                __builtin_memcpy(rest + (size_t) r * tile.stride, k.from(c + (r < w ? r : 0)).data, tile.stride);
            }
        }
        split_rows(m, [&](int32_t r, auto rows) {
            constexpr int M = decltype(rows)::value;
            dot_tile<T, M>(queries.x + r, queries.unit + r, m, tile, blocks, s.at(r, c), w);
        });
    }
}

// Softmax weights of up to TOKENS rows, times the scales of the rows' blocks, in two parts of 8 bits; zero past n.
struct Weights16 {
    alignas(16) int8_t high[MOST_UNITS][TOKENS], low[MOST_UNITS][TOKENS];  // [block][row]
    float              unit[MOST_UNITS];

    void round(FloatIn p, int32_t m, Rows v, int32_t n, int32_t blocks) {
        alignas(16) float scales[TOKENS] = {}, product[TOKENS];
        for (int32_t b = 0, at = 0; b < blocks; b++) {
            for (int32_t c = 0; c < n; c++) {
                scales[c] = half_to_float(v.data + (size_t) c * v.stride + (size_t) b * block_bytes(v.type));
            }
            for (int32_t r = 0; r < m; r++, at++) {
                const float * from = p.row(r);
                float32x4_t   top  = vdupq_n_f32(0.0f);
                for (int32_t c = 0; c < TOKENS; c += 4) {
                    const size_t      w = c >= n ? 0 : n - c < 4 ? (size_t) (n - c) : 4;
                    const float32x4_t a = w == 4 ? vld1q_f32(from + c) : V::load_first(from + c, w, 0.0f).x;
                    const float32x4_t x = vmulq_f32(a, vld1q_f32(scales + c));
                    vst1q_f32(product + c, x);
                    top = larger(top, x);
                }
                const float to = find_unit(top, unit[at]);
                for (int32_t c = 0; c < TOKENS; c += 8) {
                    split16(vld1q_f32(product + c), vld1q_f32(product + c + 4), to, high[at] + c, low[at] + c);
                }
            }
        }
    }
};

// Four rows of 16 columns, arranged so that a vector holds the codes of four columns, with those of one column side by side.
struct Columns {
    int8x16_t x[4];

    Columns(int8x16_t a, int8x16_t b, int8x16_t c, int8x16_t d) {
        const int16x8_t ab = vreinterpretq_s16_s8(vzip1q_s8(a, b)), cd = vreinterpretq_s16_s8(vzip1q_s8(c, d));
        const int16x8_t AB = vreinterpretq_s16_s8(vzip2q_s8(a, b)), CD = vreinterpretq_s16_s8(vzip2q_s8(c, d));
        x[0] = vreinterpretq_s8_s16(vzip1q_s16(ab, cd));
        x[1] = vreinterpretq_s8_s16(vzip2q_s16(ab, cd));
        x[2] = vreinterpretq_s8_s16(vzip1q_s16(AB, CD));
        x[3] = vreinterpretq_s8_s16(vzip2q_s16(AB, CD));
    }
};

// Returns four weights in every lane.
inline int8x16_t four(const int8_t * p) {
    int32_t w;
    __builtin_memcpy(&w, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(w));
}

// o[r] += sum of products of the weights from row `at` on and half a block's codes, over n <= TOKENS rows.
template <Type T, int M> inline void axpy_half(
    const Weights16 & weights, int32_t at, const uint8_t * codes, size_t stride, int32_t n, int half, FloatOut o) {
    int32x4_t hi[M][4], lo[M][4];
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        KVEDGE_UNROLL
        for (int j = 0; j < 4; j++) {
            hi[r][j] = lo[r][j] = vdupq_n_s32(0);
        }
    }
    for (int32_t c = 0; c < n; c += 4) {
        const auto row = [&](int32_t i) {  // weights past the last are zero
            return half_codes<T>(codes + (size_t) (c + i < n ? c + i : n - 1) * stride, half);
        };
        const Columns columns(row(0), row(1), row(2), row(3));
        KVEDGE_UNROLL
        for (int r = 0; r < M; r++) {
            const int8x16_t a = four(weights.high[at + r] + c), b = four(weights.low[at + r] + c);
            KVEDGE_UNROLL
            for (int j = 0; j < 4; j++) {
                hi[r][j] = vdotq_s32(hi[r][j], columns.x[j], a);
                lo[r][j] = vdotq_s32(lo[r][j], columns.x[j], b);
            }
        }
    }
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        KVEDGE_UNROLL
        for (int j = 0; j < 4; j++) {
            float *         to  = o.row(r) + 4 * j;
            const int32x4_t sum = vaddq_s32(vshlq_n_s32(hi[r][j], 8), lo[r][j]);
            vst1q_f32(to, vfmaq_n_f32(vld1q_f32(to), vcvtq_f32_s32(sum), weights.unit[at + r]));
        }
    }
}

// Splits m rows into parts whose sums (four vectors each, high and low) fit the registers. Calls f(first row, rows as an IntN).
template <class F> inline void split_by_three(int32_t m, const F & f) {
    for (int32_t r = 0; r < m;) {
        const int32_t left = m - r;
        switch (left == 4 ? 2 : left) {
            case 1:  f(r, IntN<1>()), r += 1; break;
            case 2:  f(r, IntN<2>()), r += 2; break;
            default: f(r, IntN<3>()), r += 3; break;
        }
    }
}

template <Type T> void codes_rows_axpy(FloatIn p, int32_t m, Rows v, int32_t n, int32_t d, FloatOut o, const uint8_t * next) {
    const int32_t blocks = d / GROUP;
    Weights16     weights;
    for (int32_t c = 0; c < n; c += TOKENS) {
        const int32_t w    = n - c < TOKENS ? n - c : TOKENS;
        const Rows    rows = v.from(c);
        weights.round(p.at(0, c), m, rows, w, blocks);
        for (int32_t b = 0; b < blocks; b++) {
            // prefetches a share of what is needed next with every block, since many misses at once would stall
            const size_t part = (size_t) w * v.stride / (size_t) blocks;
            fetch(later(next, (size_t) c * v.stride + (size_t) b * part), part);
            const uint8_t * codes = rows.data + (size_t) b * block_bytes(T) + 2;
            split_by_three(m, [&](int32_t r, auto part_rows) {
                const int32_t at = b * m + r;
                for (int half = 0; half < 2; half++) {
                    axpy_half<T, decltype(part_rows)::value>(
                        weights, at, codes, v.stride, w, half, o.at(r, b * GROUP + 16 * half));
                }
            });
        }
    }
}

void k_codes_rows_dot(FloatIn q, int32_t m, Rows k, int32_t n, int32_t d, FloatOut s, const uint8_t * next) {
    switch (m <= MOST_M ? k.type : Type::f32) {
        case Type::q8_0: codes_rows_dot<Type::q8_0>(q, m, k, n, d, s, next); break;
        case Type::q4_0: codes_rows_dot<Type::q4_0>(q, m, k, n, d, s, next); break;
        default:         k_any_rows_dot(q, m, k, n, d, s, next);
    }
}

void k_codes_rows_axpy(FloatIn p, int32_t m, Rows v, int32_t n, int32_t d, FloatOut o, const uint8_t * next) {
    switch (m <= MOST_M ? v.type : Type::f32) {
        case Type::q8_0: codes_rows_axpy<Type::q8_0>(p, m, v, n, d, o, next); break;
        case Type::q4_0: codes_rows_axpy<Type::q4_0>(p, m, v, n, d, o, next); break;
        default:         k_any_rows_axpy(p, m, v, n, d, o, next);
    }
}

}  // namespace
}  // namespace kvedge
