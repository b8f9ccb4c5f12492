// Blocks of tokens. A new block is uniform: every KV head of every layer holds all tokens of the block. After compression or
// quantisation it is ragged: every head holds its own selection of tokens. A layer of a uniform block becomes loose when one of
// its heads drops a row or gets scores: each head then has its own list of tokens. The rows of every head still end at the same
// place, so that tokens can be added.

#pragma once

#include "store/layer_rows.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// The list of the rows that a head holds.
struct HeadList {
    std::vector<int32_t> tokens;  // token index of each row, ascending
    std::vector<double>  scores;  // score of each row, for a decode policy; empty: no scores
    std::vector<float>   biases;  // bias of each row's logits (Segment::bias), in ragged blocks only; empty: all 0

    int32_t length() const { return (int32_t) tokens.size(); }
    void    keep(const std::vector<uint8_t> & flags);  // keeps the rows whose flag is set
};

// Largest absolute bias. A file with a larger one is damaged: ln of the largest number of tokens is far below, and e^64 fits float32.
constexpr float MOST_BIAS = 64.0f;

struct BlockLayer {
    LayerRows             rows;
    std::vector<HeadList> heads;  // [Hkv] in a loose layer and in a ragged block (except kind `whole`); else empty

    const float * biases(int32_t head) const {  // [rows of the head]; NULL: all 0
        return heads.empty() || heads[(size_t) head].biases.empty() ? nullptr : heads[(size_t) head].biases.data();
    }
    template <class F> void each_segment(int32_t head, const F & visit) const {
        const float * bias = biases(head);
        rows.each_segment(head, [&](Segment segment) {
            segment.bias = bias;
            bias         = bias ? bias + segment.n : nullptr;
            visit(segment);
        });
    }
    uint64_t bias_bytes() const;
    uint64_t bytes() const { return rows.bytes() + bias_bytes(); }  // keys, values and biases
};

enum class BlockKind : uint8_t {
    uniform,      // tokens can be added while there is room
    scored,       // uniform, every layer loose; new rows get scores
    ragged,       // final; rows can only be dropped
    open,         // ragged; some keys and values are still plain and will be quantised later
    open_values,  // ragged; some values are still plain and will be quantised later
    streamed,     // ragged and pending; every head holds the same number of rows, of different tokens
    whole,        // ragged and pending, quantised by seal_whole; every head holds all tokens of the block, without a HeadList
};

struct Block {
    BlockKind               kind      = BlockKind::uniform;
    bool                    generated = false;  // made when a single token was added
    int32_t                 capacity  = 0;      // rows that fit (uniform blocks)
    std::vector<int32_t>    tokens;             // token index of each row; empty in a ragged block that is not pending
    std::vector<BlockLayer> layers;

    size_t  length() const { return tokens.size(); }
    bool    ragged() const { return kind >= BlockKind::ragged; }
    bool    open() const { return kind == BlockKind::open || kind == BlockKind::open_values; }
    bool    full() const { return (int32_t) length() >= capacity; }
    int32_t newest() const;  // largest token index of any head; -1: no rows
    // Returns whether a layer of this uniform block is loose.
    bool loose() const;
    void loosen(size_t layer);  // makes a layer loose, with its own memory. Throws std::bad_alloc
    // Returns the number of rows of a head.
    int32_t rows(int32_t layer, int32_t head) const {
        const auto & heads = layers[(size_t) layer].heads;
        return heads.empty() ? (int32_t) length() : heads[(size_t) head].length();
    }
    // Returns the token index of each row of a head.
    const std::vector<int32_t> & tokens_of(int32_t layer, int32_t head) const {
        const auto & heads = layers[(size_t) layer].heads;
        return heads.empty() ? tokens : heads[(size_t) head].tokens;
    }
};

// Joins one layer of blocks [first, last) into the ragged layer `to` (see `join`, layer_rows.h). False: no memory. Throws std::bad_alloc.
bool join_layer(const std::vector<Block> & blocks, size_t layer, size_t first, size_t last, bool values, BlockLayer & to);

}  // namespace kvedge
