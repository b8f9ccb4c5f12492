// Decode over q8_0 rows for several query rows in integers, which takes half the multiplications of float32. Query rows and softmax weights
// are rounded to 16 bits, relative to the largest number of a block; pairs of products are summed in 32 bits. The rounding error is at most
// 2^-16 of the largest number; q8_0 itself has an error of 2^-8 of the largest number of its block.
// Part of kernels_avx512vnni.cpp, under the rules of kernels_impl.h.

#pragma once

#include "kernels_impl.h"

namespace kvedge {
namespace {

constexpr int32_t TILE      = V::W;    // rows whose sums fill a vector
constexpr int32_t MOST_M    = 16;      // most query rows of a call
constexpr int32_t TOKENS    = 64;      // rows whose weights share a unit; their products of 2^22 each add up to less than 2^31
constexpr float   MOST_UNIT = 32767.0f;
constexpr float   NO_UNIT   = 1e-30f;  // smaller numbers count as zero: their reciprocals may be infinite
constexpr size_t  Q8_BLOCK  = block_bytes(Type::q8_0);

// Adds the sums of pairs of products to acc, in place: GCC 12 would copy every sum twice. This is one instruction; a multiplication and an
// addition would be no faster than float32.
inline __m512i add_pairs(__m512i acc, __m512i a, __m512i b) {
    acc = _mm512_dpwssd_epi32(acc, a, b);
    KVEDGE_IN_REGISTER(acc, "v");
    return acc;
}

// Prefetches what is needed next, a few cache lines at a time.
struct LinePrefetch {
    const uint8_t * at;
    const uint8_t * end;

    LinePrefetch(const uint8_t * next, size_t n) : at(next), end(next ? next + n : nullptr) {}
    void lines(int32_t n) {
        for (; n > 0 && at < end; n--, at += LINE) {
            prefetch(at);
        }
    }
};

// Loads the scales of a block of TILE rows by interleaving the rows' first bytes: cheaper than TILE loads of 16 bits.
inline __m512 tile_scales(const uint8_t * p, size_t stride) {
    const auto two = [&](size_t r) {
        return _mm_unpacklo_epi16(_mm_loadu_si128((const __m128i *) (p + r * stride)),
                                  _mm_loadu_si128((const __m128i *) (p + (r + 1) * stride)));
    };
    const auto four  = [&](size_t r) { return _mm_unpacklo_epi32(two(r), two(r + 2)); };
    const auto eight = [&](size_t r) { return _mm_unpacklo_epi64(four(r), four(r + 4)); };
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(eight(0)), eight(8), 1));
}

// Loads the scales of n rows; the other lanes are 0.
inline __m512 first_scales(const uint8_t * p, size_t stride, int32_t n) {
    uint16_t h[TILE] = {};
    for (int32_t c = 0; c < n; c++) {
        __builtin_memcpy(h + c, p + (size_t) c * stride, 2);
    }
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) h));
}

// Returns the larger of the absolute values.
inline __m512 larger(__m512 a, __m512 b) { return _mm512_range_ps(a, b, 0xb); }

// Finds units for numbers that become integers of at most MOST_UNIT. top [n]: the largest number is in some lane. unit [n]: what integer 1
// is worth; reciprocal [n]: its reciprocal. Writes n rounded up to a multiple of 4.
inline void find_units(const __m512 * top, int32_t n, float * unit, float * reciprocal) {
    const auto max = [](__m512 a, __m512 b) { return _mm512_castps_pd(_mm512_max_ps(a, b)); };
    for (int32_t i = 0; i < n; i += 4, top += 4) {
        const __m512d ab = max(_mm512_unpacklo_ps(top[0], top[1]), _mm512_unpackhi_ps(top[0], top[1]));
        const __m512d cd = max(_mm512_unpacklo_ps(top[2], top[3]), _mm512_unpackhi_ps(top[2], top[3]));
        const __m512  lo = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), hi = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
        const __m512  x  = _mm512_max_ps(lo, hi);
        const __m256  y  = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
        const __m128  z  = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)), most = _mm_set1_ps(MOST_UNIT);
        const __mmask8 some = _mm_cmp_ps_mask(z, _mm_set1_ps(NO_UNIT), _CMP_GT_OQ);
        _mm_storeu_ps(unit + i, _mm_div_ps(z, most));
        _mm_storeu_ps(reciprocal + i, _mm_maskz_div_ps(some, most, z));
    }
}

constexpr int32_t MOST_UNITS = MOST_M * MAX_ROW / GROUP;

// Query rows in 16 bits, in the column order of packs, which works lane by lane: 0 to 3, 16 to 19, 4 to 7, 20 to 23 ...
struct Queries16 {
    alignas(64) int16_t x[MOST_UNITS * GROUP];  // [block][row][GROUP]
    float               unit[MOST_UNITS];       // [block][row]

    void round(FloatIn q, int32_t m, int32_t d) {
        __m512  top[MOST_UNITS];
        float   reciprocal[MOST_UNITS];
        int32_t n = 0;
        for (int32_t i = 0; i < d; i += GROUP) {
            for (int32_t r = 0; r < m; r++, n++) {
                const float * from = q.row(r) + i;
                top[n]             = larger(_mm512_loadu_ps(from), _mm512_loadu_ps(from + V::W));
            }
        }
        for (int32_t i = n; i % 4; i++) {
            top[i] = _mm512_setzero_ps();
        }
        find_units(top, n, unit, reciprocal);
        int32_t at = 0;
        for (int32_t i = 0; i < d; i += GROUP) {
            for (int32_t r = 0; r < m; r++, at++) {
                const float * from = q.row(r) + i;
                const __m512  to   = _mm512_set1_ps(reciprocal[at]);
                const __m512i a    = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from), to));
                const __m512i b    = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from + V::W), to));
                _mm512_store_si512(x + at * GROUP, _mm512_packs_epi32(a, b));
            }
        }
    }
};

// A block of TILE rows: four columns of the rows in a vector, in the order of Queries16. The lower half holds rows 0, 1, 4, 5, 8, 9, 12 and
// 13, so that the sums of dot_packed come in the order of the rows.
struct Packed {
    __m512i columns[GROUP / 4];
    __m512  scales;

    void load(const uint8_t * p, size_t stride) {
        __m512i t[8];
        scales = tile_scales(p, stride);
        KVEDGE_UNROLL
        for (int h = 0; h < 8; h += 4) {
            __m512i x[4];
            KVEDGE_UNROLL
            for (int j = 0; j < 4; j++) {
                const uint8_t * row = p + 2 + (size_t) (h / 2 + j % 2 + j / 2 * 4) * stride;
                x[j] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *) row)),
                                          _mm256_loadu_si256((const __m256i *) (row + 8 * stride)), 1);
            }
            const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
            const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
            t[h]            = _mm512_unpacklo_epi64(a, c);
            t[h + 1]        = _mm512_unpackhi_epi64(a, c);
            t[h + 2]        = _mm512_unpacklo_epi64(b, d);
            t[h + 3]        = _mm512_unpackhi_epi64(b, d);
        }
        KVEDGE_UNROLL
        for (int j = 0; j < 4; j++) {
            columns[2 * j]     = _mm512_shuffle_i32x4(t[j], t[j + 4], 0x88);
            columns[2 * j + 1] = _mm512_shuffle_i32x4(t[j], t[j + 4], 0xdd);
        }
    }
};

// sums[r][c] += products of a block, for M query rows.
template <int M> inline void dot_packed(const int16_t * q, const float * unit, const Packed & k, float * sums) {
    __m512i lo[M], hi[M];  // two sums for each row, of the lower and the upper half of the rows
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        lo[r] = hi[r] = _mm512_setzero_si512();
    }
    for (int j = 0; j < GROUP / 4; j++, q += 4) {
        const __m512i a = _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i *) (k.columns + j)));
        const __m512i b = _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i *) (k.columns + j) + 1));
        KVEDGE_UNROLL
        for (int r = 0; r < M; r++) {
            long long four;
            __builtin_memcpy(&four, q + r * GROUP, 8);
            const __m512i x = _mm512_set1_epi64(four);
            lo[r]           = add_pairs(lo[r], a, x);
            hi[r]           = add_pairs(hi[r], b, x);
        }
    }
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        const __m512  a = _mm512_castsi512_ps(lo[r]), b = _mm512_castsi512_ps(hi[r]);
        const __m512i even = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
        const __m512i odd  = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
        const __m512  sum   = _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
        const __m512  scale = _mm512_mul_ps(k.scales, _mm512_set1_ps(unit[r]));
        float *       to    = sums + r * TILE;
        _mm512_store_ps(to, _mm512_fmadd_ps(sum, scale, _mm512_load_ps(to)));
    }
}

void q8_rows_dot(FloatIn q, int32_t m, Rows k, int32_t n, int32_t d, FloatOut s, const uint8_t * next) {
    const int32_t     blocks = d / GROUP;
    Queries16         queries;
    Packed            packed;
    LinePrefetch      ahead(next, (size_t) n * k.stride);
    alignas(64) float sums[MOST_M * TILE];
    uint8_t           rest[TILE * MAX_ROW / GROUP * Q8_BLOCK];
    queries.round(q, m, d);
    for (int32_t c = 0; c < n; c += TILE) {
        const int32_t w    = n - c < TILE ? n - c : TILE;
        Rows          tile = k.from(c);
        if (w < TILE) {  // no row beyond the last one may be read
            tile = { rest, (size_t) blocks * Q8_BLOCK, Type::q8_0 };
            for (int32_t r = 0; r < TILE; r++) {
                __builtin_memcpy(rest + (size_t) r * tile.stride, k.from(c + (r < w ? r : 0)).data, tile.stride);
            }
        }
        for (int32_t r = 0; r < m; r++) {
            V::zero().store(sums + r * TILE);
        }
        for (int32_t b = 0; b < blocks; b++) {
            ahead.lines(TILE * Q8_BLOCK / LINE + 1);
            packed.load(tile.data + (size_t) b * Q8_BLOCK, tile.stride);
            split_rows(m, [&](int32_t r, auto rows) {
                const int32_t at = b * m + r;
                dot_packed<decltype(rows)::value>(queries.x + at * GROUP, queries.unit + at, packed, sums + r * TILE);
            });
        }
        for (int32_t r = 0; r < m; r++) {
            V::load(sums + r * TILE).store_first(s.row(r) + c, (size_t) w);
        }
    }
}

// Softmax weights of up to TOKENS rows, times the scales of the rows' blocks, in 16 bits.
struct Weights16 {
    static constexpr int PARTS = TOKENS / TILE;
    alignas(64) int16_t x[MOST_UNITS][TOKENS];  // [block][row]
    float               unit[MOST_UNITS];

    void round(FloatIn p, int32_t m, const uint8_t * v, size_t stride, int32_t n, int32_t blocks) {
        __m512    top[MOST_UNITS], scales[MAX_ROW / GROUP][PARTS];
        __mmask16 mask[PARTS];
        float     reciprocal[MOST_UNITS];
        for (int j = 0; j < PARTS; j++) {
            const int32_t w = n - j * TILE < 0 ? 0 : n - j * TILE < TILE ? n - j * TILE : TILE;
            mask[j]         = (__mmask16) ((1u << w) - 1);
            for (int32_t b = 0; b < blocks; b++) {
                const uint8_t * from = v + (size_t) (j * TILE) * stride + (size_t) b * Q8_BLOCK;
                scales[b][j]         = w == TILE ? tile_scales(from, stride) : first_scales(from, stride, w);
            }
        }
        const auto load = [&](int32_t r, __m512 * to) {
            KVEDGE_UNROLL
            for (int j = 0; j < PARTS; j++) {
                to[j] = _mm512_maskz_loadu_ps(mask[j], p.row(r) + j * TILE);
            }
        };
        for (int32_t r = 0; r < m; r++) {
            __m512 a[PARTS];
            load(r, a);
            for (int32_t b = 0; b < blocks; b++) {
                __m512 most = _mm512_setzero_ps();
                KVEDGE_UNROLL
                for (int j = 0; j < PARTS; j++) {
                    most = larger(most, _mm512_mul_ps(a[j], scales[b][j]));
                }
                top[b * m + r] = most;
            }
        }
        for (int32_t i = m * blocks; i % 4; i++) {
            top[i] = _mm512_setzero_ps();
        }
        find_units(top, m * blocks, unit, reciprocal);
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);  // the order of fours after packs, which works lane by lane
        for (int32_t r = 0; r < m; r++) {
            __m512 a[PARTS];
            load(r, a);
            for (int32_t b = 0; b < blocks; b++) {
                const int32_t at   = b * m + r;
                const __m512  to   = _mm512_set1_ps(reciprocal[at]);
                const auto    part = [&](int j) {
                    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_mul_ps(a[j], scales[b][j]), to));
                };
                KVEDGE_UNROLL
                for (int j = 0; j < PARTS; j += 2) {
                    const __m512i w = _mm512_packs_epi32(part(j), part(j + 1));
                    _mm512_store_si512(x[at] + j * TILE, _mm512_permutexvar_epi64(order, w));
                }
            }
        }
    }
};

// o[r] += sum of products of weights and codes of a block, over n <= TOKENS rows.
template <int M> inline void axpy_block(
    const int16_t (*p)[TOKENS], const float * units, const uint8_t * codes, size_t stride, int32_t n, FloatOut o, LinePrefetch & ahead) {
    __m512i lo[M], hi[M];
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        lo[r] = hi[r] = _mm512_setzero_si512();
    }
    for (int32_t c = 0; c < n; c += 2) {
        ahead.lines(1);
        const uint8_t * row = codes + (size_t) c * stride;
        const __m256i   x   = _mm256_loadu_si256((const __m256i *) row);
        const __m256i   y   = _mm256_loadu_si256((const __m256i *) (c + 1 < n ? row + stride : row));
        const __m512i   a   = _mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(x, y));
        const __m512i   b   = _mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(x, y));
        KVEDGE_UNROLL
        for (int r = 0; r < M; r++) {
            int32_t pair;
            __builtin_memcpy(&pair, p[r] + c, 4);
            const __m512i w = _mm512_set1_epi32(pair);
            lo[r]           = add_pairs(lo[r], a, w);
            hi[r]           = add_pairs(hi[r], b, w);
        }
    }
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {  // columns 0 to 7 and 16 to 23 lie in lo
        const __m512 unit = _mm512_set1_ps(units[r]);
        float *      to   = o.row(r);
        const __m512 a    = _mm512_cvtepi32_ps(_mm512_shuffle_i64x2(lo[r], hi[r], 0x44));
        const __m512 b    = _mm512_cvtepi32_ps(_mm512_shuffle_i64x2(lo[r], hi[r], 0xee));
        _mm512_storeu_ps(to, _mm512_fmadd_ps(a, unit, _mm512_loadu_ps(to)));
        _mm512_storeu_ps(to + V::W, _mm512_fmadd_ps(b, unit, _mm512_loadu_ps(to + V::W)));
    }
}

void q8_rows_axpy(FloatIn p, int32_t m, Rows v, int32_t n, int32_t d, FloatOut o, const uint8_t * next) {
    const int32_t blocks = d / GROUP;
    Weights16     weights;
    LinePrefetch  ahead(next, (size_t) n * v.stride);
    for (int32_t c = 0; c < n; c += TOKENS) {
        const int32_t   w    = n - c < TOKENS ? n - c : TOKENS;
        const uint8_t * rows = v.from(c).data;
        weights.round(p.at(0, c), m, rows, v.stride, w, blocks);
        for (int32_t b = 0; b < blocks; b++) {
            ahead.lines(4);
            split_rows(m, [&](int32_t r, auto part) {
                axpy_block<decltype(part)::value>(
                    weights.x + b * m + r, weights.unit + b * m + r, rows + (size_t) b * Q8_BLOCK + 2, v.stride, w,
                    o.at(r, b * GROUP), ahead);
            });
        }
    }
}

// A single query row waits for memory already: it uses float32.
void k_pairs_rows_dot(FloatIn q, int32_t m, Rows k, int32_t n, int32_t d, FloatOut s, const uint8_t * next) {
    const bool pairs = m > 1 && m <= MOST_M && k.type == Type::q8_0;
    (pairs ? q8_rows_dot : k_any_rows_dot)(q, m, k, n, d, s, next);
}

void k_pairs_rows_axpy(FloatIn p, int32_t m, Rows v, int32_t n, int32_t d, FloatOut o, const uint8_t * next) {
    const bool pairs = m > 1 && m <= MOST_M && v.type == Type::q8_0;
    (pairs ? q8_rows_axpy : k_any_rows_axpy)(p, m, v, n, d, o, next);
}

}  // namespace
}  // namespace kvedge
