// What a file of storage/ says of the storage type that it is named after, in a struct of that name: its number in files and
// in C, the next one that is free, and what the structs here leave open. All else learns of it from there (rows/types.h).

#pragma once

#include <cstddef>
#include <cstdint>

namespace kvedge {

constexpr int32_t GROUP = 32;  // values that share a scale

// Plain numbers, which every table of kernels reads and writes by itself.
template <int32_t NUMBER, size_t BYTES> struct Plain {
    static constexpr int32_t number      = NUMBER;
    static constexpr size_t  value_bytes = BYTES, code_bytes = 0;
    static constexpr bool    minimum = false, residual = false, looked_up = false;
    static constexpr int     bits = 0, lowest = 0, highest = 0;
};

namespace storage {

struct f16 : Plain<0, 2> {};
struct bf16 : Plain<1, 2> {};
struct f32 : Plain<2, 4> {};

}  // namespace storage

// Up to GROUP values as codes: value i is scale * code + minimum, both of these in half precision.
struct Coded {
    uint16_t scale, minimum;
    uint8_t  codes[GROUP];  // as `pack` takes them
};

// A type whose values lie in blocks of a row: a scale, a minimum where the type has one, and GROUP codes. Beside what is here
// it has
//   code_bytes, lowest, highest   bytes of GROUP codes, the least code and the largest
//   code(p, i)                    code i of those at p, from -128 to 127
//   pack(codes, p)                the way back, but for a looked-up type's, whose codes are numbers of levels
//   quantise(x, n, out)           of n <= GROUP finite values, as the type's format or paper defines its rounding
struct Blocks {
    static constexpr size_t value_bytes = 0;
    static constexpr bool   minimum = false;
    // As KIVI has it: keys share scale and minimum per channel with those of GROUP rows, which begin with what they share, and
    // wait until there are as many; the newest RESIDUAL values wait, too. Takes a minimum.
    static constexpr bool residual = false;
    static constexpr int  bits     = 0;  // 8, 4 or 2 where codes lie as in Packed, which vectors read; 0: only code() does
    static constexpr int  zero     = 0;  // the code in memory that stands for 0
    static constexpr bool looked_up = false;  // code() is one of levels[8], which vectors find as it lies in storage::tq3
};

// Codes of 8 bits with a sign, or of 4 or 2 without: byte j of n holds, from its lowest bits on, codes j, j + n, j + 2 n ...
template <int BITS, int ZERO = 0> struct Packed : Blocks {
    static constexpr size_t code_bytes = (size_t) GROUP * BITS / 8;
    static constexpr int    bits = BITS, zero = ZERO;
    static constexpr int    highest = BITS == 8 ? 127 : (1 << BITS) - 1 - ZERO, lowest = BITS == 8 ? -127 : -ZERO;

    static constexpr int code(const uint8_t * p, int i) {
        constexpr int n = (int) code_bytes;
        return BITS == 8 ? (int) (int8_t) p[i] : (p[i % n] >> (i / n * BITS) & ((1 << BITS) - 1)) - ZERO;
    }
    static void pack(const uint8_t * codes, uint8_t * p) {
        for (size_t j = 0; j < code_bytes; j++) {
            int byte = 0;
            for (size_t k = 0; k < GROUP / code_bytes; k++) {
                byte |= codes[j + k * code_bytes] << (BITS * (int) k);
            }
            p[j] = (uint8_t) byte;
        }
    }
};

// Puts f into out as half precision, and returns what that holds.
float put_half(float f, uint16_t & out);

// x, or the nearer end of [low, high]; low for NaN, which a conversion to an integer must not meet.
// Two choices after each other, which vectors can take.
inline float within(float x, float low, float high) {
    const float above = x > low ? x : low;
    return above < high ? above : high;
}

}  // namespace kvedge
