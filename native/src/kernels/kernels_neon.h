// The vector type of the NEON tables (kernels_impl.h).

#pragma once

#include "kernels.h"
#include "kernels_compiler.h"

#include <arm_neon.h>

namespace kvedge {
namespace {

struct V {
    static constexpr int W = 4, MR = 8, AD = 8, ACC = 24, FEW = 6;
    static constexpr bool TURNS_HALVES = false;
    static constexpr int  LANES[] = { 0, 1, 2, 3 };
    float32x4_t x;

    static V load(const float * p) { return { vld1q_f32(p) }; }
    void     store(float * p) const { vst1q_f32(p, x); }
    static V load_first(const float * p, size_t n, float rest) { return load_lanes<V>(p, n, rest); }
    void     store_first(float * p, size_t n) const { store_lanes(*this, p, n); }
    static V set1(float a) { return { vdupq_n_f32(a) }; }
    V kept() const {
        V v = *this;
        KVEDGE_IN_REGISTER(v.x, "w");
        return v;
    }
    static V zero() { return { vdupq_n_f32(0.0f) }; }
    static V fma(V a, V b, V c) { return { vfmaq_f32(c.x, a.x, b.x) }; }
    static V fnma(V a, V b, V c) { return { vfmsq_f32(c.x, a.x, b.x) }; }
    static V add(V a, V b) { return { vaddq_f32(a.x, b.x) }; }
    static V sub(V a, V b) { return { vsubq_f32(a.x, b.x) }; }
    static V mul(V a, V b) { return { vmulq_f32(a.x, b.x) }; }
    static V max(V a, V b) { return { vmaxq_f32(a.x, b.x) }; }
    static V round(V a) { return { vrndnq_f32(a.x) }; }
    static V scale2(V a, V n) {
        const int32x4_t e = vaddq_s32(vcvtq_s32_f32(n.x), vdupq_n_s32(127));
        return { vmulq_f32(a.x, vreinterpretq_f32_s32(vshlq_n_s32(e, 23))) };
    }
    float hsum() const { return vaddvq_f32(x); }
    float hmax() const { return vmaxvq_f32(x); }
    static void hsum4(V a, V b, V c, V d, float * out) {
        vst1q_f32(out, vpaddq_f32(vpaddq_f32(a.x, b.x), vpaddq_f32(c.x, d.x)));
    }
    static void transpose(V * x) {
        const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(x[0].x, x[1].x));
        const float64x2_t b = vreinterpretq_f64_f32(vtrn2q_f32(x[0].x, x[1].x));
        const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(x[2].x, x[3].x));
        const float64x2_t d = vreinterpretq_f64_f32(vtrn2q_f32(x[2].x, x[3].x));
        x[0].x = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
        x[1].x = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
        x[2].x = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
        x[3].x = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
    }
    template <Type T> static V load16(const uint8_t * p) {
        const uint16x4_t h = vreinterpret_u16_u8(vld1_u8(p));
        if constexpr (T == Type::f16) {
            return { vcvt_f32_f16(vreinterpret_f16_u16(h)) };
        } else {
            return { vreinterpretq_f32_u32(vshll_n_u16(h, 16)) };
        }
    }
    static V set1_f16(const uint8_t * p) {
        uint16_t h;
        __builtin_memcpy(&h, p, 2);
        return { vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))) };
    }
    static V load_i8(const uint8_t * p) {
        uint32_t four;
        __builtin_memcpy(&four, p, 4);
        const int16x8_t w = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)));
        return { vcvtq_f32_s32(vmovl_s16(vget_low_s16(w))) };
    }
    static void widen_u8(uint8x8_t c, V * x) {
        const uint16x8_t w = vmovl_u8(c);
        x[0].x             = vcvtq_f32_u32(vmovl_u16(vget_low_u16(w)));
        x[1].x             = vcvtq_f32_u32(vmovl_u16(vget_high_u16(w)));
    }
    template <int BITS> static void codes(const uint8_t * p, V * x) {
        if constexpr (BITS == 8) {
            for (int j = 0; j < 4; j++) {
                const int16x8_t w = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p + 8 * j)));
                x[2 * j].x        = vcvtq_f32_s32(vmovl_s16(vget_low_s16(w)));
                x[2 * j + 1].x    = vcvtq_f32_s32(vmovl_s16(vget_high_s16(w)));
            }
        } else if constexpr (BITS == 4) {
            for (int j = 0; j < 2; j++) {
                const uint8x8_t c = vld1_u8(p + 8 * j);
                widen_u8(vand_u8(c, vdup_n_u8(15)), x + 2 * j);
                widen_u8(vshr_n_u8(c, 4), x + 4 + 2 * j);
            }
        } else {
            const uint8x8_t c = vld1_u8(p), mask = vdup_n_u8(3);
            widen_u8(vand_u8(c, mask), x);
            widen_u8(vand_u8(vshr_n_u8(c, 2), mask), x + 2);
            widen_u8(vand_u8(vshr_n_u8(c, 4), mask), x + 4);
            widen_u8(vshr_n_u8(c, 6), x + 6);
        }
    }
    void store_f16(uint8_t * p) const { vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32(x))); }
};

}  // namespace
}  // namespace kvedge

#include "kernels_impl.h"
