// The rows of one layer of one block, in host memory. Three layouts:
//   uniform  keys [Hkv][capacity][d_k], then values [Hkv][capacity][d_v], in a plain type, filled from the front
//   loose    the uniform memory, but single heads can drop rows: each head's rows are its second area (Side), and all end together
//   ragged   every head has its own number of rows, in the storage type; some of the newest may be plain (store/ragged.h)

#pragma once

#include "store/ragged.h"
#include "system/pages.h"

#include <cstdint>
#include <vector>

namespace kvedge {

class Sink;
class Reader;

// Numbers of a ragged head: n rows, of which the first k keys and the first v values have the storage type.
struct StoredRows {
    int32_t n, k, v;
};

// For one thread at a time, except that threads may read, write and gather rows of different heads at once. Copies are deep;
// share() makes a shallow copy.
class LayerRows {
  public:
    LayerRows() = default;  // no layer
    // Make the layout without memory (see take). Throw std::bad_alloc.
    LayerRows(const LayerShape & shape, const Storage & storage, int32_t capacity);                          // uniform
    LayerRows(const LayerShape & shape, const Storage & storage, std::vector<RaggedHead> heads);             // ragged
    LayerRows(const LayerShape & shape, const Storage & storage, const std::vector<StoredRows> & heads);     // ragged

    // Returns a copy that shares the memory. The first object that moves or drops a row copies the memory. Rows must not be written.
    LayerRows           share() const;
    const SharedPages & memory() const { return memory_; }
    SharedPages &       memory() { return memory_; }

    bool     take();                                     // takes memory for all rows. False: no memory
    void     clear() noexcept;                           // frees the memory and forgets every row of loose and ragged heads
    uint64_t bytes() const { return memory_.size(); }  // memory held now
    uint64_t extent() const { return extent_; }          // memory that the layout needs
    uint64_t index_bytes() const;                        // memory of the layout itself

    // Adds n rows to every head (uniform and loose layouts). The caller then writes them.
    void add(int32_t n);
    // Keeps the rows `rows`, ascending, of every head (uniform rows or kind `whole`). Call memory().own() first if rows move.
    void keep(const std::vector<int32_t> & rows);
    void loosen();                                 // changes uniform to loose, with unshared memory. Throws std::bad_alloc
    void set_loose(int32_t head, int32_t n);       // sets that a loose head holds the last n rows

    // For a loose or ragged head: removes the rows whose flag is 0, or one row. end: number of rows that the block then has.
    void keep_flagged(int32_t head, const uint8_t * flags, int32_t end);
    void drop(int32_t head, int32_t row);

    // Read from bytes. load_counts: the layout of a ragged head with `length` rows; load: the rows of all heads, after load_counts.
    // False: the bytes are damaged or too few.
    bool load_counts(int32_t head, int32_t length, Reader & in);
    bool load(Reader & in);  // takes the memory. Throws std::bad_alloc

    // Rows of the uniform layout.
    uint8_t * k_row(int32_t head, int32_t row) { return memory_.data() + k_at(head, row); }
    uint8_t * v_row(int32_t head, int32_t row) { return memory_.data() + v_at(head, row); }

    // Calls visit(Segment) for the rows of a head, in token order.
    template <class F> void each_segment(int32_t head, const F & visit) const {
        if (!heads_.empty()) {
            each_ragged(memory_.data(), heads_[(size_t) head], shape_, storage_, visit);
        } else if (n_ > 0) {
            const Storage plain = storage_.plain();
            visit(Segment{ { memory_.data() + k_at(head, 0), row_k(shape_, plain.k), plain.k },
                           { memory_.data() + v_at(head, 0), row_v(shape_, plain.v), plain.v },
                           n_ });
        }
    }

    const LayerShape & shape() const { return shape_; }
    const Storage &    storage() const { return storage_; }
    uint8_t *          data() const { return memory_.data(); }
    const RaggedHead * head(int32_t h) const { return heads_.empty() ? nullptr : &heads_[(size_t) h]; }  // NULL if uniform

  private:
    size_t k_at(int32_t head, int32_t row) const {
        return ((size_t) head * (size_t) capacity_ + (size_t) row) * row_k(shape_, storage_.plain().k);
    }
    size_t v_at(int32_t head, int32_t row) const {
        const size_t keys = (size_t) shape_.n_heads_kv * (size_t) capacity_ * row_k(shape_, storage_.plain().k);
        return keys + ((size_t) head * (size_t) capacity_ + (size_t) row) * row_v(shape_, storage_.plain().v);
    }

    LayerShape              shape_{};
    Storage                 storage_;
    bool                    ragged_   = false;
    int32_t                 capacity_ = 0, n_ = 0;  // rows that fit, and rows of the block (uniform and loose)
    size_t                  extent_   = 0;
    SharedPages             memory_;
    std::vector<RaggedHead> heads_;  // [Hkv] in the loose and ragged layouts, else empty
};

// Writes all rows of a head of `from` to uniform rows 0, 1, ... of `to`, rounded to the plain type.
void fill_rows(LayerRows & to, int32_t head, const LayerRows & from);
// Write ragged rows of a head. write_rows: n <= GROUP float rows [n][d] to rows first ..; first is a multiple of GROUP.
// gather_rows: copies the rows `kept` of the segments `from` bit for bit.
void write_rows(LayerRows & to, int32_t head, int32_t first, int32_t n, const float * k, const float * v);
void gather_rows(LayerRows & to, int32_t head, const std::vector<int32_t> & kept, const std::vector<Segment> & from);

// Write to bytes: the layout of a ragged head, and the rows of all heads.
void save_counts(const LayerRows & rows, int32_t head, Sink & out);
void save_rows(const LayerRows & rows, Sink & out);

// Joins the rows of one layer of several blocks into `to`, and takes its memory. Quantises keys; quantises values if `values` is
// true or the type has no residual (if not, `blocks` must have one element). storage: types of `to` and of blocks already quantised.
// False: no memory. Throws std::bad_alloc.
bool join(const std::vector<const LayerRows *> & blocks, const Storage & storage, bool values, LayerRows & to);
// Returns the bytes that the rows of one head would take after `join`.
uint64_t joined_bytes(const std::vector<const LayerRows *> & blocks, int32_t head);

}  // namespace kvedge
