// The storage types. The build lists the files of storage/, one per type, in rows/storage/members.h.

#pragma once

#include "rows/format.h"
#include "rows/storage/members.h"

namespace kvedge {

// The storage type of rows: the type's number, plus flags. GROUPED: keys of a group share a scale per channel. ROTATED_WIDE (keys)
// and ROTATED (values): rows are rotated before they are quantised.
#define KVEDGE_NUMBER(name) name = storage::name::number,
enum class Type : int32_t { KVEDGE_TYPES(KVEDGE_NUMBER) };
constexpr int32_t GROUPED = 1 << 16, ROTATED_WIDE = 1 << 17, ROTATED = 1 << 18, MOST_TYPES = 64;

// The compile-time properties of a type: Traits<Type::q8_0> derives from storage::q8_0.
template <Type> struct Traits;
#define KVEDGE_TRAITS(name) template <> struct Traits<Type::name> : storage::name { static constexpr Type value = Type::name; };
KVEDGE_TYPES(KVEDGE_TRAITS)

// The properties of a type that code reads at run time.
struct Format {
    const char * name;
    size_t       value_bytes, code_bytes;  // bytes of a number of a plain type; bytes of GROUP codes
    bool         minimum, residual;
    int          bits, lowest, highest;
};

template <class S> constexpr Format format_of(const char * name) {
    return { name, S::value_bytes, S::code_bytes, S::minimum, S::residual, S::bits, S::lowest, S::highest };
}

// The formats of all types, by type number, without gaps. The entry after the last type has the name NULL.
struct Formats {
    Format of[MOST_TYPES] = {};

    constexpr Formats() {
#define KVEDGE_FORMAT(name) of[storage::name::number] = format_of<storage::name>(#name);
        KVEDGE_TYPES(KVEDGE_FORMAT)
    }
};
inline constexpr Formats FORMATS;

constexpr int32_t        type_number(Type t) { return (int32_t) t & (GROUPED - 1); }
constexpr const Format & format(Type t) { return FORMATS.of[type_number(t)]; }

// Calls f with the Traits of a type, whose member `value` is the type without its flags.
template <class F> inline void with_type(Type t, const F & f) {
#define KVEDGE_CASE(name) case Type::name: f(Traits<Type::name>()); break;
    switch ((Type) type_number(t)) { KVEDGE_TYPES(KVEDGE_CASE) }
}

constexpr bool is_quantised(Type t) { return format(t).code_bytes > 0; }
constexpr bool is_grouped(Type t) { return ((int32_t) t & GROUPED) != 0; }  // rows of a group share scales
constexpr bool is_rotated(Type t) { return ((int32_t) t & (ROTATED_WIDE | ROTATED)) != 0; }
constexpr bool has_minimum(Type t) { return format(t).minimum; }

// of_keys: returns the type of keys, with its flag GROUPED if needed. plain_type: returns the type of rows before quantisation.
constexpr Type of_keys(Type t) { return format(t).residual ? (Type) ((int32_t) t | GROUPED) : t; }
constexpr Type plain_type(Type t) { return is_quantised(t) ? Type::f16 : t; }

// Rotation multiplies each stretch of a row by a normalised Hadamard matrix in Sylvester's order (its own inverse), as llama.cpp
// does for quantised caches. It spreads a large channel over the stretch. rotation() returns the stretch: for values 64 numbers, for
// keys the largest power of two that divides d (a multiple of 64); 0: rows are not rotated.
constexpr int32_t ROTATION = 64, MAX_HEAD_SIZE = 512;  // MAX_HEAD_SIZE: largest d_k and d_v
constexpr int32_t rotation(Type t, int32_t d) {
    return ((int32_t) t & ROTATED_WIDE) != 0 ? d & -d : ((int32_t) t & ROTATED) != 0 ? ROTATION : 0;
}
constexpr Type rotated_keys(Type t) { return (Type) ((int32_t) t | ROTATED_WIDE); }
constexpr Type rotated_values(Type t) { return (Type) ((int32_t) t | ROTATED); }
constexpr Type unrotated(Type t) { return (Type) ((int32_t) t & ~(ROTATED_WIDE | ROTATED)); }

constexpr size_t type_size(Type t) { return format(t).value_bytes; }    // bytes of a number of a plain type
constexpr size_t code_bytes(Type t) { return format(t).code_bytes; }    // bytes of GROUP codes
constexpr size_t code_offset(Type t) { return has_minimum(t) ? 4 : 2; }  // bytes from the start of a block to its codes

// Returns the bytes of one block: GROUP codes, the scale, and the minimum if the type has one.
constexpr size_t block_bytes(Type t) { return code_offset(t) + code_bytes(t); }

// Returns the bytes of a row of d values. For a grouped type, this is 1/GROUP of a full group.
constexpr size_t row_bytes(Type t, int32_t d) {
    return is_quantised(t) ? (size_t) (d / GROUP) * block_bytes(t) : (size_t) d * type_size(t);
}

}  // namespace kvedge
