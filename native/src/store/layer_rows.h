// Rows of one layer of one block, in the host's memory. They are uniform at first: keys [Hkv][capacity][d_k], then values
// [Hkv][capacity][d_v], filled from the front, in a plain type. Once rows of single heads may go they are loose: the heads have
// them as their second areas, and their rows end where those of the others do. Or they are ragged (store/ragged.h): every head
// has as many rows as it keeps, of the types that they are to be stored as, some of the newest plain.

#pragma once

#include "store/ragged.h"
#include "system/pages.h"

#include <cstdint>
#include <vector>

namespace kvedge {

class Sink;
class Reader;

// Rows of a ragged head, and how many of its keys and values are of the storage type: the first of them.
struct StoredRows {
    int32_t n, k, v;
};

// For one thread at a time; but rows of different heads may be read, written and gathered at once. A copy has memory of its own,
// unless it is made by share().
class LayerRows {
  public:
    LayerRows() = default;  // of no layer
    // Without memory. Throw std::bad_alloc.
    LayerRows(const LayerShape & shape, const Storage & storage, int32_t capacity);                          // uniform
    LayerRows(const LayerShape & shape, const Storage & storage, std::vector<RaggedHead> heads);             // ragged
    LayerRows(const LayerShape & shape, const Storage & storage, const std::vector<StoredRows> & heads);     // ragged

    // The same rows in the same memory: whichever moves or drops a row first gets memory of its own. No row is written to either.
    LayerRows           share() const;
    const SharedPages & memory() const { return memory_; }
    SharedPages &       memory() { return memory_; }

    bool     take();                                     // memory for all rows. False: there is none
    void     clear() noexcept;                           // the memory, and every row of heads that are loose or ragged
    uint64_t bytes() const { return memory_.size(); }  // of memory that is held
    uint64_t extent() const { return extent_; }          // of the rows that there is room for
    uint64_t index_bytes() const;                        // of what says where rows lie

    // Uniform rows. add: n more of every head, that are then written.
    void add(int32_t n);
    // Of every head, ascending, of uniform rows or of whole ones; memory().own() came before, unless the last rows go.
    void keep(const std::vector<int32_t> & rows);
    void loosen();                                 // and memory().own(). Throws std::bad_alloc
    void set_loose(int32_t head, int32_t n);       // of a head, the last n rows are there

    // Of a head that is loose or ragged: takes out the rows whose flag is 0, or one row. end: rows of the block that stay.
    void keep_flagged(int32_t head, const uint8_t * flags, int32_t end);
    void drop(int32_t head, int32_t row);

    // From bytes: how a head's rows lie, and all rows. Ragged: what load_counts reads is laid out when all heads are read.
    // False: damaged, or the file cannot hold as much.
    bool load_counts(int32_t head, int32_t length, Reader & in);
    bool load(Reader & in);  // takes the memory. Throws std::bad_alloc

    // Of uniform rows.
    uint8_t * k_row(int32_t head, int32_t row) { return memory_.data() + k_at(head, row); }
    uint8_t * v_row(int32_t head, int32_t row) { return memory_.data() + v_at(head, row); }

    // Where a head's rows lie, in token order.
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
    const RaggedHead * head(int32_t h) const { return heads_.empty() ? nullptr : &heads_[(size_t) h]; }  // NULL: uniform

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
    int32_t                 capacity_ = 0, n_ = 0;  // of uniform rows: room, and rows of the block
    size_t                  extent_   = 0;
    SharedPages             memory_;
    std::vector<RaggedHead> heads_;  // [Hkv] of loose and of ragged rows, else empty
};

// Uniform rows of a head, from the first one on: rounded from others.
void fill_rows(LayerRows & to, int32_t head, const LayerRows & from);
// Ragged rows of a head. write_rows: n <= GROUP rows [n][d] from `first` on, a multiple of GROUP. gather_rows: rows `kept` of
// others, bit for bit.
void write_rows(LayerRows & to, int32_t head, int32_t first, int32_t n, const float * k, const float * v);
void gather_rows(LayerRows & to, int32_t head, const std::vector<int32_t> & kept, const std::vector<Segment> & from);

// To bytes: how a head's rows lie, and all rows.
void save_counts(const LayerRows & rows, int32_t head, Sink & out);
void save_rows(const LayerRows & rows, Sink & out);

// All rows of one layer of several blocks, one after the other, with memory: keys quantised, and values if `values` says so or
// their type does not wait; without, there is one block. storage: of `to`, and of the blocks that are quantised already. False: no memory.
// Throws std::bad_alloc.
bool join(const std::vector<const LayerRows *> & blocks, const Storage & storage, bool values, LayerRows & to);
// Bytes that a head's rows would take in it.
uint64_t joined_bytes(const std::vector<const LayerRows *> & blocks, int32_t head);

}  // namespace kvedge
