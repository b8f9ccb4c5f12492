// The base structs of storage types. Each quantised type has a file storage/NAME.h with a struct NAME: its number in files and in
// C (the next free one), and the members that the base struct lacks. rows/types.h collects the types for the rest of the library.

#pragma once

#include <cstddef>
#include <cstdint>

namespace kvedge {

constexpr int32_t GROUP = 32;  // number of values that share a scale

// Base of plain types: floating-point numbers, which every kernel table reads and writes directly.
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

// Up to GROUP values as codes: value i is scale * code(i) + minimum. scale and minimum are in half precision.
struct Coded {
    uint16_t scale, minimum;
    uint8_t  codes[GROUP];  // in the form that `pack` takes
};

// Base of quantised types. A row consists of blocks: a scale, a minimum if the type has one, and GROUP codes. The derived struct
// adds
//   code_bytes, lowest, highest   bytes of GROUP codes; smallest and largest code
//   code(p, i)                    returns code i of the codes in memory at p, from -128 to 127
//   pack(codes, p)                writes codes to memory at p; for a looked_up type, codes are indices of levels
//   quantise(x, n, out)           rounds n <= GROUP finite values as the type's format or paper defines
struct Blocks {
    static constexpr size_t value_bytes = 0;
    static constexpr bool   minimum = false;
    // As in KIVI: GROUP rows of keys form a group, which begins with a scale and a minimum per channel. Keys stay plain until their
    // group is full; the newest RESIDUAL values stay plain, too. Needs a minimum.
    static constexpr bool residual = false;
    static constexpr int  bits     = 0;  // 8, 4 or 2: codes lie as in Packed, for vector kernels; 0: only code() reads them
    static constexpr int  zero     = 0;  // the stored code that stands for 0
    static constexpr bool looked_up = false;  // code() returns one of levels[8]; vector kernels expect the layout of storage::tq3
};

// Codes with 8 bits (signed), or 4 or 2 bits (unsigned). Byte j of n holds, from its lowest bits on, codes j, j + n, j + 2 n ...
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

// Rounds f to half precision, writes the bits to out, and returns the rounded number.
float put_half(float f, uint16_t & out);

// Returns x limited to [low, high], and low for NaN, because NaN must not be converted to an integer.
// Written as two selections, so that compilers can vectorise it.
inline float within(float x, float low, float high) {
    const float above = x > low ? x : low;
    return above < high ? above : high;
}

}  // namespace kvedge
