// The keys and values of one sequence: blocks of tokens, in order (store/block.h). What is not yet compressed is pending:
// the last blocks.

#pragma once

#include "store/block.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace kvedge {

// Whether rows are dropped as tokens are added one by one, and whether by scores, which new rows get, too.
enum class Eviction : uint8_t { none, by_place, by_score };

// All that a store holds, as it is saved and loaded.
struct StoreContents {
    std::vector<int32_t> pos;    // per token entered so far
    std::vector<uint8_t> image;  // per token: 1 if it came as an embedding
    std::vector<Block>   blocks;
    size_t               pending_from = 0;  // first block that is not yet compressed
    Eviction             eviction     = Eviction::none;
    int32_t              sinks        = 0;  // of a stream: first rows that every head keeps
};

// Pending rows of one head that were removed: of the n rows from row `first` on, those in `keep` stayed. layer -1: all heads.
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
    StoreContents &                 parts() { return *this; }  // for the functions below

    // The same tokens, whose rows lie in the same memory (LayerRows::share). Throws std::bad_alloc.
    Store share() const;
    // The same tokens without any rows. Throws std::bad_alloc.
    Store empty_copy() const;

    int32_t n_tokens() const { return (int32_t) pos.size(); }  // entered so far
    bool    evicting() const { return eviction != Eviction::none; }
    bool    scored() const { return eviction == Eviction::by_score; }
    void    evict(Eviction how) { eviction = how; }

    // Makes room for n tokens and enters them; their rows are then written (k_row, v_row). False: no memory, nothing changed.
    bool append(int32_t n, const int32_t * new_pos, bool is_image);
    // Enters n tokens in a block of their own that has no memory yet: take_layer gives it to one layer after the other. new_image
    // [n]. False: no memory, nothing changed.
    bool append_unallocated(int32_t n, const int32_t * new_pos, const uint8_t * new_image);
    void take_back(int32_t n) noexcept;                    // the last n tokens, which were entered last
    void mark_images(int32_t n, const uint8_t * mask);     // of the last n tokens
    Block make_block(int32_t capacity) const;              // a uniform one without tokens. Throws std::bad_alloc

    // send_away: a device holds the layer's rows from now on; their memory goes back, and new blocks get none. bring_back: takes
    // memory for all of them, which is then written. False: no memory, nothing changed.
    void send_away(size_t layer);
    bool bring_back(size_t layer);
    bool is_away(size_t layer) const { return !away_.empty() && away_[layer]; }

    // Places of the last n tokens entered.
    struct Place {
        Block * block;
        int32_t row;
    };
    Place place_from_end(int32_t i, int32_t n);  // i-th of the last n tokens, while they lie in uniform blocks

    HeadView             view(int32_t layer, int32_t head) const;
    int32_t              head_length(int32_t layer, int32_t head) const;
    std::vector<int32_t> head_tokens(int32_t layer, int32_t head) const;
    int32_t              pending_length() const;  // tokens, the same for every layer and head

    // Everything present counts as done; the next tokens open new blocks.
    void close_pending();

    uint64_t bytes() const;  // of key and value buffers, and of rows' biases

  private:
    const std::vector<LayerShape> * shapes_;
    Storage                         storage_;
    std::vector<uint8_t>            away_;  // [layer] 1: a device holds its rows; empty: all rows are here
};

bool                 biased(const Store & store);           // whether any row has a bias
void                 read_biases(const Store & store, int32_t layer, int32_t head, float * out);   // [head_length], 0: there is none
void                 read_scores(const Store & store, int32_t layer, int32_t head, double * out);  // likewise
bool                 pending_differs(const Store & store);  // whether heads hold different pending tokens
std::vector<int32_t> pending_tokens(const Store & store);   // their token indices, where all heads hold the same ones
std::vector<int32_t> pending_tokens(const Store & store, int32_t layer, int32_t head);
uint64_t             index_bytes(const Store & store);      // of token indices, positions and modality
uint64_t             score_bytes(const Store & store);      // of the scores of rows
uint64_t             plain_bytes(const Store & store);      // Store::bytes, had no whole rows been quantised

bool     take_layer(Store & store, size_t layer);         // memory of the last block; false: there is none
void     give_back_layer(Store & store, size_t layer);    // of the last block
uint64_t give_back_pending(Store & store, size_t layer);  // of the pending blocks; returns the bytes

// Drops one row of one head. Throws std::bad_alloc, and then nothing has changed; not after loosen_row for the same row.
void loosen_row(Store & store, int32_t layer, int32_t head, int32_t row);
void drop_row(Store & store, int32_t layer, int32_t head, int32_t row);
// Gives back the blocks that every head has left. The last one stays while tokens can be added to it.
void drop_empty_blocks(Store & store);
// Packs all blocks that nothing is added to or quantised in any more into one, if dropped rows take up more than a
// quarter of what the others do; layer by layer, so that the peak is one layer more. Where memory is refused it stops
// half-way.
void pack_if_sparse(Store & store);

// Quantises generated rows, before the next token is entered: keys when GROUP of them are complete, values as KIVI
// stores them when RESIDUAL newer tokens exist. False: no memory, nothing lost.
bool seal_generated(Store & store);
// Quantises those of the first `end` blocks that hold none of the last RESIDUAL tokens. None of them is pending. False: no
// memory, nothing lost.
bool seal_old(Store & store, size_t end);
// Gives the pending tokens plain rows again, so that they can be scored and merged. False: no memory, nothing changed.
// was: NULL, or gets the quantised blocks with their places, for seal_again.
using Sealed = std::vector<std::pair<size_t, Block>>;
bool unseal_pending(Store & store, Sealed * was = nullptr);
void seal_again(Store & store, Sealed && was) noexcept;
// Quantises the pending tokens, of which every head holds all, block by block and layer by layer; their plain memory goes. They stay
// pending, and compressions read them as they are. as: types without groups. Those that are quantised stay as they are. False: no memory,
// and rows are lost.
bool seal_whole(Store & store, const Storage & as, int32_t n_threads);
bool has_whole(const Store & store);  // whether any are
// Leading pending blocks that are already quantised lose their pending mark. False: there are none.
bool promote_sealed(Store & store);

// Gives every head of the pending blocks a list and scores of its own: of(layer, head) points to those of its pending
// rows. Throws std::bad_alloc.
void score_pending(Store & store, const std::function<const double *(size_t layer, size_t head)> & of);
// scores[row] += mean over g < group of weights[g * ld + row], for the first n rows of a head that have scores.
void add_scores(Store & store, int32_t layer, int32_t head, int32_t n, const float * weights, size_t ld, int32_t group);
// All of them, to put them back while no row has moved. copy_scores throws std::bad_alloc.
void copy_scores(const Store & store, std::vector<double> & to);
void put_back_scores(Store & store, const std::vector<double> & from) noexcept;

bool holds(const Store & store, int32_t p0, int32_t p1);  // whether a token with a position in [p0, p1) was entered, and not removed
// Removes the rows of tokens with a position in [p0, p1). Throws std::bad_alloc, and then nothing has changed.
std::vector<Removed> remove_rows(Store & store, int32_t p0, int32_t p1);
// Then removes the tokens themselves at the end of the sequence; the next tokens take their indices.
void                 forget_last(Store & store, int32_t p0, int32_t p1);

// Streams (store/streamed.cpp): rows that were compressed stay pending.
// Number of rows of every head that are not pending. -1: heads hold different numbers of them.
int32_t even_rows(const Store & store);
void    open_stream(Store & store, int32_t n_sinks);  // makes all rows pending again, where heads hold as many rows
void    set_sinks(Store & store, int32_t n);
void    stream_last(Store & store);                   // the last block holds the kept rows of a stream

// replace_pending: main and tail take the place of the pending blocks; an empty one is left out. reserve_blocks makes room
// for both, and throws std::bad_alloc.
void reserve_blocks(Store & store);
void replace_pending(Store & store, Block && main, Block && tail);

// A row of a uniform block.
inline uint8_t * k_row(const Store::Place & at, int32_t layer, int32_t head) {
    return at.block->layers[(size_t) layer].rows.k_row(head, at.row);
}
inline uint8_t * v_row(const Store::Place & at, int32_t layer, int32_t head) {
    return at.block->layers[(size_t) layer].rows.v_row(head, at.row);
}

// Segments of one head in token order.
template <class F> void each_segment(const Store & store, int32_t layer, int32_t head, const F & visit) {
    for (const Block & block : store.contents().blocks) {
        block.layers[(size_t) layer].each_segment(head, visit);
    }
}

// Newest tokens whose values KIVI leaves as they are.
constexpr int32_t RESIDUAL = GROUP;

// Rows of a head of n that are quantised when a prompt completes: all, or KIVI's share (Liu et al., Algorithm 1): of the
// keys the full groups, of the values all but the last RESIDUAL.
int32_t stored_keys(const Storage & storage, int32_t n);
int32_t stored_values(const Storage & storage, int32_t n);

}  // namespace kvedge
