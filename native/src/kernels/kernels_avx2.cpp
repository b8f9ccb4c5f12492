#include "kernels.h"
#include "kernels_compiler.h"

#include <immintrin.h>

namespace kvedge {
namespace {

struct V {
    static constexpr int W = 8, MR = 6, AD = 4, ACC = 12, FEW = 1 << 30;
    static constexpr bool TURNS_HALVES = true;
    static constexpr int  LANES[] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    __m256 x;

    static V load(const float * p) { return { _mm256_loadu_ps(p) }; }
    void     store(float * p) const { _mm256_storeu_ps(p, x); }
    static __m256i first(size_t n) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32((int) n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    static V load_first(const float * p, size_t n, float rest) {
        return { _mm256_blendv_ps(_mm256_set1_ps(rest), _mm256_maskload_ps(p, first(n)), _mm256_castsi256_ps(first(n))) };
    }
    void store_first(float * p, size_t n) const { _mm256_maskstore_ps(p, first(n), x); }
    static V set1(float a) { return { _mm256_set1_ps(a) }; }
    V kept() const {
        V v = *this;
        KVEDGE_IN_REGISTER(v.x, "x");
        return v;
    }
    static V zero() { return { _mm256_setzero_ps() }; }
    static V fma(V a, V b, V c) { return { _mm256_fmadd_ps(a.x, b.x, c.x) }; }
    static V fnma(V a, V b, V c) { return { _mm256_fnmadd_ps(a.x, b.x, c.x) }; }
    static V add(V a, V b) { return { _mm256_add_ps(a.x, b.x) }; }
    static V sub(V a, V b) { return { _mm256_sub_ps(a.x, b.x) }; }
    static V mul(V a, V b) { return { _mm256_mul_ps(a.x, b.x) }; }
    static V max(V a, V b) { return { _mm256_max_ps(a.x, b.x) }; }
    static V round(V a) { return { _mm256_round_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) }; }
    static V scale2(V a, V n) {  // adds n to the exponent, which stays in range (v_exp)
        return { _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.x), _mm256_slli_epi32(_mm256_cvtps_epi32(n.x), 23))) };
    }
    float hsum() const {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        s        = _mm_add_ps(s, _mm_movehl_ps(s, s));
        s        = _mm_add_ss(s, _mm_movehdup_ps(s));
        return _mm_cvtss_f32(s);
    }
    float hmax() const {
        __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        s        = _mm_max_ps(s, _mm_movehl_ps(s, s));
        s        = _mm_max_ss(s, _mm_movehdup_ps(s));
        return _mm_cvtss_f32(s);
    }
    static void hsum4(V a, V b, V c, V d, float * out) {
        const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a.x, b.x), _mm256_hadd_ps(c.x, d.x));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
    }
    static void transpose(V * x) {
        __m256 t[W];
        for (int i = 0; i < W; i += 4) {
            const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(x[i].x, x[i + 1].x));
            const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(x[i].x, x[i + 1].x));
            const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(x[i + 2].x, x[i + 3].x));
            const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(x[i + 2].x, x[i + 3].x));
            t[i]     = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
            t[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
            t[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
            t[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
        }
        for (int j = 0; j < 4; j++) {
            x[j].x     = _mm256_permute2f128_ps(t[j], t[4 + j], 0x20);
            x[4 + j].x = _mm256_permute2f128_ps(t[j], t[4 + j], 0x31);
        }
    }
    // Transposes eight columns of 16 rows of 16-bit numbers, row r at p + r * stride, to out [8][16].
    static void turn_halves(const uint8_t * p, size_t stride, uint8_t * out) {
        __m256i x[8], t[8];
        for (int j = 0; j < 8; j++) {
            const uint8_t * row = p + (size_t) j * stride;
            x[j] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) row)),
                                           _mm_loadu_si128((const __m128i *) (row + 8 * stride)), 1);
        }
        for (int j = 0; j < 4; j++) {
            t[2 * j]     = _mm256_unpacklo_epi16(x[2 * j], x[2 * j + 1]);
            t[2 * j + 1] = _mm256_unpackhi_epi16(x[2 * j], x[2 * j + 1]);
        }
        for (int j = 0; j < 8; j += 4) {
            x[j]     = _mm256_unpacklo_epi32(t[j], t[j + 2]);
            x[j + 1] = _mm256_unpackhi_epi32(t[j], t[j + 2]);
            x[j + 2] = _mm256_unpacklo_epi32(t[j + 1], t[j + 3]);
            x[j + 3] = _mm256_unpackhi_epi32(t[j + 1], t[j + 3]);
        }
        for (int j = 0; j < 4; j++) {
            _mm256_storeu_si256((__m256i *) (out + 64 * j), _mm256_unpacklo_epi64(x[j], x[j + 4]));
            _mm256_storeu_si256((__m256i *) (out + 64 * j + 32), _mm256_unpackhi_epi64(x[j], x[j + 4]));
        }
    }
    template <Type T> static V load16(const uint8_t * p) {
        const __m128i h = _mm_loadu_si128((const __m128i *) p);
        if constexpr (T == Type::f16) {
            return { _mm256_cvtph_ps(h) };
        } else {
            return { _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)) };
        }
    }
    static V set1_f16(const uint8_t * p) {
        int16_t h;
        __builtin_memcpy(&h, p, 2);
        return { _mm256_cvtph_ps(_mm_set1_epi16(h)) };
    }
    static V load_i8(const uint8_t * p) {
        return { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p))) };
    }
    template <int BITS> static void codes(const uint8_t * p, V * x) {
        if constexpr (BITS == 8) {
            for (int j = 0; j < 4; j++) {
                x[j] = load_i8(p + 8 * j);
            }
        } else if constexpr (BITS == 4) {
            const __m256i mask = _mm256_set1_epi32(15);
            for (int j = 0; j < 2; j++) {
                const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) (p + 8 * j)));
                x[j].x              = _mm256_cvtepi32_ps(_mm256_and_si256(lanes, mask));
                x[j + 2].x          = _mm256_cvtepi32_ps(_mm256_srli_epi32(lanes, 4));
            }
        } else {
            const __m256i mask  = _mm256_set1_epi32(3);
            const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p));
            x[0].x              = _mm256_cvtepi32_ps(_mm256_and_si256(lanes, mask));
            x[1].x              = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(lanes, 2), mask));
            x[2].x              = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(lanes, 4), mask));
            x[3].x              = _mm256_cvtepi32_ps(_mm256_srli_epi32(lanes, 6));
        }
    }
    // Returns eight lanes of twelve bits, each in the two bytes that hold it. levels() looks up 3-bit codes in them: the look-up reads the
    // low three bits of a lane and no others.
    static __m128i twelve_bits(const uint8_t * p) {
        int last;
        __builtin_memcpy(&last, p + 8, 4);
        const __m128i bytes = _mm_insert_epi32(_mm_loadl_epi64((const __m128i *) p), last, 2);
        return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11));
    }
    template <class S> static void levels(const uint8_t * p, V * x) {
        const __m256  table = _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *) S::levels));
        const __m256i shift = _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4);
        const __m256i lanes = _mm256_srlv_epi32(_mm256_cvtepu16_epi32(twelve_bits(p)), shift);
        x[0].x              = _mm256_permutevar8x32_ps(table, lanes);
        x[1].x              = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(lanes, 3));
        x[2].x              = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(lanes, 6));
        x[3].x              = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(lanes, 9));
    }
    void store_f16(uint8_t * p) const {
        _mm_storeu_si128((__m128i *) p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};

}  // namespace
}  // namespace kvedge

#include "kernels_impl.h"

namespace kvedge {

const Kernels * kernels_avx2() {
    static constexpr Kernels table = make_table("avx2");
    return &table;
}

}  // namespace kvedge
