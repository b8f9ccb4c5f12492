// Removes rows from a sequence: all rows in a range of positions (for llama.cpp), or single rows (for decode policies).

#include "store/store.h"

#include <algorithm>

namespace kvedge {

namespace {

// The tokens with a position in [p0, p1).
struct Range {
    const std::vector<int32_t> & pos;
    int32_t                      p0, p1;
    int32_t                      first;  // index of the first token in the range

    Range(const std::vector<int32_t> & at, int32_t from, int32_t to) : pos(at), p0(from), p1(to) {
        first = (int32_t) (std::find_if(pos.begin(), pos.end(), [=](int32_t p) { return p >= from && p < to; }) - pos.begin());
    }

    bool has(int32_t token) const { return pos[(size_t) token] >= p0 && pos[(size_t) token] < p1; }
    // Returns false if no token of this ascending list can be in the range. A quick test: most removals are of the last tokens.
    bool reaches(const std::vector<int32_t> & tokens) const { return !tokens.empty() && tokens.back() >= first; }

    std::vector<uint8_t> outside(const std::vector<int32_t> & tokens) const {  // returns 1 for each token that is not in the range
        std::vector<uint8_t> flags(tokens.size(), 1);
        for (size_t r = tokens.size(); r-- > 0 && tokens[r] >= first;) {
            flags[r] = !has(tokens[r]);
        }
        return flags;
    }
};

// The effect of a removal on one block.
struct Cut {
    bool                                           any = false;    // whether the block changes
    std::vector<int32_t>                           rows;           // remaining rows of a block that lists its tokens
    std::vector<std::vector<std::vector<uint8_t>>> flags;          // [layer][head][row] 1: the row remains; for heads with lists
    int32_t                                        left      = 0;  // remaining tokens of a block that lists its tokens
    int32_t                                        left_each = 0;  // remaining rows of every head of a stream's block
};

// Returns the cut of a block that lists its tokens.
Cut cut_listed(const Block & block, const Range & range) {
    Cut cut;
    if (!range.reaches(block.tokens)) {
        cut.left = (int32_t) block.length();
        return cut;
    }
    for (size_t r = 0; r < block.length(); r++) {
        if (!range.has(block.tokens[r])) {
            cut.rows.push_back((int32_t) r);
        }
    }
    cut.any  = cut.rows.size() < block.length();
    cut.left = (int32_t) cut.rows.size();
    for (const BlockLayer & layer : block.layers) {
        auto & heads = cut.flags.emplace_back();
        for (size_t h = 0; cut.any && h < layer.heads.size(); h++) {
            heads.push_back(range.outside(layer.heads[h].tokens));
        }
    }
    return cut;
}

// Returns the cut of a ragged block that is not pending.
Cut cut_by_head(const Block & block, const Range & range) {
    Cut cut;
    for (const BlockLayer & layer : block.layers) {
        auto & heads = cut.flags.emplace_back();
        for (const HeadList & head : layer.heads) {
            cut.any = cut.any || range.reaches(head.tokens);
            heads.push_back(range.outside(head.tokens));
        }
    }
    return cut;
}

// Returns the cut of a stream's block, and appends its heads to `gone`. All heads must keep the same number of rows, so a head that
// lost fewer rows also loses its oldest rows after the sinks. first: number of pending rows before the block.
Cut cut_streamed(const Block & block, const Range & range, int32_t sinks, size_t first, std::vector<Removed> & gone) {
    const int32_t n = block.rows(0, 0);
    Cut           cut;
    int32_t       fewest = n;
    auto &        keep   = cut.flags;
    keep.resize(block.layers.size());
    for (size_t l = 0; l < keep.size(); l++) {
        for (const HeadList & h : block.layers[l].heads) {
            auto & flags = keep[l].emplace_back(range.outside(h.tokens));
            fewest = std::min(fewest, (int32_t) std::count(flags.begin(), flags.end(), 1));
        }
    }
    cut.any       = fewest < n;
    cut.left_each = fewest;
    if (!cut.any) {
        return cut;
    }
    for (size_t l = 0; l < keep.size(); l++) {
        for (size_t h = 0; h < keep[l].size(); h++) {
            auto & flags   = keep[l][h];
            auto   surplus = (int32_t) std::count(flags.begin(), flags.end(), 1) - fewest;
            for (int32_t r = std::min(sinks, fewest), left = 0; r < n && left < surplus; r++) {
                left += flags[(size_t) r];
                flags[(size_t) r] = 0;
            }
            Removed of_head{ (int32_t) l, (int32_t) h, first, (size_t) n, {} };
            for (int32_t r = 0; r < n; r++) {
                if (flags[(size_t) r]) {
                    of_head.keep.push_back(r);
                }
            }
            gone.push_back(std::move(of_head));
        }
    }
    return cut;
}

// Returns whether the remaining rows are the first rows of the block, so that no row moves.
bool ends(const std::vector<int32_t> & rows) { return !rows.empty() && rows.back() + 1 == (int32_t) rows.size(); }

void apply(Block & block, const Cut & cut) noexcept {
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

}  // namespace

bool holds(const Store & store, int32_t p0, int32_t p1) {
    const auto & pos = store.contents().pos;
    return std::any_of(pos.begin(), pos.end(), [&](int32_t p) { return p >= p0 && p < p1; });
}

void forget_last(Store & store, int32_t p0, int32_t p1) {
    auto & pos = store.mutable_contents().pos;
    size_t n   = pos.size();
    while (n > 0 && pos[n - 1] >= p0 && pos[n - 1] < p1) {
        n--;
    }
    pos.resize(n);
    store.mutable_contents().image.resize(n);
}

// Takes all memory before the first row moves, so that it cannot fail half-way.
std::vector<Removed> remove_rows(Store & store, int32_t p0, int32_t p1) {
    auto &               blocks       = store.mutable_contents().blocks;
    size_t &             pending_from = store.mutable_contents().pending_from;
    const Range          range(store.contents().pos, p0, p1);
    std::vector<Removed> gone;
    std::vector<Cut>     cuts;
    size_t               row    = 0;  // number of pending rows before the block
    const auto           listed = [&](size_t b) { return !blocks[b].ragged() || b >= pending_from; };
    for (size_t b = 0; b < blocks.size(); b++) {
        const Block & block = blocks[b];
        if (block.kind == BlockKind::streamed) {
            cuts.push_back(cut_streamed(block, range, store.contents().sinks, row, gone));
            row += (size_t) cuts.back().left_each;
            continue;
        }
        cuts.push_back(listed(b) ? cut_listed(block, range) : cut_by_head(block, range));
        if (b >= pending_from && cuts.back().any) {
            gone.push_back({ -1, -1, row, block.length(), cuts.back().rows });
        }
        row += b >= pending_from ? (size_t) cuts.back().left : 0;
    }
    for (size_t b = 0; b < blocks.size(); b++) {
        for (size_t l = 0; cuts[b].any && l < blocks[b].layers.size(); l++) {
            BlockLayer & layer = blocks[b].layers[l];
            if (!layer.heads.empty() || !ends(cuts[b].rows)) {
                layer.rows.memory().own();
            }
        }
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

void loosen_row(Store & store, int32_t layer, int32_t head, int32_t row) {
    for (Block & block : store.mutable_contents().blocks) {
        const int32_t n = block.rows(layer, head);
        if (row < n) {
            block.loosen((size_t) layer);
            return;
        }
        row -= n;
    }
}

void drop_row(Store & store, int32_t layer, int32_t head, int32_t row) {
    for (Block & block : store.mutable_contents().blocks) {
        const int32_t n = block.rows(layer, head);
        if (row >= n) {
            row -= n;
            continue;
        }
        block.loosen((size_t) layer);
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
