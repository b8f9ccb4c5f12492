// What a device does for the store: it holds the rows of one layer of one block. A second backend is a second folder.

#pragma once

#include "rows/rows.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvedge {

class Sink;
class Reader;

// Rows of one layer of one block, wherever they lie. They are uniform at first: as much room for every head, filled from the
// front, in a plain type; once rows of single heads may go they are loose, and those that are left end where the others do.
// Or they are ragged: every head has as many rows as it keeps, of the types they are to be stored as, some of the newest
// plain (StoredRows). For one thread at a time, but for view, write and gather of different heads.
class LayerRows {
  public:
    virtual ~LayerRows() = default;

    virtual std::unique_ptr<LayerRows> clone() const = 0;  // with memory of its own. Throws std::bad_alloc

    virtual bool     take()              = 0;  // memory for all rows. False: there is none
    virtual void     give_back()         = 0;  // the memory
    virtual void     clear() noexcept    = 0;  // the memory, and every row of heads that are loose or ragged
    virtual uint64_t bytes() const       = 0;  // of memory that is held
    virtual uint64_t extent() const      = 0;  // of the rows that there is room for
    virtual uint64_t index_bytes() const = 0;  // of what says where rows lie

    // Appends where a head's rows lie, in token order.
    virtual void view(int32_t head, std::vector<Segment> & out) const = 0;

    // Uniform rows. add: n more of every head, that are then written. fill: rows [first, ..) of a head, rounded from others.
    virtual void add(int32_t n)                                                             = 0;
    virtual void fill(int32_t head, int32_t first, const std::vector<Segment> & from)       = 0;
    virtual void keep(const std::vector<int32_t> & rows)                                    = 0;  // of every head, ascending
    virtual void loosen()                                                                   = 0;  // throws std::bad_alloc
    virtual void set_loose(int32_t head, int32_t n)                                         = 0;  // of a head, the last n rows are there

    // Ragged rows: of a head, n <= GROUP rows [n][d] from `first` on, a multiple of GROUP; and rows `kept` of others, bit for bit.
    virtual void write(int32_t head, int32_t first, int32_t n, const float * k, const float * v)                     = 0;
    virtual void gather(int32_t head, const std::vector<int32_t> & kept, const std::vector<Segment> & from)          = 0;

    // Of a head that is loose or ragged: takes out the rows whose flag is 0, or one row. end: rows of the block that are left.
    virtual void keep_flagged(int32_t head, const uint8_t * flags, int32_t end) = 0;
    virtual void drop(int32_t head, int32_t row)                                = 0;

    // As bytes: how a head's rows lie, and all rows. Ragged: what load_counts reads is laid out when all heads are read.
    // False: damaged, or the file cannot hold as much.
    virtual void save_counts(int32_t head, Sink & out) const                     = 0;
    virtual void save(Sink & out) const                                          = 0;
    virtual bool load_counts(int32_t head, int32_t length, Reader & in)      = 0;
    virtual bool load(Reader & in)                                           = 0;  // takes the memory. Throws std::bad_alloc
};

// Rows of a head, and how many of its keys and values are of the storage type: the first of them.
struct StoredRows {
    int32_t n, k, v;
};

class Backend {
  public:
    virtual ~Backend() = default;

    // Without memory. Throw std::bad_alloc.
    virtual std::unique_ptr<LayerRows> uniform(const LayerShape & shape, const Storage & storage, int32_t capacity) const = 0;
    virtual std::unique_ptr<LayerRows> ragged(
        const LayerShape & shape, const Storage & storage, const std::vector<StoredRows> & heads) const = 0;

    // All rows of one layer of several blocks, one after the other, with memory: keys quantised, and values if `values` says
    // so or their type does not wait; without, there is one block. NULL: no memory. Throws std::bad_alloc.
    virtual std::unique_ptr<LayerRows> join(const std::vector<const LayerRows *> & blocks, bool values) const = 0;
    // Bytes that a head's rows would take in it.
    virtual uint64_t joined_bytes(const std::vector<const LayerRows *> & blocks, int32_t head) const = 0;
};

const Backend & cpu_backend();

}  // namespace kvedge
