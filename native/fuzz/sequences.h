// Shapes and storage types of the sequences that the session target reads, and its seeds are made of.

#pragma once

#include "rows/rows.h"
#include "plan/storage.h"
#include "fuzz/input.h"

namespace kvedge::fuzz {

struct Kind {
    std::vector<LayerShape> shapes;
    Storage                 storage;
};

constexpr int32_t KINDS = 8;

// f16, f32, f32:bf16, and the quantised types, whose heads have multiples of 32 channels.
inline Kind kind_of(int32_t i) {
    const int32_t types[KINDS][2] = { { 0, 0 }, { 2, 2 }, { 2, 1 }, { 3, 3 }, { 4, 4 }, { 5, 5 }, { 6, 6 }, { 3, 5 } };
    const bool    blocks = i >= 3;
    Kind          out;
    out.shapes = blocks ? std::vector<LayerShape>{ { 0, 2, 2, 32, 32 }, { 3, 2, 1, 32, 64 } }
                        : std::vector<LayerShape>{ { 0, 2, 1, 8, 16 }, { 3, 2, 2, 8, 8 } };
    REQUIRE(make_storage(types[i][0], types[i][1], out.storage));
    return out;
}

}  // namespace kvedge::fuzz
