// The vector type of the AVX-512 tables (kernels_impl.h).

#pragma once

#include "kernels.h"
#include "kernels_compiler.h"

// GCC 12's own AVX-512 header triggers these two warnings wherever its intrinsics are inlined.
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC diagnostic ignored "-Wuninitialized"
#    pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

namespace kvedge {
namespace {

struct V {
    static constexpr int W = 16, MR = 12, AD = 8, ACC = 24, FEW = 6;
    static constexpr bool TURNS_HALVES = true;
    static constexpr int  LANES[] = { 0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15 };
    __m512 x;

    static V load(const float * p) { return { _mm512_loadu_ps(p) }; }
    void     store(float * p) const { _mm512_storeu_ps(p, x); }
    static V load_first(const float * p, size_t n, float rest) {
        return { _mm512_mask_loadu_ps(_mm512_set1_ps(rest), (__mmask16) ((1u << n) - 1), p) };
    }
    void store_first(float * p, size_t n) const { _mm512_mask_storeu_ps(p, (__mmask16) ((1u << n) - 1), x); }
    static V set1(float a) { return { _mm512_set1_ps(a) }; }
    V kept() const {
        V v = *this;
        KVEDGE_IN_REGISTER(v.x, "v");
        return v;
    }
    static V zero() { return { _mm512_setzero_ps() }; }
    static V fma(V a, V b, V c) { return { _mm512_fmadd_ps(a.x, b.x, c.x) }; }
    static V fnma(V a, V b, V c) { return { _mm512_fnmadd_ps(a.x, b.x, c.x) }; }
    static V add(V a, V b) { return { _mm512_add_ps(a.x, b.x) }; }
    static V sub(V a, V b) { return { _mm512_sub_ps(a.x, b.x) }; }
    static V mul(V a, V b) { return { _mm512_mul_ps(a.x, b.x) }; }
    static V max(V a, V b) { return { _mm512_max_ps(a.x, b.x) }; }
    static V round(V a) { return { _mm512_roundscale_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) }; }
    static V scale2(V a, V n) { return { _mm512_scalef_ps(a.x, n.x) }; }
    float hsum() const { return _mm512_reduce_add_ps(x); }
    float hmax() const { return _mm512_reduce_max_ps(x); }
    // Adds within the 128-bit lanes first: shuffles across these lanes share their pipes with multiplications.
    static void hsum4(V a, V b, V c, V d, float * out) {
        const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a.x, b.x), _mm512_unpackhi_ps(a.x, b.x)));
        const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c.x, d.x), _mm512_unpackhi_ps(c.x, d.x)));
        const __m512  lo = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), hi = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
        const __m512  s  = _mm512_add_ps(lo, hi);
        const __m256  h  = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
    }
    static void transpose(V * x) {
        __m512 t[W];
        for (int i = 0; i < W; i += 4) {
            const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[i].x, x[i + 1].x));
            const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(x[i].x, x[i + 1].x));
            const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[i + 2].x, x[i + 3].x));
            const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(x[i + 2].x, x[i + 3].x));
            t[i]     = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
            t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
            t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
            t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
        }
        for (int j = 0; j < 4; j++) {  // 128-bit lane l of t[4 g + j] holds column 4 l + j of rows 4 g and following
            const __m512 even  = _mm512_shuffle_f32x4(t[j], t[4 + j], 0x88);
            const __m512 odd   = _mm512_shuffle_f32x4(t[j], t[4 + j], 0xdd);
            const __m512 even2 = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0x88);
            const __m512 odd2  = _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0xdd);
            x[j].x      = _mm512_shuffle_f32x4(even, even2, 0x88);
            x[4 + j].x  = _mm512_shuffle_f32x4(odd, odd2, 0x88);
            x[8 + j].x  = _mm512_shuffle_f32x4(even, even2, 0xdd);
            x[12 + j].x = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
        }
    }
    // Transposes eight columns of 32 rows of 16-bit numbers, row r at p + r * stride, to out [8][32].
    static void turn_halves(const uint8_t * p, size_t stride, uint8_t * out) {
        __m512i x[8], t[8];
        for (int j = 0; j < 8; j++) {
            const auto row = [&](size_t lane) { return _mm_loadu_si128((const __m128i *) (p + (8 * lane + (size_t) j) * stride)); };
            x[j] = _mm512_castsi128_si512(row(0));
            x[j] = _mm512_mask_broadcast_i32x4(x[j], 0x00f0, row(1));
            x[j] = _mm512_mask_broadcast_i32x4(x[j], 0x0f00, row(2));
            x[j] = _mm512_mask_broadcast_i32x4(x[j], 0xf000, row(3));
        }
        for (int j = 0; j < 4; j++) {
            t[2 * j]     = _mm512_unpacklo_epi16(x[2 * j], x[2 * j + 1]);
            t[2 * j + 1] = _mm512_unpackhi_epi16(x[2 * j], x[2 * j + 1]);
        }
        for (int j = 0; j < 8; j += 4) {
            x[j]     = _mm512_unpacklo_epi32(t[j], t[j + 2]);
            x[j + 1] = _mm512_unpackhi_epi32(t[j], t[j + 2]);
            x[j + 2] = _mm512_unpacklo_epi32(t[j + 1], t[j + 3]);
            x[j + 3] = _mm512_unpackhi_epi32(t[j + 1], t[j + 3]);
        }
        for (int j = 0; j < 4; j++) {
            _mm512_storeu_si512(out + 128 * j, _mm512_unpacklo_epi64(x[j], x[j + 4]));
            _mm512_storeu_si512(out + 128 * j + 64, _mm512_unpackhi_epi64(x[j], x[j + 4]));
        }
    }
    template <Type T> static V load16(const uint8_t * p) {
        const __m256i h = _mm256_loadu_si256((const __m256i *) p);
        if constexpr (T == Type::f16) {
            return { _mm512_cvtph_ps(h) };
        } else {
            return { _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)) };
        }
    }
    static V set1_f16(const uint8_t * p) {
        int16_t h;
        __builtin_memcpy(&h, p, 2);
        return { _mm512_cvtph_ps(_mm256_set1_epi16(h)) };
    }
    static V load_i8(const uint8_t * p) {
        return { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) p))) };
    }
    // Codes below 16 become floats by a look-up that reads only the low four bits of a lane.
    template <int BITS> static void codes(const uint8_t * p, V * x) {
        if constexpr (BITS == 8) {
            for (int j = 0; j < 2; j++) {
                x[j] = load_i8(p + 16 * j);
            }
        } else if constexpr (BITS == 4) {
            const __m512  table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const __m512i lanes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) p));
            x[0].x              = _mm512_permutexvar_ps(lanes, table);
            x[1].x              = _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, 4), table);
        } else {
            const __m512  table = _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
            const __m128i bytes = _mm_loadl_epi64((const __m128i *) p);
            const __m512i lanes = _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(bytes, bytes));
            const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
            const __m512i first = _mm512_srlv_epi32(lanes, shift);
            x[0].x              = _mm512_permutexvar_ps(first, table);
            x[1].x              = _mm512_permutexvar_ps(_mm512_srli_epi32(first, 4), table);
        }
    }
    // Returns eight lanes of twelve bits, each in the two bytes that hold it.
    static __m128i twelve_bits(const uint8_t * p) {
        int last;
        __builtin_memcpy(&last, p + 8, 4);
        const __m128i bytes = _mm_insert_epi32(_mm_loadl_epi64((const __m128i *) p), last, 2);
        return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11));
    }
    // Levels of 3-bit codes. The look-up also reads a fourth bit, on which nothing depends: the table repeats.
    template <class S> static void levels(const uint8_t * p, V * x) {
        const __m256i half  = _mm256_loadu_si256((const __m256i *) S::levels);
        const __m512  table = _mm512_cvtepi32_ps(_mm512_broadcast_i64x4(half));
        const __m512i shift = _mm512_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4, 3, 7, 3, 7, 3, 7, 3, 7);
        const __m512i pairs = _mm512_cvtepu16_epi32(_mm256_broadcastsi128_si256(twelve_bits(p)));
        const __m512i lanes = _mm512_srlv_epi32(pairs, shift);
        x[0].x              = _mm512_permutexvar_ps(lanes, table);
        x[1].x              = _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, 6), table);
    }
    void store_f16(uint8_t * p) const {
        _mm256_storeu_si256((__m256i *) p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};

}  // namespace
}  // namespace kvedge
