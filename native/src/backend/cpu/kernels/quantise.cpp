#include "backend/cpu/kernels/quantise.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

// Puts f into out as half precision, and returns what that holds.
float put_f16(float f, uint8_t * out) {
    kernels().from_f32(Type::f16, &f, out, 1);
    kernels().to_f32(Type::f16, out, &f, 1);
    return f;
}

// x, or the nearer end of [low, high]; low for NaN, which a conversion to an integer must not meet.
float within(float x, float low, float high) { return x > low ? (x < high ? x : high) : low; }

// Codes of GROUP values side by side: the width of a code is 8 bits divided by how many share a byte.
void pack_codes(Type type, const uint8_t * codes, uint8_t * out) {
    const auto n = (int32_t) code_bytes(type), shared = GROUP / n;
    for (int32_t j = 0; j < n; j++) {
        uint8_t byte = codes[j];
        for (int32_t k = 1; k < shared; k++) {
            byte = (uint8_t) (byte | codes[j + k * n] << (8 / shared * k));
        }
        out[j] = byte;
    }
}

// Half a step goes away from zero, as in the format's reference.
void quantise_q8_0(const float * x, uint8_t * out) {
    float top = 0.0f;
    for (int32_t i = 0; i < GROUP; i++) {
        top = std::max(top, std::fabs(x[i]));
    }
    const float d = top / 127.0f, inverse = d != 0.0f ? 1.0f / d : 0.0f;
    put_f16(d, out);
    for (int32_t i = 0; i < GROUP; i++) {
        const float v = within(x[i] * inverse, -127.0f, 127.0f), whole = (float) (int) v;
        out[2 + i]    = (uint8_t) (int8_t) (whole + (float) (v - whole >= 0.5f) - (float) (v - whole <= -0.5f));
    }
}

// The value of largest size becomes -8, the one code without a counterpart. Product and sum are each rounded,
// which the conversions see to: a fused multiply-add would round once.
void quantise_q4_0(const float * x, uint8_t * out) {
    float top = 0.0f;
    for (int32_t i = 0; i < GROUP; i++) {
        top = std::fabs(x[i]) > std::fabs(top) ? x[i] : top;
    }
    const float d = top / -8.0f, inverse = d != 0.0f ? 1.0f / d : 0.0f;
    put_f16(d, out);
    uint8_t codes[GROUP];
    for (int32_t i = 0; i < GROUP; i++) {
        const auto product = (float) ((double) x[i] * (double) inverse);
        codes[i]           = (uint8_t) within((float) ((double) product + 8.5), 0.0f, 15.0f);
    }
    pack_codes(Type::q4_0, codes, out + 2);
}

// Scale and minimum of values between low and high, as they are stored.
struct Affine {
    float scale, minimum;
};

Affine put_affine(float low, float high, float largest, uint8_t * scale, uint8_t * minimum) {
    const float stored = put_f16(low, minimum);
    return { put_f16((high - low) / largest, scale), stored };
}

// Adding and taking away 1.5 * 2^23 rounds to an integer, ties to even.
uint8_t code_of(float x, const Affine & a, float largest) {
    constexpr float ROUND = 12582912.0f;
    return (uint8_t) (a.scale > 0.0f ? within((x - a.minimum) / a.scale, 0.0f, largest) + ROUND - ROUND : 0.0f);
}

float largest_code(Type type) { return code_bytes(type) == 8 ? 3.0f : 15.0f; }

void quantise_affine(Type type, const float * x, uint8_t * out) {
    const auto    ends    = std::minmax_element(x, x + GROUP);
    const float   largest = largest_code(type);
    const Affine  a       = put_affine(*ends.first, *ends.second, largest, out, out + 2);
    uint8_t       codes[GROUP];
    for (int32_t i = 0; i < GROUP; i++) {
        codes[i] = code_of(x[i], a, largest);
    }
    pack_codes(type, codes, out + 4);
}

}  // namespace

void quantise_row(Type type, const float * x, int32_t d, uint8_t * out) {
    for (int32_t i = 0; i < d; i += GROUP, x += GROUP, out += block_bytes(type)) {
        if (type == Type::q8_0) {
            quantise_q8_0(x, out);
        } else if (type == Type::q4_0) {
            quantise_q4_0(x, out);
        } else {
            quantise_affine(type, x, out);
        }
    }
}

void quantise_group(Type type, const float * x, int32_t n, int32_t d, uint8_t * out) {
    const float   largest = largest_code(type);
    const size_t  bytes   = code_bytes(type);
    for (int32_t b = 0; b < d; b += GROUP) {
        Affine channel[GROUP];
        for (int32_t i = 0; i < GROUP; i++) {
            float low = x[b + i], high = low;
            for (int32_t r = 1; r < n; r++) {
                const float v = x[(size_t) r * (size_t) d + (size_t) (b + i)];
                low           = std::min(low, v);
                high          = std::max(high, v);
            }
            channel[i] = put_affine(low, high, largest, out + 2 * (b + i), out + 2 * (d + b + i));
        }
        for (int32_t r = 0; r < n; r++) {
            const float * row = x + (size_t) r * (size_t) d + b;
            uint8_t       codes[GROUP];
            for (int32_t i = 0; i < GROUP; i++) {
                codes[i] = code_of(row[i], channel[i], largest);
            }
            pack_codes(type, codes, out + 4 * (size_t) d + ((size_t) r * (size_t) d + (size_t) b) / GROUP * bytes);
        }
    }
}

}  // namespace kvedge
