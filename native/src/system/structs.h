// Copies structs between a program and the library, which may know different versions of a struct. Each struct begins with its
// size. Only the fields that both sides know are copied (kvedge.h, "Structs").

#pragma once

#include "kvedge.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace kvedge {

// The size of a struct in the first version of kvedge.h, up to the end of its last field. No valid struct is smaller.
template <class S> struct FirstSize;
template <> struct FirstSize<kvedge_options> { static constexpr size_t value = offsetof(kvedge_options, type_v) + sizeof(kvedge_type); };
template <> struct FirstSize<kvedge_stats> { static constexpr size_t value = offsetof(kvedge_stats, compress_us) + sizeof(int64_t); };
template <> struct FirstSize<kvedge_saved> { static constexpr size_t value = offsetof(kvedge_saved, model) + 256; };
template <> struct FirstSize<kvedge_custom_scorer> { static constexpr size_t value = offsetof(kvedge_custom_scorer, user_data) + sizeof(void *); };
template <> struct FirstSize<kvedge_custom_allocator> { static constexpr size_t value = offsetof(kvedge_custom_allocator, user_data) + sizeof(void *); };
template <> struct FirstSize<kvedge_custom_reducer> { static constexpr size_t value = offsetof(kvedge_custom_reducer, user_data) + sizeof(void *); };
template <> struct FirstSize<kvedge_stage_facts> { static constexpr size_t value = sizeof(kvedge_stage_facts); };
template <> struct FirstSize<kvedge_image> { static constexpr size_t value = sizeof(kvedge_image); };

// Copies the program's struct over the defaults in `own`. False: invalid size, or a field that only a newer library knows is not
// 0 (a byte after the end of S).
template <class S> bool read_struct(const S * given, S & own) {
    if (!given || given->struct_size < FirstSize<S>::value) {
        return false;
    }
    const auto * bytes = (const unsigned char *) given;
    for (size_t i = sizeof(S); i < given->struct_size; i++) {
        if (bytes[i] != 0) {
            return false;
        }
    }
    memcpy((void *) &own, given, std::min(sizeof(S), given->struct_size));
    own.struct_size = sizeof(S);
    return true;
}

// Copies `own` to the program's struct `out` of `size` bytes. Fields that only the program knows become 0.
// False: invalid size; nothing is written.
template <class S> bool write_struct(const S & own, S * out, size_t size) {
    if (!out || size < FirstSize<S>::value) {
        return false;
    }
    memset((void *) out, 0, size);
    memcpy((void *) out, &own, std::min(sizeof(S), size));
    out->struct_size = size;
    return true;
}

}  // namespace kvedge
