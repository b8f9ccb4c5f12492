// The shapes and storage types of sequences in fuzz_session.cpp and its seeds (make_seeds.cpp).

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

// Returns kind i: 0 to 2 are f16, f32 and f32:bf16; the others are quantised, with head sizes that are multiples of 32.
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
