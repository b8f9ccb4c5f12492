// Renumbering: makes the positions of a sequence smaller when they come close to the model's training length, and turns the keys
// to the new positions. tests/test_renumber.py has the definition.
//
// A token's new position is the same in all layers and heads, although heads hold different tokens, because llama.cpp and the
// next queries have only one position per token.

#pragma once

#include "sequence/sequence.h"

#include <vector>

namespace kvedge {

// New positions for the tokens of a store.
struct Moved {
    std::vector<int32_t> pos;            // [token] new position of each token entered so far
    int32_t              next = 0;       // new position of the next token
};

// Computes new positions that put the next token at `most` instead of `next`. whole: the store with the rows of all tokens, or NULL.
// A gap is a position without a token that a head or `whole` holds. The oldest gaps are closed first, only as many as needed;
// distances after them do not change. If there are too few gaps, the last most / 2 positions keep their distances, and all older
// tokens share the remaining positions in order, several tokens per position if needed. Distances never grow.
// images_extend: the tokens of an image have one position but occupy all positions up to the next token's (M-RoPE).
// Positions in the store must ascend and be below `next`; most >= 1. Throws std::bad_alloc.
Moved move_positions(const Store & rows, const Store * whole, bool images_extend, int32_t next, int32_t most);

// Sets the positions of the sequence to `to`: turns the keys of all rows, and the window queries that scorers read.
// Rows must be plain or of kind `whole`, all rotations known, and no queries kept for reducers. Every number of a turned key is
// rounded once to its type. Throws std::bad_alloc; then nothing has changed.
void move_to(Sequence & seq, Moved && to, int32_t n_threads);

}  // namespace kvedge
