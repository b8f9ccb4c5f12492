// Plain C++ for processors without a table of their own; the compiler vectorises the fixed-size loops where it can.

#include "kernels.h"
#include "kernels_compiler.h"

namespace kvedge {
namespace {

struct V;
float lane_from_f16(const uint8_t * p);
float lane_from_bf16(const uint8_t * p);
void  lane_to_f16(float f, uint8_t * p);

struct V {
    static constexpr int W = 4, MR = 4, AD = 4, ACC = 12, FEW = 6;
    static constexpr bool TURNS_HALVES = false;
    static constexpr int  LANES[] = { 0, 1, 2, 3 };
    float x[W];

    template <class F> static V each(F f) {
        V v;
        for (int i = 0; i < W; i++) {
            v.x[i] = f(i);
        }
        return v;
    }
    static V load(const float * p) { return each([=](int i) { return p[i]; }); }
    void     store(float * p) const {
        for (int i = 0; i < W; i++) {
            p[i] = x[i];
        }
    }
    static V load_first(const float * p, size_t n, float rest) { return load_lanes<V>(p, n, rest); }
    void     store_first(float * p, size_t n) const { store_lanes(*this, p, n); }
    static V set1(float a) { return each([=](int) { return a; }); }
    V kept() const { return *this; }
    static V zero() { return set1(0.0f); }
    static V fma(const V & a, const V & b, const V & c) { return each([&](int i) { return scalar_fma(a.x[i], b.x[i], c.x[i]); }); }
    static V fnma(const V & a, const V & b, const V & c) { return each([&](int i) { return c.x[i] - a.x[i] * b.x[i]; }); }
    static V add(const V & a, const V & b) { return each([&](int i) { return a.x[i] + b.x[i]; }); }
    static V sub(const V & a, const V & b) { return each([&](int i) { return a.x[i] - b.x[i]; }); }
    static V mul(const V & a, const V & b) { return each([&](int i) { return a.x[i] * b.x[i]; }); }
    static V max(const V & a, const V & b) { return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
    static V round(const V & a) { return each([&](int i) { return __builtin_floorf(a.x[i] + 0.5f); }); }
    static V scale2(const V & a, const V & n) {
        return each([&](int i) {
            const uint32_t bits = (uint32_t) ((int32_t) n.x[i] + 127) << 23;
            float          f;
            __builtin_memcpy(&f, &bits, 4);
            return a.x[i] * f;
        });
    }
    float hsum() const { return (x[0] + x[1]) + (x[2] + x[3]); }
    float hmax() const {
        const float a = x[0] > x[1] ? x[0] : x[1];
        const float b = x[2] > x[3] ? x[2] : x[3];
        return a > b ? a : b;
    }
    static void hsum4(const V & a, const V & b, const V & c, const V & d, float * out) {
        out[0] = a.hsum();
        out[1] = b.hsum();
        out[2] = c.hsum();
        out[3] = d.hsum();
    }
    static void transpose(V * x) {
        for (int i = 0; i < W; i++) {
            for (int j = 0; j < i; j++) {
                const float other = x[i].x[j];
                x[i].x[j]         = x[j].x[i];
                x[j].x[i]         = other;
            }
        }
    }
    template <Type T> static V load16(const uint8_t * p) {
        return each([=](int i) { return T == Type::f16 ? lane_from_f16(p + 2 * i) : lane_from_bf16(p + 2 * i); });
    }
    static V set1_f16(const uint8_t * p) { return set1(lane_from_f16(p)); }
    static V load_i8(const uint8_t * p) { return each([=](int i) { return (float) (int8_t) p[i]; }); }
    template <int BITS> static void codes(const uint8_t * p, V * x) {
        for (int i = 0; i < GROUP; i++) {
            x[i / W].x[i % W] = (float) Packed<BITS>::code(p, i);
        }
    }
    void store_f16(uint8_t * p) const {
        for (int i = 0; i < W; i++) {
            lane_to_f16(x[i], p + 2 * i);
        }
    }
};

}  // namespace
}  // namespace kvedge

#include "kernels_impl.h"

namespace kvedge {
namespace {

float lane_from_f16(const uint8_t * p) { return scalar_load(Type::f16, p, 0); }
float lane_from_bf16(const uint8_t * p) { return scalar_load(Type::bf16, p, 0); }
void  lane_to_f16(float f, uint8_t * p) {
    const uint16_t h = scalar_to_f16(f);
    __builtin_memcpy(p, &h, 2);
}

}  // namespace

const Kernels * kernels_generic() {
    static constexpr Kernels table = make_table("generic");
    return &table;
}

}  // namespace kvedge
