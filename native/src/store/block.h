// Blocks of tokens. A block is uniform (every layer and KV head holds all of its tokens) until it is compressed or
// quantised, and ragged (every head holds its own selection) from then on. In between, a layer of a uniform block is loose
// once one of its heads has dropped a row or has scores: its heads keep lists of their own, and their rows still end where
// the block's do, so that tokens can be added.

#pragma once

#include "store/layer_rows.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// Which rows a head holds.
struct HeadList {
    std::vector<int32_t> tokens;  // token index of each row, ascending
    std::vector<double>  scores;  // of each row, for a decode policy; empty: none
    std::vector<float>   biases;  // of each row's logits (Segment::bias); empty: all 0. Of ragged blocks only

    int32_t length() const { return (int32_t) tokens.size(); }
    void    keep(const std::vector<uint8_t> & flags);  // those whose flag is set
};

// A file with a larger bias is damaged: ln of the largest number of tokens is far below, and e^MOST_BIAS fits a float32.
constexpr float MOST_BIAS = 64.0f;

struct BlockLayer {
    LayerRows             rows;
    std::vector<HeadList> heads;  // [Hkv] in a ragged block (not of whole rows) and in a loose layer, else empty

    const float * biases(int32_t head) const {  // [rows], or NULL: all 0
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
    uint64_t bytes() const { return rows.bytes() + bias_bytes(); }  // of keys, values and biases
};

enum class BlockKind : uint8_t {
    uniform,      // tokens can be added while there is room
    scored,       // uniform, and rows that are added get scores: every layer is loose
    ragged,       // stored for good, but for rows that are dropped
    open,         // ragged, and some of its keys and values are to be quantised later
    open_values,  // ragged, and some of its values are
    streamed,     // ragged and pending: every head holds as many rows, of tokens of its own
    whole,        // ragged and pending: quantised by seal_whole; every head holds the block's tokens, without a list
};

struct Block {
    BlockKind               kind      = BlockKind::uniform;
    bool                    generated = false;  // opened by a single token
    int32_t                 capacity  = 0;      // uniform: rows that fit
    std::vector<int32_t>    tokens;             // token index of each row; of a ragged block only while it is pending
    std::vector<BlockLayer> layers;

    size_t  length() const { return tokens.size(); }
    bool    ragged() const { return kind >= BlockKind::ragged; }
    bool    open() const { return kind == BlockKind::open || kind == BlockKind::open_values; }
    bool    full() const { return (int32_t) length() >= capacity; }
    int32_t newest() const;  // largest token index of any head, -1: none
    // Whether the heads of one of its layers hold less than the block's tokens, or have scores.
    bool loose() const;
    void loosen(size_t layer);  // throws std::bad_alloc
    // Rows of a head.
    int32_t rows(int32_t layer, int32_t head) const {
        const auto & heads = layers[(size_t) layer].heads;
        return heads.empty() ? (int32_t) length() : heads[(size_t) head].length();
    }
    // Token index of each of them.
    const std::vector<int32_t> & tokens_of(int32_t layer, int32_t head) const {
        const auto & heads = layers[(size_t) layer].heads;
        return heads.empty() ? tokens : heads[(size_t) head].tokens;
    }
};

// A ragged layer of the rows of blocks [first, last), as store/layer_rows.h joins them. False: no memory. Throws std::bad_alloc.
bool join_layer(const std::vector<Block> & blocks, size_t layer, size_t first, size_t last, bool values, BlockLayer & to);

}  // namespace kvedge
