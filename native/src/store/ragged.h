// Ragged layers: every KV head has a length of its own. The keys of a head lie in two areas, rows of the storage type and
// after them rows that are still plain (KIVI's residual); so do its values. For a storage type that is plain itself the
// second area is empty.

#pragma once

#include "kernels/kernels.h"

#include <array>
#include <cstdint>
#include <vector>

namespace kvedge {

struct Area {
    size_t               offset = 0;  // of the first row that is still there, or of the first group
    int32_t              n      = 0;  // rows
    std::vector<uint8_t> live;        // of a grouped type: rows left in each group, which lie first in it
};

// The keys or the values of one head, and how its two areas are to be read.
using Side = std::array<Area, 2>;

struct SideLayout {
    Type    types[2];
    int32_t d;
};

struct RaggedHead {
    Side k, v;
};

inline SideLayout keys_of(const LayerShape & s, const Storage & t) { return { { t.k, t.plain().k }, s.d_k }; }
inline SideLayout values_of(const LayerShape & s, const Storage & t) { return { { t.v, t.plain().v }, s.d_v }; }

// Bytes of an area of that type.
size_t area_bytes(Type type, int32_t d, const Area & area);

// A side of n rows of which the first n_stored are of the storage type. Grouped types: in full groups and a last one.
Side make_side(const SideLayout & layout, int32_t n, int32_t n_stored);

// Offsets of all areas of a layer, one after the other; returns the bytes they take.
size_t lay_out(const LayerShape & shape, const Storage & storage, std::vector<RaggedHead> & heads);

// Writes n <= GROUP rows [n][d] as rows first .. of the side. first is a multiple of GROUP.
void write_rows(uint8_t * memory, const Side & side, const SideLayout & layout, int32_t first, int32_t n, const float * rows);

// Takes out the rows whose flag in keep [n] is 0; what is left moves together, of a grouped type only within its group:
// groups have scales of their own.
void keep_rows(uint8_t * memory, Side & side, const SideLayout & layout, const uint8_t * keep);

// Takes out one row. What lies before or behind it in its area closes the gap, whichever is shorter, or what lies before
// where the rows' end must not move; of a grouped type what lies behind it in its group.
void drop_row(uint8_t * memory, Side & side, const SideLayout & layout, int32_t row, bool from_front);

// Walks over a side in pieces that one Rows describes.
class SideReader {
  public:
    SideReader(const uint8_t * memory, const Side & side, const SideLayout & layout) : memory_(memory), side_(side), layout_(layout) {}

    // The next piece; rows() says of how many rows, 0 at the end.
    Rows    piece() const { return piece_; }
    int32_t rows() const { return rows_; }
    void    find();  // after construction and after skip
    void    skip(int32_t n);  // n <= rows()

  private:
    const uint8_t *    memory_;
    const Side &       side_;
    const SideLayout   layout_;
    int                area_  = 0;
    int32_t            row_   = 0;  // within the area
    size_t             group_ = 0;
    int32_t            in_group_ = 0;
    Rows               piece_{};
    int32_t            rows_ = 0;
};

// Groups that are left with a quarter of their rows or fewer, and follow each other, can become one: its rows are rounded
// a second time. Which of `live` [n] does: a new group holds the old ones [first, last).
constexpr uint8_t SPARSE = GROUP / 4;

struct MergedGroup {
    size_t  first, last;
    uint8_t rows;
    size_t  sources;  // old groups that are not empty; one alone is copied as it is
};

std::vector<MergedGroup> merge_sparse(const std::vector<uint8_t> & live);

template <class F>
void each_ragged(const uint8_t * memory, const RaggedHead & head, const LayerShape & shape, const Storage & storage, const F & visit) {
    SideReader k(memory, head.k, keys_of(shape, storage)), v(memory, head.v, values_of(shape, storage));
    for (k.find(), v.find(); k.rows() > 0; k.find(), v.find()) {
        const int32_t n = k.rows() < v.rows() ? k.rows() : v.rows();
        visit(Segment{ k.piece(), v.piece(), n });
        k.skip(n);
        v.skip(n);
    }
}

}  // namespace kvedge
