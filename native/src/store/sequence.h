// The KV memory of one sequence: blocks of tokens, in order. A block is uniform (every layer and KV head holds all of
// its tokens) until it is compressed, and ragged (every head holds its own selection) from then on.
//
// Layout of a layer's memory in a uniform block: keys [Hkv][capacity][d_k], then values [Hkv][capacity][d_v];
// in a ragged block: per head its keys [length][d_k] and then its values [length][d_v], heads one after the other.

#pragma once

#include "kernels/kernels.h"
#include "store/pages.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvedge {

struct LayerShape {
    int32_t il;          // layer number in the model
    int32_t n_heads;     // H
    int32_t n_heads_kv;  // Hkv
    int32_t d_k, d_v;
    float   softcap = 0.0f;  // of the logits, 0: none
};

// Bytes of a key row and of a value row.
inline size_t row_k(const LayerShape & s, Type t) { return (size_t) s.d_k * type_size(t); }
inline size_t row_v(const LayerShape & s, Type t) { return (size_t) s.d_v * type_size(t); }

// Consecutive rows of one head.
struct Segment {
    Rows    k, v;
    int32_t n;
};

struct RaggedHead {
    size_t               k_offset = 0, v_offset = 0;  // of the first row that is still there
    int32_t              length   = 0;
    std::vector<int32_t> tokens;  // [length] token index of each row, ascending
};

struct BlockLayer {
    Pages                   memory;
    std::vector<RaggedHead> heads;  // [Hkv] in a ragged block, else empty
    std::vector<int32_t>    gone;   // uniform: [Hkv] first rows that a head has dropped; empty: none
};

struct Block {
    bool                    ragged   = false;
    int32_t                 capacity = 0;  // uniform: rows that fit
    std::vector<int32_t>    tokens;        // uniform: token index of each row
    std::vector<BlockLayer> layers;
    size_t                  length() const { return tokens.size(); }
};

// Column sums of attention over the pending tokens (those not yet compressed), of one layer.
struct ColumnSums {
    std::vector<double> sums;  // [Hkv][capacity]
    int32_t             capacity = 0;
};

// The last queries of the prompt, of one layer, in a ring: token i of the pending ones lies at slot i % capacity.
struct QueryWindow {
    std::vector<float> q;      // [capacity][H][d_k], scaled as for the logits
    std::vector<float> sinks;  // [H], or empty
};

class Sequence {
  public:
    Sequence(const std::vector<LayerShape> & shapes, Type type) : shapes_(&shapes), type_(type) {}

    // Makes room for n tokens and enters them; their rows are then written with write_row(). False: no memory, nothing changed.
    bool append(int32_t n, const int32_t * pos, bool image);

    // Places of the last n tokens entered.
    struct Place {
        Block * block;
        int32_t row;
    };
    Place place_from_end(int32_t i, int32_t n);  // i-th of the last n tokens, while they lie in uniform blocks

    uint8_t * k_row(const Place & at, int32_t layer, int32_t head);
    uint8_t * v_row(const Place & at, int32_t layer, int32_t head);

    // Segments of one head in token order; pending: only those not yet compressed.
    template <class F> void each_segment(int32_t layer, int32_t head, bool pending, const F & visit) const {
        for (size_t b = pending ? pending_from : 0; b < blocks.size(); b++) {
            const Segment s = segment(*blocks[b], layer, head);
            if (s.n > 0) {
                visit(s);
            }
        }
    }
    Segment segment(const Block & block, int32_t layer, int32_t head) const;
    int32_t head_length(int32_t layer, int32_t head) const;
    int32_t pending_length() const;                      // tokens, the same for every layer and head
    std::vector<int32_t> pending_tokens() const;         // their token indices
    std::vector<int32_t> head_tokens(int32_t layer, int32_t head) const;

    // Drops one row of one head: any of a compressed block, whose shorter side closes the gap, but of a uniform block the
    // first that is left, whichever was meant.
    void drop_row(int32_t layer, int32_t head, int32_t row);
    // Gives back the uniform blocks that every head has dropped whole.
    void drop_empty_blocks();

    // Removes the tokens with a position in [p0, p1).
    void remove(int32_t p0, int32_t p1);

    // A copy with memory of its own; NULL if there is no memory for it.
    std::unique_ptr<Sequence> clone() const;

    // Everything present counts as done; the next tokens open new blocks.
    void close_pending();

    uint64_t bytes() const;        // of key and value buffers
    uint64_t index_bytes() const;  // of token indices, positions and modality
    uint64_t score_bytes() const;

    bool ensure_sums(int32_t extra);      // column sums for all pending tokens and `extra` more; false: no memory
    bool ensure_windows(int32_t n);       // room for the last n queries of every layer; false: no memory
    void drop_observations();

    const std::vector<LayerShape> & shapes() const { return *shapes_; }
    Type                            type() const { return type_; }

    std::vector<int32_t>                pos;           // per token entered so far
    std::vector<uint8_t>                image;         // per token: 1 if it came as an embedding
    std::vector<std::unique_ptr<Block>> blocks;
    size_t                              pending_from = 0;  // first block that is not yet compressed
    std::vector<ColumnSums>             sums;              // per layer; empty unless the scorer needs them
    std::vector<QueryWindow>            windows;           // per layer; empty unless the scorer needs them
    int32_t                             window_size = 0;   // capacity of the windows
    int32_t                             window_from = 0;   // first pending token from which on all queries were seen
    int32_t                             unobserved  = 0;   // pending prompt tokens that no score was gathered from

  private:
    std::unique_ptr<Block> make_block(int32_t capacity) const;
    void                   remove_from_ragged(Block & block, int32_t p0, int32_t p1);
    void                   remove_from_uniform(Block & block, int32_t p0, int32_t p1, int32_t first_pending_row);

    const std::vector<LayerShape> * shapes_;
    Type                            type_;
};

// Bytes of a ragged layer whose heads hold these many rows, and the offsets of each head in it.
size_t lay_out_ragged(const LayerShape & shape, Type type, std::vector<RaggedHead> & heads);

}  // namespace kvedge
