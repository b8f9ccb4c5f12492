// Taking rows out of a sequence: by position, as llama.cpp asks for it, and one by one, as decode policies do.

#include "store/store.h"

#include <algorithm>
#include <cstring>

namespace kvedge {

std::vector<uint8_t> Store::outside(const std::vector<int32_t> & tokens, int32_t p0, int32_t p1) const {
    std::vector<uint8_t> flags;
    flags.reserve(tokens.size());
    for (int32_t t : tokens) {
        flags.push_back(pos[(size_t) t] < p0 || pos[(size_t) t] >= p1);
    }
    return flags;
}

void Store::remove_from_ragged(Block & block, int32_t p0, int32_t p1) {
    for (size_t l = 0; l < block.layers.size(); l++) {
        uint8_t * data = block.layers[l].memory.data();
        for (auto & h : block.layers[l].heads) {
            const auto keep = outside(h.tokens, p0, p1);
            keep_rows(data, h.k, keys_of(shapes()[l], storage_), keep.data());
            keep_rows(data, h.v, values_of(shapes()[l], storage_), keep.data());
            keep_listed(h, keep);
        }
    }
}

// Of a block that will be n_left tokens long: the rows of every head must end there again. Rows only ever move towards the
// front, so that none is overwritten before its turn.
void Store::remove_from_loose(Block & block, size_t layer, int32_t p0, int32_t p1, int32_t n_left) {
    const size_t kst = row_k(shapes()[layer], storage_.plain().k), vst = row_v(shapes()[layer], storage_.plain().v);
    BlockLayer & bl   = block.layers[layer];
    const size_t keys = bl.heads.size() * (size_t) block.capacity * kst;
    uint8_t *    data = bl.memory.data();

    for (size_t i = 0; i < bl.heads.size(); i++) {
        RaggedHead & h    = bl.heads[i];
        const auto   keep = outside(h.tokens, p0, p1);
        const auto   first = (size_t) n_left - (size_t) std::count(keep.begin(), keep.end(), 1);
        const size_t k_to = (i * (size_t) block.capacity + first) * kst, v_to = keys + (i * (size_t) block.capacity + first) * vst;
        size_t       kept = 0;
        for (size_t r = 0; r < keep.size(); r++) {
            if (keep[r]) {
                memmove(data + k_to + kept * kst, data + h.k[1].offset + r * kst, kst);
                memmove(data + v_to + kept * vst, data + h.v[1].offset + r * vst, vst);
                kept++;
            }
        }
        h.k[1].offset = k_to;
        h.v[1].offset = v_to;
        h.k[1].n = h.v[1].n = (int32_t) kept;
        keep_listed(h, keep);
    }
}

void Store::remove_from_uniform(Block & block, int32_t p0, int32_t p1, const std::vector<int32_t> & keep) {
    const Storage plain = storage_.plain();
    for (size_t l = 0; l < block.layers.size(); l++) {
        if (!block.layers[l].heads.empty()) {
            remove_from_loose(block, l, p0, p1, (int32_t) keep.size());
            continue;
        }
        for (int32_t h = 0; h < shapes()[l].n_heads_kv; h++) {
            for (size_t to = 0; to < keep.size(); to++) {
                const Place from{ &block, keep[to] }, dest{ &block, (int32_t) to };
                memmove(k_row(dest, (int32_t) l, h), k_row(from, (int32_t) l, h), row_k(shapes()[l], plain.k));
                memmove(v_row(dest, (int32_t) l, h), v_row(from, (int32_t) l, h), row_v(shapes()[l], plain.v));
            }
        }
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
    if (block.ragged()) {
        remove_from_ragged(block, p0, p1);
    } else {
        remove_from_uniform(block, p0, p1, keep);
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
            remove_from_ragged(block, p0, p1);
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
    const LayerShape & shape = shapes()[(size_t) layer];
    for (auto & block : blocks) {
        const int32_t n = block.rows(layer, head);
        if (row >= n) {
            row -= n;
            continue;
        }
        loosen(block, (size_t) layer);
        BlockLayer & bl = block.layers[(size_t) layer];
        RaggedHead & h  = bl.heads[(size_t) head];
        kvedge::drop_row(bl.memory.data(), h.k, keys_of(shape, storage_), row, !block.ragged());
        kvedge::drop_row(bl.memory.data(), h.v, values_of(shape, storage_), row, !block.ragged());
        h.tokens.erase(h.tokens.begin() + row);
        if (!h.scores.empty()) {
            h.scores.erase(h.scores.begin() + row);
        }
        h.length--;
        return;
    }
}

}  // namespace kvedge
