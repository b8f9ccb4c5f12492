// The keys and values of one sequence, in blocks of tokens (store/block.h). The last blocks are pending: they await a compression.

#pragma once

#include "store/block.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace kvedge {

// Whether single rows are dropped during an answer: never, by their place, or by their scores (then new rows get scores).
enum class Eviction : uint8_t { none, by_place, by_score };

// The contents of a store, as session files hold them.
struct StoreContents {
    std::vector<int32_t> pos;    // [token] position of each token entered so far
    std::vector<uint8_t> image;  // [token] 1 for an image token (entered as an embedding)
    std::vector<Block>   blocks;
    size_t               pending_from = 0;  // index of the first pending block
    Eviction             eviction     = Eviction::none;
    int32_t              sinks        = 0;  // streams: number of first rows that every head keeps
};

// Pending rows that a removal changed: of the n rows from `first` on, only the rows `keep` remain. layer -1: in every head.
struct Removed {
    int32_t              layer, head;
    size_t               first, n;
    std::vector<int32_t> keep;
};

class Store : private StoreContents {
  public:
    Store(const std::vector<LayerShape> & shapes, const Storage & storage, StoreContents contents = {})
        : StoreContents(std::move(contents)), shapes_(&shapes), storage_(storage) {}

    const std::vector<LayerShape> & shapes() const { return *shapes_; }
    const Storage &                 storage() const { return storage_; }
    const StoreContents &           contents() const { return *this; }
    StoreContents &                 mutable_contents() { return *this; }  // only for functions that change a store

    // Returns a copy that shares the memory of the rows (LayerRows::share). Throws std::bad_alloc.
    Store share() const;
    // Returns a copy of the tokens without rows. Throws std::bad_alloc.
    Store empty_copy() const;

    int32_t n_tokens() const { return (int32_t) pos.size(); }  // tokens entered so far
    bool    evicting() const { return eviction != Eviction::none; }
    bool    scored() const { return eviction == Eviction::by_score; }
    void    evict(Eviction how) { eviction = how; }

    // Enters n tokens and makes room for their rows, which the caller then writes (k_row, v_row). False: no memory, nothing changed.
    bool append(int32_t n, const int32_t * new_pos, bool is_image);
    // Enters n tokens in a new block without memory; the caller then calls take_layer for one layer after another. new_image [n]: 1
    // for an image token. False: no memory, nothing changed.
    bool append_unallocated(int32_t n, const int32_t * new_pos, const uint8_t * new_image);
    void take_back(int32_t n) noexcept;                    // removes the last n tokens, which must lie in uniform blocks
    void mark_images(int32_t n, const uint8_t * mask);     // sets `image` of the last n tokens; mask [n]
    Block make_block(int32_t capacity) const;              // returns an empty uniform block. Throws std::bad_alloc

    // release_to_device: frees the memory of a layer whose rows a device now holds; new blocks get no memory for it. bring_back: takes
    // memory for all rows of the layer, which the caller then writes; false: no memory, nothing changed.
    void release_to_device(size_t layer);
    bool bring_back(size_t layer);
    bool on_device(size_t layer) const { return !on_device_.empty() && on_device_[layer]; }

    // The place of a token's row.
    struct Place {
        Block * block;
        int32_t row;
    };
    Place place_from_end(int32_t i, int32_t n);  // place of the i-th of the last n tokens, which must lie in uniform pending blocks

    HeadView             view(int32_t layer, int32_t head) const;
    int32_t              head_length(int32_t layer, int32_t head) const;
    std::vector<int32_t> head_tokens(int32_t layer, int32_t head) const;
    int32_t              pending_length() const;  // pending rows, the same number in every head

    // Ends the pending state of all blocks. The next tokens open new blocks.
    void close_pending();

    uint64_t bytes() const;  // keys, values and biases

  private:
    const std::vector<LayerShape> * shapes_;
    Storage                         storage_;
    std::vector<uint8_t>            on_device_;  // [layer] 1: a device holds the rows; empty: the host holds all rows
};

bool                 biased(const Store & store);           // whether any row has a bias
void                 read_biases(const Store & store, int32_t layer, int32_t head, float * out);   // [head_length]; 0 for no bias
void                 read_scores(const Store & store, int32_t layer, int32_t head, double * out);  // [head_length]; 0 for no score
bool                 pending_differs(const Store & store);  // whether heads hold different pending tokens
std::vector<int32_t> pending_tokens(const Store & store);   // indices of pending tokens, if all heads hold the same tokens
std::vector<int32_t> pending_tokens(const Store & store, int32_t layer, int32_t head);
uint64_t             index_bytes(const Store & store);      // memory of token indices, positions, modality and layouts
uint64_t             score_bytes(const Store & store);      // memory of the scores of rows
uint64_t             plain_bytes(const Store & store);      // Store::bytes(), but blocks of kind `whole` count as plain rows

bool     take_layer(Store & store, size_t layer);         // takes memory for a layer of the last block; false: no memory
void     give_back_layer(Store & store, size_t layer);    // frees the memory of a layer of the last block
uint64_t give_back_pending(Store & store, size_t layer);  // frees the memory of a layer of all pending blocks; returns the bytes

// drop_row drops one row of one head. loosen_row takes the memory for that before. Both throw std::bad_alloc and then change
// nothing; drop_row does not throw after loosen_row for the same row.
void loosen_row(Store & store, int32_t layer, int32_t head, int32_t row);
void drop_row(Store & store, int32_t layer, int32_t head, int32_t row);
// Removes blocks in which no head has rows, except a last block that can still take tokens.
void drop_empty_blocks(Store & store);
// Packs all finished blocks into one, if the memory of their dropped rows is more than a quarter of the memory of their other
// rows. Works layer by layer, so the peak is one extra layer. Without memory it stops half-way, and all rows stay valid.
void pack_if_sparse(Store & store);

// Quantises generated rows before the next token is entered: keys as soon as GROUP rows are complete; values of a residual type
// (KIVI) only when RESIDUAL newer tokens exist. False: no memory, no row is lost.
bool seal_generated(Store & store);
// Quantises those of the first `end` blocks that hold none of the last RESIDUAL tokens; none of them may be pending.
// False: no memory, no row is lost.
bool seal_old(Store & store, size_t end);
// Gives the pending tokens plain rows again, so that they can be scored and merged. False: no memory, nothing changed.
// was: NULL, or receives the quantised blocks and their indices, which seal_again puts back.
using Sealed = std::vector<std::pair<size_t, Block>>;
bool unseal_pending(Store & store, Sealed * was = nullptr);
void seal_again(Store & store, Sealed && was) noexcept;
// Quantises the pending uniform blocks to `as` (types without groups) and frees their plain memory. The blocks stay pending, with
// kind `whole`; compressions read their quantised rows. Blocks that are already ragged do not change. False: no memory; rows are lost.
bool seal_whole(Store & store, const Storage & as, int32_t n_threads);
bool has_whole(const Store & store);  // whether any block has kind `whole`
// Returns the index of the first pending block that is not quantised (or of kind `whole`).
size_t first_plain(const Store & store);

// Makes every layer of the pending blocks loose, and sets the scores of their rows. of(layer, head) points to the scores of the
// head's pending rows. Throws std::bad_alloc; then no score has changed.
void score_pending(Store & store, const std::function<const double *(size_t layer, size_t head)> & of);
// scores[row] += mean over g < group of weights[g * ld + row], for the first n rows of a head. Skips rows without scores.
void add_scores(Store & store, int32_t layer, int32_t head, int32_t n, const float * weights, size_t ld, int32_t group);
// Copy all scores of a store, and restore them while no row has moved. copy_scores throws std::bad_alloc.
void copy_scores(const Store & store, std::vector<double> & to);
void put_back_scores(Store & store, const std::vector<double> & from) noexcept;

// Returns whether an entered token has a position in [p0, p1). Tokens removed from the middle of the sequence still count.
bool holds(const Store & store, int32_t p0, int32_t p1);
// Removes the rows of tokens with a position in [p0, p1). Returns the changed pending rows. Throws std::bad_alloc; then no row is removed.
std::vector<Removed> remove_rows(Store & store, int32_t p0, int32_t p1);
// Removes the last tokens whose positions lie in [p0, p1), after remove_rows. The next tokens take their indices.
void                 forget_last(Store & store, int32_t p0, int32_t p1);

// Streams: rows stay pending after a compression (store/streamed.cpp).
// Returns the number of rows per head that are not pending; -1: heads hold different numbers.
int32_t even_rows(const Store & store);
void    open_stream(Store & store, int32_t n_sinks);  // makes all rows pending; even_rows must not be -1
void    set_sinks(Store & store, int32_t n);
void    stream_last(Store & store);                   // marks the last block as the kept rows of a stream

// replace_pending: replaces the pending blocks by main and tail; leaves out an empty block. Call reserve_blocks before, so that
// it cannot fail. reserve_blocks throws std::bad_alloc.
void reserve_blocks(Store & store);
void replace_pending(Store & store, Block && main, Block && tail);

// Return the memory of a row in a uniform block.
inline uint8_t * k_row(const Store::Place & at, int32_t layer, int32_t head) {
    return at.block->layers[(size_t) layer].rows.k_row(head, at.row);
}
inline uint8_t * v_row(const Store::Place & at, int32_t layer, int32_t head) {
    return at.block->layers[(size_t) layer].rows.v_row(head, at.row);
}

// Calls visit(Segment) for the rows of one head, in token order.
template <class F> void each_segment(const Store & store, int32_t layer, int32_t head, const F & visit) {
    for (const Block & block : store.contents().blocks) {
        block.layers[(size_t) layer].each_segment(head, visit);
    }
}

// Number of newest tokens whose values KIVI keeps plain.
constexpr int32_t RESIDUAL = GROUP;

// Return how many of a head's n rows are quantised when a prompt completes: all rows; with KIVI, the keys of all full groups
// and all values except the last RESIDUAL (Liu et al., Algorithm 1).
int32_t stored_keys(const Storage & storage, int32_t n);
int32_t stored_values(const Storage & storage, int32_t n);

}  // namespace kvedge
