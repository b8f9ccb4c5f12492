// Taking rows out of a sequence: by position, as llama.cpp asks for it, and one by one, as decode policies do.

#include "store/store.h"

#include <algorithm>

namespace kvedge {

std::vector<uint8_t> Store::outside(const std::vector<int32_t> & tokens, int32_t p0, int32_t p1) const {
    std::vector<uint8_t> flags;
    flags.reserve(tokens.size());
    for (int32_t t : tokens) {
        flags.push_back(pos[(size_t) t] < p0 || pos[(size_t) t] >= p1);
    }
    return flags;
}

// Of a block that lists its tokens: the rows that stay.
Cut Store::cut_listed(const Block & block, int32_t p0, int32_t p1) const {
    Cut cut;
    for (size_t r = 0; r < block.length(); r++) {
        const int32_t p = pos[(size_t) block.tokens[r]];
        if (p < p0 || p >= p1) {
            cut.rows.push_back((int32_t) r);
        }
    }
    cut.any  = cut.rows.size() < block.length();
    cut.left = (int32_t) cut.rows.size();
    for (const BlockLayer & layer : block.layers) {
        auto & heads = cut.flags.emplace_back();
        for (size_t h = 0; cut.any && h < layer.heads.size(); h++) {
            heads.push_back(outside(layer.heads[h].tokens, p0, p1));
        }
    }
    return cut;
}

// Of a block whose heads have lists of their own.
Cut Store::cut_by_head(const Block & block, int32_t p0, int32_t p1) const {
    Cut cut;
    cut.any = true;
    for (const BlockLayer & layer : block.layers) {
        auto & heads = cut.flags.emplace_back();
        for (const HeadList & head : layer.heads) {
            heads.push_back(outside(head.tokens, p0, p1));
        }
    }
    return cut;
}

void Store::apply(Block & block, const Cut & cut) noexcept {
    for (size_t l = 0; l < block.layers.size(); l++) {
        BlockLayer & layer = block.layers[l];
        if (layer.heads.empty()) {
            layer.rows.keep(cut.rows);
        }
        for (size_t h = 0; h < layer.heads.size(); h++) {
            layer.rows.keep_flagged((int32_t) h, cut.flags[l][h].data(), cut.left);
            layer.heads[h].keep(cut.flags[l][h]);
        }
    }
    for (size_t to = 0; to < cut.rows.size(); to++) {
        block.tokens[to] = block.tokens[(size_t) cut.rows[to]];
    }
    block.tokens.resize(block.tokens.empty() ? 0 : cut.rows.size());
}

bool Store::holds(int32_t p0, int32_t p1) const {
    return std::any_of(pos.begin(), pos.end(), [&](int32_t p) { return p >= p0 && p < p1; });
}

void Store::forget_last(int32_t p0, int32_t p1) {
    size_t n = pos.size();
    while (n > 0 && pos[n - 1] >= p0 && pos[n - 1] < p1) {
        n--;
    }
    pos.resize(n);
    image.resize(n);
}

// All memory is taken before the first row moves, so that nothing fails half-way.
std::vector<Removed> Store::remove_rows(int32_t p0, int32_t p1) {
    std::vector<Removed> gone;
    std::vector<Cut>     cuts;
    size_t               row    = 0;  // pending
    const auto           listed = [&](size_t b) { return !blocks[b].ragged() || b >= pending_from; };
    for (size_t b = 0; b < blocks.size(); b++) {
        const Block & block = blocks[b];
        if (block.kind == BlockKind::streamed) {
            cuts.push_back(cut_streamed(block, p0, p1, row, gone));
            row += (size_t) cuts.back().left_each;
            continue;
        }
        cuts.push_back(listed(b) ? cut_listed(block, p0, p1) : cut_by_head(block, p0, p1));
        if (b >= pending_from && cuts.back().any) {
            gone.push_back({ -1, -1, row, block.length(), cuts.back().rows });
        }
        row += b >= pending_from ? cuts.back().rows.size() : 0;
    }
    for (size_t b = 0; b < blocks.size(); b++) {
        if (cuts[b].any) {
            apply(blocks[b], cuts[b]);
        }
    }
    for (size_t b = blocks.size(); b-- > 0;) {
        if (blocks[b].kind == BlockKind::streamed ? blocks[b].rows(0, 0) == 0 : listed(b) && blocks[b].length() == 0) {
            blocks.erase(blocks.begin() + (std::ptrdiff_t) b);
            pending_from -= b < pending_from ? 1 : 0;
        }
    }
    return gone;
}

void Store::loosen_row(int32_t layer, int32_t head, int32_t row) {
    for (Block & block : blocks) {
        const int32_t n = block.rows(layer, head);
        if (row < n) {
            loosen(block, (size_t) layer);
            return;
        }
        row -= n;
    }
}

void Store::drop_row(int32_t layer, int32_t head, int32_t row) {
    for (auto & block : blocks) {
        const int32_t n = block.rows(layer, head);
        if (row >= n) {
            row -= n;
            continue;
        }
        loosen(block, (size_t) layer);
        BlockLayer & bl = block.layers[(size_t) layer];
        HeadList &   h  = bl.heads[(size_t) head];
        bl.rows.drop(head, row);
        h.tokens.erase(h.tokens.begin() + row);
        if (!h.scores.empty()) {
            h.scores.erase(h.scores.begin() + row);
        }
        if (!h.biases.empty()) {
            h.biases.erase(h.biases.begin() + row);
        }
        return;
    }
}

}  // namespace kvedge
