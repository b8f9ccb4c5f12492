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

// Of a layer whose heads have lists. n_left: tokens that a block that is not ragged will have.
void Store::remove_by_head(BlockLayer & layer, int32_t p0, int32_t p1, int32_t n_left) {
    for (size_t h = 0; h < layer.heads.size(); h++) {
        const auto keep = outside(layer.heads[h].tokens, p0, p1);
        layer.rows->keep_flagged((int32_t) h, keep.data(), n_left);
        layer.heads[h].keep(keep);
    }
}

// Of a block that lists its tokens. Returns the rows that stay.
std::vector<int32_t> Store::remove_listed(Block & block, int32_t p0, int32_t p1) {
    std::vector<int32_t> keep;
    for (size_t r = 0; r < block.length(); r++) {
        const int32_t p = pos[(size_t) block.tokens[r]];
        if (p < p0 || p >= p1) {
            keep.push_back((int32_t) r);
        }
    }
    if (keep.size() == block.length()) {
        return keep;
    }
    for (BlockLayer & layer : block.layers) {
        if (layer.heads.empty()) {
            layer.rows->keep(keep);
        } else {
            remove_by_head(layer, p0, p1, (int32_t) keep.size());
        }
    }
    for (size_t to = 0; to < keep.size(); to++) {
        block.tokens[to] = block.tokens[(size_t) keep[to]];
    }
    block.tokens.resize(keep.size());
    return keep;
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

std::vector<Removed> Store::remove_rows(int32_t p0, int32_t p1) {
    std::vector<Removed> gone;
    size_t               row    = 0;  // pending
    const auto           listed = [&](size_t b) { return !blocks[b].ragged() || b >= pending_from; };
    for (size_t b = 0; b < blocks.size(); b++) {
        Block & block = blocks[b];
        if (block.kind == BlockKind::streamed) {
            remove_streamed(block, p0, p1, row, gone);
            row += (size_t) block.rows(0, 0);
        } else if (listed(b)) {
            const size_t n    = block.length();
            auto         keep = remove_listed(block, p0, p1);
            if (b >= pending_from && keep.size() < n) {
                gone.push_back({ -1, -1, row, n, std::move(keep) });
            }
            row += b >= pending_from ? block.length() : 0;
        } else {
            for (BlockLayer & layer : block.layers) {
                remove_by_head(layer, p0, p1, 0);
            }
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
        bl.rows->drop(head, row);
        h.tokens.erase(h.tokens.begin() + row);
        if (!h.scores.empty()) {
            h.scores.erase(h.scores.begin() + row);
        }
        return;
    }
}

}  // namespace kvedge
