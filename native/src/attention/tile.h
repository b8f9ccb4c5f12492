// A tile of a prompt's attention: some query tokens of one KV head, and the logits of all rows that these tokens see.

#pragma once

#include "attention/attention.h"

namespace kvedge {

struct Tile {
    int32_t head;       // KV head
    int32_t t0, t1;     // query tokens [t0, t1) of the job
    int32_t group;      // query heads per KV head
    int32_t rows;       // (t1 - t0) * group
    int32_t n_keys;     // stored rows of this head
    int32_t n_visible;  // stored rows that the tile's last token sees
    int32_t before;     // stored rows before the first query token
    size_t  stride;     // floats between logit rows
};

// Returns how many rows the query of token t sees.
inline int32_t visible(const AttendJob & job, const Tile & tile, int32_t t) {
    return job.causal ? tile.before + t + 1 : tile.n_keys;
}

// Raises the peaks (largest attention of any query to a row) of the pending rows by the tile's attention; in a replay, only of the
// context's rows. x: after softmax().
void add_peaks(const AttendJob & job, const Tile & tile, Scratch & x);
// Raises the peaks of a chunk's rows in a replay with ReplayScope::within. x: holds the logits, before softmax().
void add_chunk_peaks(const AttendJob & job, const Tile & tile, Scratch & x);

}  // namespace kvedge
