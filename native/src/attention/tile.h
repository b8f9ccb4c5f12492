// A piece of a prompt's attention: some query tokens of a KV head, and the logits of all rows that they see.

#pragma once

#include "attention/attention.h"

namespace kvedge {

struct Tile {
    int32_t head;       // KV head
    int32_t t0, t1;     // query tokens
    int32_t group;      // query heads per KV head
    int32_t rows;       // (t1 - t0) * group
    int32_t n_keys;     // stored rows of this head
    int32_t n_visible;  // of those, rows that the tile's last token sees
    int32_t before;     // stored rows before the first query token
    size_t  stride;     // floats between logit rows
};

// Rows the query of token t sees.
inline int32_t visible(const AttendJob & job, const Tile & tile, int32_t t) {
    return job.causal ? tile.before + t + 1 : tile.n_keys;
}

// Largest attention that a query row of the tile pays to each pending row; of a replay, to each of the context's. x: what
// softmax() leaves.
void add_peaks(const AttendJob & job, const Tile & tile, Scratch & x);
// The same of a replay whose attention is shared out within its chunk, from the logits that x holds.
void add_chunk_peaks(const AttendJob & job, const Tile & tile, Scratch & x);

}  // namespace kvedge
