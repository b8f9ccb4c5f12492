// Positions of a sequence that nears the length that its model was trained for are made smaller: tokens move, and their keys
// turn with them. tests/test_renumber.py has the definition.
//
// A token's new position is the same in all layers and heads, although these hold different tokens: the positions of a sequence
// are also llama.cpp's, and those of the next queries.

#pragma once

#include "sequence/sequence.h"

#include <vector>

namespace kvedge {

// Positions that the tokens of a store would take.
struct Moved {
    std::vector<int32_t> pos;            // per token entered so far
    int32_t              next = 0;       // of the token to come
};

// So that the next token comes at position `most` instead of `next`. whole: the sequence's whole rows, or NULL. Positions that no
// token takes which a head or `whole` holds are gaps. The oldest gaps are closed, as many as must be: all later distances stay.
// Where there are too few, the last most / 2 positions keep their distances, and all before share the others in their order,
// several tokens one position if need be. Distances never grow.
// images_extend: an image's tokens share a position, and take all up to the next token's (M-RoPE).
// The store's positions ascend and lie before `next`; most >= 1. Throws std::bad_alloc.
Moved move_positions(const Store & rows, const Store * whole, bool images_extend, int32_t next, int32_t most);

// Gives the sequence these positions: turns the keys of all its rows, and the queries of the last tokens that scorers look at.
// Rows are plain or whole, all rotations are known, and no queries are kept for reducers. What is rounded: each number of a key that turns,
// once, to its type. Throws std::bad_alloc, and then nothing has changed.
void move_to(Sequence & seq, Moved && to, int32_t n_threads);

}  // namespace kvedge
