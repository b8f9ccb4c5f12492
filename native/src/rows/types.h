// The storage types, from the files of storage/ that the build lists.

#pragma once

#include "rows/format.h"
#include "rows/storage/members.h"

namespace kvedge {

// How rows of keys or values lie in memory: the type's number, of keys that share scales per channel GROUPED with it, and of
// rows that are rotated before they are quantised ROTATED_WIDE (keys) or ROTATED (values).
#define KVEDGE_NUMBER(name) name = storage::name::number,
enum class Type : int32_t { KVEDGE_TYPES(KVEDGE_NUMBER) };
constexpr int32_t GROUPED = 1 << 16, ROTATED_WIDE = 1 << 17, ROTATED = 1 << 18, MOST_TYPES = 64;

// What the file of a type says: Traits<Type::q8_0> is storage::q8_0.
template <Type> struct Traits;
#define KVEDGE_TRAITS(name) template <> struct Traits<Type::name> : storage::name { static constexpr Type value = Type::name; };
KVEDGE_TYPES(KVEDGE_TRAITS)

// The part of it that is looked up at run time.
struct Format {
    const char * name;
    size_t       value_bytes, code_bytes;  // of a plain number; of GROUP codes
    bool         minimum, residual;
    int          bits, lowest, highest;
};

template <class S> constexpr Format format_of(const char * name) {
    return { name, S::value_bytes, S::code_bytes, S::minimum, S::residual, S::bits, S::lowest, S::highest };
}

// By number, without gaps; the name of the one past the last is NULL.
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

// Calls f with the Traits of a type, grouped or not, whose `value` is the type.
template <class F> inline void with_type(Type t, const F & f) {
#define KVEDGE_CASE(name) case Type::name: f(Traits<Type::name>()); break;
    switch ((Type) type_number(t)) { KVEDGE_TYPES(KVEDGE_CASE) }
}

constexpr bool is_quantised(Type t) { return format(t).code_bytes > 0; }
constexpr bool is_grouped(Type t) { return ((int32_t) t & GROUPED) != 0; }  // rows share scales with others
constexpr bool is_rotated(Type t) { return ((int32_t) t & (ROTATED_WIDE | ROTATED)) != 0; }
constexpr bool has_minimum(Type t) { return format(t).minimum; }

// What keys of a type are stored as, and what they and values are until they are quantised.
constexpr Type of_keys(Type t) { return format(t).residual ? (Type) ((int32_t) t | GROUPED) : t; }
constexpr Type plain_type(Type t) { return is_quantised(t) ? Type::f16 : t; }

// Rotated: every so many values of a row are multiplied by a normalised Hadamard matrix in Sylvester's order, which is its own
// inverse, as llama.cpp does for its quantised caches. It spreads a channel that stands out over those beside it. Of values 64,
// of keys the largest power of two that divides d, a multiple of 64; 0: the rows are as they are.
constexpr int32_t ROTATION = 64, MAX_HEAD_SIZE = 512;  // the latter of keys and of values
constexpr int32_t rotation(Type t, int32_t d) {
    return ((int32_t) t & ROTATED_WIDE) != 0 ? d & -d : ((int32_t) t & ROTATED) != 0 ? ROTATION : 0;
}
constexpr Type rotated_keys(Type t) { return (Type) ((int32_t) t | ROTATED_WIDE); }
constexpr Type rotated_values(Type t) { return (Type) ((int32_t) t | ROTATED); }
constexpr Type unrotated(Type t) { return (Type) ((int32_t) t & ~(ROTATED_WIDE | ROTATED)); }

constexpr size_t type_size(Type t) { return format(t).value_bytes; }    // of a plain number
constexpr size_t code_bytes(Type t) { return format(t).code_bytes; }    // of GROUP codes
constexpr size_t code_offset(Type t) { return has_minimum(t) ? 4 : 2; }  // from the beginning of a block

// Bytes of GROUP values with what they need to be read: of a row's block, or of a row's share of a group.
constexpr size_t block_bytes(Type t) { return code_offset(t) + code_bytes(t); }

// Bytes of a row of d values; of a grouped type, of a row and its share of what the group has in common.
constexpr size_t row_bytes(Type t, int32_t d) {
    return is_quantised(t) ? (size_t) (d / GROUP) * block_bytes(t) : (size_t) d * type_size(t);
}

}  // namespace kvedge
