#include "store/ragged.h"

#include "kernels/quantise.h"

#include <algorithm>
#include <cstring>

namespace kvedge {

namespace {

constexpr size_t ALIGNMENT = 16;

size_t aligned(size_t n) { return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

size_t codes_of_row(Type type, int32_t d) { return (size_t) (d / GROUP) * code_bytes(type); }

uint8_t * group_at(uint8_t * memory, const Area & area, Type type, int32_t d, size_t group) {
    return memory + area.offset + group * GROUP * row_bytes(type, d);
}

uint8_t * codes_at(uint8_t * memory, const Area & area, Type type, int32_t d, size_t group, int32_t row) {
    return group_at(memory, area, type, d, group) + 4 * (size_t) d + (size_t) row * codes_of_row(type, d);
}

void keep_in_groups(uint8_t * memory, Area & area, Type type, int32_t d, const uint8_t * keep) {
    for (size_t g = 0; g < area.live.size(); g++) {
        uint8_t kept = 0;
        for (uint8_t r = 0; r < area.live[g]; r++) {
            if (*keep++) {
                memmove(codes_at(memory, area, type, d, g, kept), codes_at(memory, area, type, d, g, r), codes_of_row(type, d));
                kept++;
            }
        }
        area.n -= area.live[g] - kept;
        area.live[g] = kept;
    }
}

void keep_plain(uint8_t * memory, Area & area, size_t stride, const uint8_t * keep) {
    uint8_t * base = memory + area.offset;
    size_t    kept = 0;
    for (size_t r = 0; r < (size_t) area.n; r++) {
        if (keep[r]) {
            memmove(base + kept++ * stride, base + r * stride, stride);
        }
    }
    area.n = (int32_t) kept;
}

void drop_plain(uint8_t * memory, Area & area, size_t stride, int32_t row, bool from_front) {
    const auto before = (size_t) row, after = (size_t) (area.n - row - 1);
    const bool front  = from_front || before <= after;
    if (memory) {  // NULL: a device holds the rows and moves the rows itself
        uint8_t * base = memory + area.offset;
        memmove(base + (front ? 1 : before) * stride, base + (front ? 0 : before + 1) * stride, (front ? before : after) * stride);
    }
    area.offset += front ? stride : 0;
    area.n--;
}

void drop_in_group(uint8_t * memory, Area & area, Type type, int32_t d, int32_t row) {
    size_t g = 0;
    for (; row >= area.live[g]; g++) {
        row -= area.live[g];
    }
    const auto after = (size_t) (area.live[g] - row - 1);
    memmove(codes_at(memory, area, type, d, g, row), codes_at(memory, area, type, d, g, row + 1), after * codes_of_row(type, d));
    area.live[g]--;
    area.n--;
}

}  // namespace

size_t area_bytes(Type type, int32_t d, const Area & area) {
    if (!is_grouped(type)) {
        return (size_t) area.n * row_bytes(type, d);
    }
    // the last group has memory only for its rows
    return area.live.empty() ? 0 : (area.live.size() - 1) * GROUP * row_bytes(type, d) + group_bytes(type, area.live.back(), d);
}

Side make_side(const SideLayout & layout, int32_t n, int32_t n_stored) {
    Side side;
    side[0].n = n_stored;
    side[1].n = n - n_stored;
    if (is_grouped(layout.types[0])) {
        side[0].live.assign((size_t) ((n_stored + GROUP - 1) / GROUP), GROUP);
        if (n_stored % GROUP != 0) {
            side[0].live.back() = (uint8_t) (n_stored % GROUP);
        }
    }
    return side;
}

size_t lay_out(const LayerShape & shape, const Storage & storage, std::vector<RaggedHead> & heads) {
    size_t     at    = 0;
    const auto place = [&](Side & side, const SideLayout & layout) {
        for (int a = 0; a < 2; a++) {
            side[(size_t) a].offset = at;
            at                      = aligned(at + area_bytes(layout.types[a], layout.d, side[(size_t) a]));
        }
    };
    for (auto & head : heads) {
        place(head.k, keys_of(shape, storage));
        place(head.v, values_of(shape, storage));
    }
    return at;
}

void write_rows(uint8_t * memory, const Side & side, const SideLayout & layout, int32_t first, int32_t n, const float * rows) {
    const auto    d      = (size_t) layout.d;
    const Type    stored = layout.types[0];
    const int32_t n_old  = std::clamp(side[0].n - first, 0, n);
    if (is_grouped(stored) && n_old > 0) {
        quantise_group(stored, rows, n_old, layout.d, group_at(memory, side[0], stored, layout.d, (size_t) (first / GROUP)));
    }
    for (int32_t r = 0; r < n; r++) {
        const bool    old = r < n_old;
        const Type    type = layout.types[old ? 0 : 1];
        const int32_t row  = old ? first + r : first + r - side[0].n;
        uint8_t *     to   = memory + side[old ? 0 : 1].offset + (size_t) row * row_bytes(type, layout.d);
        if (is_grouped(type)) {
            continue;
        }
        if (is_quantised(type)) {
            quantise_row(type, rows + (size_t) r * d, layout.d, to);
        } else {
            kernels().from_f32(type, rows + (size_t) r * d, to, d);
        }
    }
}

void keep_rows(uint8_t * memory, Side & side, const SideLayout & layout, const uint8_t * keep) {
    for (int a = 0; a < 2; a++) {
        Area &        area = side[(size_t) a];
        const int32_t n    = area.n;
        if (is_grouped(layout.types[a])) {
            keep_in_groups(memory, area, layout.types[a], layout.d, keep);
        } else {
            keep_plain(memory, area, row_bytes(layout.types[a], layout.d), keep);
        }
        keep += n;
    }
}

void drop_row(uint8_t * memory, Side & side, const SideLayout & layout, int32_t row, bool from_front) {
    const size_t a    = row < side[0].n ? 0 : 1;
    Area &       area = side[a];
    row -= a == 0 ? 0 : side[0].n;
    if (is_grouped(layout.types[a])) {
        drop_in_group(memory, area, layout.types[a], layout.d, row);
    } else {
        drop_plain(memory, area, row_bytes(layout.types[a], layout.d), row, from_front);
    }
}

std::vector<MergedGroup> merge_sparse(const std::vector<uint8_t> & live) {
    std::vector<MergedGroup> out;
    bool                     open = false;  // whether the last new group may take more rows
    for (size_t g = 0; g < live.size(); g++) {
        if (live[g] == 0) {
            continue;
        }
        const bool sparse = live[g] <= SPARSE;
        if (open && sparse && out.back().rows + live[g] <= GROUP) {
            out.back() = { out.back().first, g + 1, (uint8_t) (out.back().rows + live[g]), out.back().sources + 1 };
        } else {
            out.push_back({ g, g + 1, live[g], 1 });
            open = sparse;
        }
    }
    return out;
}

void SideReader::find() {
    rows_ = 0;
    while (area_ < 2 && row_ >= side_[(size_t) area_].n) {
        area_++;
        row_ = in_group_ = 0;
        group_           = 0;
    }
    if (area_ == 2) {
        return;
    }
    const Area & area   = side_[(size_t) area_];
    const Type   type   = layout_.types[area_];
    const size_t stride = row_bytes(type, layout_.d);
    if (!is_grouped(type)) {
        piece_ = { memory_ + area.offset + (size_t) row_ * stride, stride, type, 0 };
        rows_  = area.n - row_;
        return;
    }
    for (; in_group_ >= area.live[group_]; group_++) {
        in_group_ -= area.live[group_];
    }
    piece_ = { memory_ + area.offset + group_ * GROUP * stride, stride, type, in_group_ };
    rows_  = area.live[group_] - in_group_;
    for (size_t g = group_; area.live[g] == GROUP && g + 1 < area.live.size(); g++) {  // a piece goes on after a full group
        rows_ += area.live[g + 1];
    }
}

void SideReader::skip(int32_t n) {
    row_ += n;
    in_group_ += n;
}

}  // namespace kvedge
