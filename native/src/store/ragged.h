// Ragged layers: every KV head has its own number of rows. The keys of a head lie in two areas: first rows of the storage type,
// then rows that are still plain (KIVI's residual). The values of a head lie in two such areas, too. If the storage type is
// plain, the second area is empty.

#pragma once

#include "kernels/kernels.h"

#include <array>
#include <cstdint>
#include <vector>

namespace kvedge {

struct Area {
    size_t               offset = 0;  // bytes from the layer's memory to the first kept row, or to the first group
    int32_t              n      = 0;  // rows
    std::vector<uint8_t> live;        // grouped types: number of kept rows in each group; they are the first rows of the group
};

// The two areas of the keys, or of the values, of one head.
using Side = std::array<Area, 2>;
// The types of both areas of a side, and the numbers per row.
struct SideLayout {
    Type    types[2];
    int32_t d;
};

struct RaggedHead {
    Side k, v;
};

inline SideLayout keys_of(const LayerShape & s, const Storage & t) { return { { t.k, t.plain().k }, s.d_k }; }
inline SideLayout values_of(const LayerShape & s, const Storage & t) { return { { t.v, t.plain().v }, s.d_v }; }

// Returns the bytes of an area whose rows have this type and d numbers each.
size_t area_bytes(Type type, int32_t d, const Area & area);

// Returns a side of n rows; the first n_stored have the storage type. For a grouped type, all groups except the last are full.
Side make_side(const SideLayout & layout, int32_t n, int32_t n_stored);

// Sets the offsets of all areas of a layer, one after another, and returns their total bytes.
size_t lay_out(const LayerShape & shape, const Storage & storage, std::vector<RaggedHead> & heads);

// Writes n <= GROUP rows [n][d] as rows first .. of the side. first is a multiple of GROUP.
void write_rows(uint8_t * memory, const Side & side, const SideLayout & layout, int32_t first, int32_t n, const float * rows);

// Removes the rows whose flag in keep [n] is 0, and closes the gaps. Rows of a grouped type move only within their group,
// because each group has its own scales.
void keep_rows(uint8_t * memory, Side & side, const SideLayout & layout, const uint8_t * keep);

// Removes one row. The rows before the gap move up if from_front is true (the end of the area stays) or if they are not more than
// the rows after the gap; else the rows after the gap move. In a grouped type, the later rows of the same group move.
void drop_row(uint8_t * memory, Side & side, const SideLayout & layout, int32_t row, bool from_front);

// Iterates over a side in pieces that one Rows struct can describe.
class SideReader {
  public:
    SideReader(const uint8_t * memory, const Side & side, const SideLayout & layout) : memory_(memory), side_(side), layout_(layout) {}

    // The current piece, and its number of rows; 0 rows: the end of the side.
    Rows    piece() const { return piece_; }
    int32_t rows() const { return rows_; }
    void    find();  // finds the piece; call after the constructor and after skip
    void    skip(int32_t n);  // moves n <= rows() rows forward

  private:
    const uint8_t *    memory_;
    const Side &       side_;
    const SideLayout   layout_;
    int                area_  = 0;
    int32_t            row_   = 0;  // index in the area
    size_t             group_ = 0;
    int32_t            in_group_ = 0;
    Rows               piece_{};
    int32_t            rows_ = 0;
};

// A group with at most SPARSE rows left can merge with its sparse neighbours. The rows of a merged group are rounded twice.
constexpr uint8_t SPARSE = GROUP / 4;

// A new group that holds the rows of the old groups [first, last).
struct MergedGroup {
    size_t  first, last;
    uint8_t rows;
    size_t  sources;  // old groups that are not empty; a single source is copied without rounding
};
// Returns the new groups for old groups with live [n] rows.
std::vector<MergedGroup> merge_sparse(const std::vector<uint8_t> & live);
// Calls visit(Segment) for the rows of a head, in token order.
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
