// The KV memory of one sequence: blocks of tokens, in order. A block is uniform (every layer and KV head holds all of
// its tokens) until it is compressed or quantised, and ragged (every head holds its own selection) from then on. In
// between, a layer of a uniform block is loose once one of its heads has dropped a row or has scores: its heads keep lists
// of their own, and their rows still end where the block's do, so that tokens can be added.
//
// Layout of a layer's memory in a uniform block: keys [Hkv][capacity][d_k], then values [Hkv][capacity][d_v], always of a
// plain type (Storage::plain); heads of a loose layer have them as their second areas. In a ragged block: store/ragged.h.

#pragma once

#include "kernels/kernels.h"
#include "store/pages.h"
#include "store/ragged.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvedge {

struct BlockLayer {
    Pages                   memory;
    size_t                  extent = 0;  // bytes of the rows that fit
    std::vector<RaggedHead> heads;       // [Hkv] in a ragged block and in a loose layer, else empty
};

struct Block {
    bool                    ragged    = false;
    bool                    scored    = false;  // rows that are added get scores: every layer is loose
    bool                    generated = false;  // opened by a single token
    bool                    open_k    = false;  // ragged: some of its keys
    bool                    open_v    = false;  // or values are to be quantised later
    bool                    streamed  = false;  // ragged and pending: every head holds as many rows, of tokens of its own
    int32_t                 capacity  = 0;      // uniform: rows that fit
    std::vector<int32_t>    tokens;             // token index of each row; of a ragged block only while it is pending
    std::vector<BlockLayer> layers;
    size_t                  length() const { return tokens.size(); }
    int32_t                 newest() const;  // largest token index of any head, -1: none
};

// Column sums of attention over the pending tokens (those not yet compressed), of one layer.
struct ColumnSums {
    Bulk<double> sums;     // [Hkv][capacity]
    Bulk<double> squares;  // [Hkv][capacity] of the squares of the attention, or empty
    int32_t      capacity = 0;
};

// All queries of the pending prompt, of one layer, until it is compressed.
// With each, what it saw of the other modality's pending keys: a SoftmaxRow.
struct PromptQueries {
    std::vector<Pages> parts;  // [H][n] queries, then what each saw; one for each of Sequence::query_parts
};

// Consecutive tokens whose queries are kept together.
struct QueryPart {
    int32_t first, n;  // token index of the first, number of tokens
    int32_t room;      // that there were when its memory was laid out
};

// The last queries of the prompt, of one layer, in a ring: token i of the sequence lies at slot i % capacity.
struct QueryWindow {
    Bulk<float>        q;      // [capacity][H][d_k], scaled as for the logits
    std::vector<float> sinks;  // [H], or empty
};

// Tokens of which something was not gathered; queries: of which nothing was.
struct Missing {
    int32_t sums = 0, squares = 0, entropies = 0, queries = 0;

    void count(bool summed, bool squared, bool weighed, bool seen, int32_t n) {
        sums += summed ? 0 : n;
        squares += squared ? 0 : n;
        entropies += weighed ? 0 : n;
        queries += seen ? 0 : n;
    }
};

class Sequence {
  public:
    Sequence(const std::vector<LayerShape> & shapes, const Storage & storage) : shapes_(&shapes), storage_(storage) {}

    // Makes room for n tokens and enters them; their rows are then written with write_row(). False: no memory, nothing changed.
    bool append(int32_t n, const int32_t * pos, bool image);
    // The same in a block of their own that has no memory yet: take_layer gives it to one layer after the other. image [n].
    bool append_unallocated(int32_t n, const int32_t * pos, const uint8_t * image);
    bool take_layer(size_t layer);  // of the last block; false: no memory
    void take_back(int32_t n);      // the last block goes, and with it the last n tokens

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
            each_segment_in(*blocks[b], layer, head, visit);
        }
    }
    template <class F> void each_segment_in(const Block & block, int32_t layer, int32_t head, const F & visit) const {
        const BlockLayer & bl = block.layers[(size_t) layer];
        if (!bl.heads.empty()) {
            each_ragged(bl.memory.data(), bl.heads[(size_t) head], (*shapes_)[(size_t) layer], storage_, visit);
        } else if (const Segment s = uniform_segment(block, layer, head); s.n > 0) {
            visit(s);
        }
    }
    HeadView view(int32_t layer, int32_t head) const;
    Segment uniform_segment(const Block & block, int32_t layer, int32_t head) const;  // of a layer that is not loose
    int32_t rows_in(const Block & block, int32_t layer, int32_t head) const;
    int32_t head_length(int32_t layer, int32_t head) const;
    int32_t pending_length() const;                      // tokens, the same for every layer and head
    std::vector<int32_t> pending_tokens() const;         // their token indices, where all heads hold the same ones
    std::vector<int32_t> pending_tokens(int32_t layer, int32_t head) const;
    std::vector<int32_t> head_tokens(int32_t layer, int32_t head) const;

    // Drops one row of one head. Throws std::bad_alloc, and then nothing has changed.
    void drop_row(int32_t layer, int32_t head, int32_t row);
    // Gives back the blocks that every head has left. The last one stays while tokens can be added to it.
    void drop_empty_blocks();
    // Packs all blocks that nothing is added to or quantised in any more into one, if dropped rows take up more than a
    // quarter of what the others do; layer by layer, so that the peak is one layer more. Where memory is refused it stops
    // half-way.
    void pack_if_sparse();

    // Quantises generated rows, before the next token is entered: keys when GROUP of them are complete, values as KIVI
    // stores them when RESIDUAL newer tokens exist. False: no memory, nothing lost.
    bool seal_generated();
    // The same for the first `end` blocks, none of them pending, where they hold none of the last RESIDUAL tokens.
    bool seal_old(size_t end);
    // Gives the pending tokens plain rows again, so that they can be scored and merged. False: no memory, nothing changed.
    bool unseal_pending();
    // Blocks at the head of the pending ones that are quantised already need nothing more than to be pending no longer. What
    // was gathered of the pending tokens goes.
    void promote_sealed();

    // Gives every head of the pending blocks a list and scores of its own, from the column sums. Throws std::bad_alloc.
    void sums_to_scores();
    // scores[row] += mean over g < group of weights[g * ld + row], for the first n rows of a head that have scores.
    void add_scores(int32_t layer, int32_t head, int32_t n, const float * weights, size_t ld, int32_t group);
    // All scores of a head into out [head_length], 0 where there are none.
    void read_scores(int32_t layer, int32_t head, double * out) const;

    bool holds(int32_t p0, int32_t p1) const;  // whether a token with a position in [p0, p1) was entered, and not removed
    // Removes the tokens with a position in [p0, p1). Where there are none, nothing changes.
    void remove(int32_t p0, int32_t p1);

    // Streams (store/streamed.cpp), of which what was compressed stays pending. sinks: first rows that every head keeps.
    // Makes all that is there pending again. False: heads hold different numbers of rows, and nothing has changed. Throws
    // std::bad_alloc.
    bool open_stream(int32_t n_sinks);
    // Column sums of the pending rows `kept` move to the front, the others go.
    void keep_sums(size_t layer, size_t head, const std::vector<int32_t> & kept);
    bool pending_differs() const;  // whether heads hold different pending tokens

    // A copy with memory of its own; NULL if there is no memory for it.
    std::unique_ptr<Sequence> clone() const;

    // Everything present counts as done; the next tokens open new blocks.
    void close_pending();

    uint64_t bytes() const;        // of key and value buffers
    uint64_t index_bytes() const;  // of token indices, positions and modality
    uint64_t score_bytes() const;

    // Column sums for all pending tokens and `extra` more, and sums of squares where wanted; false: no memory.
    bool ensure_sums(int32_t extra, bool squares = false);
    bool ensure_layer_sums(size_t layer, int32_t extra, bool squares);
    bool ensure_entropies();              // room for the sum of entropies of every head; false: no memory
    QueryRow query_row(int32_t layer, size_t part, int32_t i, int32_t query_head) const;  // of the part's i-th token
    std::vector<QuerySpan> query_spans(int32_t layer) const;
    bool ensure_queries(int32_t n);       // room for the queries of the next n tokens of every layer; false: no memory
    // The last n tokens, which are entered already, attend now: counts who sees whom and whose entropy there is.
    void observe(int32_t n, bool causal);
    bool ensure_windows(int32_t n);       // room for the last n queries of every layer; false: no memory
    bool ensure_layer_window(size_t layer, int32_t n);
    void drop_observations();
    void drop_layer_observations(size_t layer);

    const std::vector<LayerShape> & shapes() const { return *shapes_; }
    const Storage &                 storage() const { return storage_; }

    std::vector<int32_t>                pos;           // per token entered so far
    std::vector<uint8_t>                image;         // per token: 1 if it came as an embedding
    std::vector<std::unique_ptr<Block>> blocks;
    size_t                              pending_from = 0;  // first block that is not yet compressed
    std::vector<ColumnSums>             sums;              // per layer; empty unless the scorer needs them
    std::vector<int32_t>                seen;     // [capacity of sums] queries that saw each pending token; empty without squares
    std::vector<std::vector<double>>    entropies;         // [layer][Hkv] sum over query heads and queries; empty: not wanted
    int32_t                             n_entropies = 0;   // queries in them
    std::vector<PromptQueries>          queries;           // per layer; empty unless the allocator needs them
    std::vector<QueryPart>              query_parts;
    std::vector<uint8_t>                modality;          // per pending token, while queries are kept: 1 for an image
    std::vector<QueryWindow>            windows;           // per layer; empty unless the scorer needs them
    int32_t                             window_size = 0;   // capacity of the windows
    int32_t                             window_from = 0;   // first token from which on all queries were seen
    int32_t                             sinks = 0;         // of a stream
    Missing                             missing;           // pending prompt tokens from which something was not gathered
    bool                                bounded = false;   // rows are dropped as tokens are added one by one,
    bool                                scored  = false;   // by scores that the new rows get, too

  private:
    std::unique_ptr<Block> make_block(int32_t capacity) const;
    std::unique_ptr<Block> lay_out_block(int32_t capacity) const;
    void                   start_windows(int32_t n);
    int32_t                next_capacity(const Block * last) const;
    void                   loosen(Block & block, size_t layer) const;
    bool                   grows(size_t block) const;
    bool                   is_sparse() const;
    void                   remove_from_loose(Block & block, size_t layer, int32_t p0, int32_t p1, int32_t n_left);
    void                   drop_query_part(size_t part);
    void                   forget_last(int32_t p0, int32_t p1);
    void                   remove_from_ragged(Block & block, int32_t p0, int32_t p1);
    void                   remove_from_uniform(Block & block, int32_t p0, int32_t p1, const std::vector<int32_t> & keep);
    void                   remove_listed(Block & block, int32_t p0, int32_t p1, int32_t first_pending_row);
    void                   remove_streamed(Block & block, int32_t p0, int32_t p1, int32_t first_pending_row);
    size_t                 packable() const;
    uint64_t               packed_keys(size_t n_blocks, int32_t layer, int32_t head) const;
    bool                   gather_layer(size_t layer, size_t first, size_t last, bool values, BlockLayer & to) const;
    std::unique_ptr<Block> seal(size_t first, size_t last, bool values) const;
    bool                   replace(size_t first, size_t last, bool values);
    bool                   join_sealed();

    const std::vector<LayerShape> * shapes_;
    Storage                         storage_;
};

// Newest tokens whose values KIVI leaves as they are.
constexpr int32_t RESIDUAL = GROUP;

// Rows of a head of n that are quantised when a prompt completes: all, or KIVI's share (Liu et al., Algorithm 1): of the
// keys the full groups, of the values all but the last RESIDUAL.
int32_t stored_keys(const Storage & storage, int32_t n);
int32_t stored_values(const Storage & storage, int32_t n);

}  // namespace kvedge
