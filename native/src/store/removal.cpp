// Taking rows out of a sequence: by position, as llama.cpp asks for it, and one by one, as decode policies do.

#include "store/sequence.h"

#include <algorithm>
#include <cstring>

namespace kvedge {

void Sequence::remove_from_ragged(Block & block, int32_t p0, int32_t p1) {
    for (size_t l = 0; l < block.layers.size(); l++) {
        uint8_t *    data = block.layers[l].memory.data();
        const size_t kst = row_k(shapes()[l], type_), vst = row_v(shapes()[l], type_);
        for (auto & h : block.layers[l].heads) {
            int32_t kept = 0;
            for (int32_t r = 0; r < h.length; r++) {
                const int32_t p = pos[(size_t) h.tokens[(size_t) r]];
                if (p >= p0 && p < p1) {
                    continue;
                }
                if (kept != r) {
                    memcpy(data + h.k_offset + (size_t) kept * kst, data + h.k_offset + (size_t) r * kst, kst);
                    memcpy(data + h.v_offset + (size_t) kept * vst, data + h.v_offset + (size_t) r * vst, vst);
                    h.tokens[(size_t) kept] = h.tokens[(size_t) r];
                }
                kept++;
            }
            h.length = kept;
            h.tokens.resize((size_t) kept);
        }
    }
}

void Sequence::remove_from_uniform(Block & block, int32_t p0, int32_t p1, int32_t first_pending_row) {
    std::vector<int32_t> keep;
    for (size_t r = 0; r < block.length(); r++) {
        const int32_t p = pos[(size_t) block.tokens[r]];
        if (p < p0 || p >= p1) {
            keep.push_back((int32_t) r);
        }
    }
    if (keep.size() == block.length()) {
        return;
    }
    for (size_t l = 0; l < block.layers.size(); l++) {
        for (int32_t h = 0; h < shapes()[l].n_heads_kv; h++) {
            for (size_t to = 0; to < keep.size(); to++) {
                const Place from{ &block, keep[to] }, dest{ &block, (int32_t) to };
                memmove(k_row(dest, (int32_t) l, h), k_row(from, (int32_t) l, h), row_k(shapes()[l], type_));
                memmove(v_row(dest, (int32_t) l, h), v_row(from, (int32_t) l, h), row_v(shapes()[l], type_));
            }
        }
    }
    if (first_pending_row >= 0) {
        for (auto & cs : sums) {
            for (size_t base = 0; base < cs.sums.size(); base += (size_t) cs.capacity) {
                auto first = cs.sums.begin() + (std::ptrdiff_t) base + first_pending_row;
                auto last  = cs.sums.begin() + (std::ptrdiff_t) base + cs.capacity;
                for (size_t to = 0; to < keep.size(); to++) {
                    first[(std::ptrdiff_t) to] = first[keep[to]];
                }
                std::fill(std::move(first + (std::ptrdiff_t) block.length(), last, first + (std::ptrdiff_t) keep.size()), last, 0.0);
            }
        }
    }
    for (auto & layer : block.layers) {
        for (int32_t & gone : layer.gone) {
            gone = (int32_t) (std::lower_bound(keep.begin(), keep.end(), gone) - keep.begin());
        }
    }
    for (size_t to = 0; to < keep.size(); to++) {
        block.tokens[to] = block.tokens[(size_t) keep[to]];
    }
    block.tokens.resize(keep.size());
}

void Sequence::remove(int32_t p0, int32_t p1) {
    int32_t pending_row = 0;
    for (size_t b = 0; b < blocks.size(); b++) {
        if (blocks[b]->ragged) {
            remove_from_ragged(*blocks[b], p0, p1);
        } else {
            remove_from_uniform(*blocks[b], p0, p1, b >= pending_from ? pending_row : -1);
            pending_row += b >= pending_from ? (int32_t) blocks[b]->length() : 0;
        }
    }
    for (size_t b = blocks.size(); b-- > 0;) {
        if (!blocks[b]->ragged && blocks[b]->length() == 0) {
            blocks.erase(blocks.begin() + (std::ptrdiff_t) b);
            pending_from -= b < pending_from ? 1 : 0;
        }
    }
    window_from = pending_length();  // the rings count rows that have moved
}

// Of a compressed block: the shorter of the two sides closes the gap.
static void drop_ragged(RaggedHead & h, uint8_t * data, int32_t row, size_t kst, size_t vst) {
    const auto before = (size_t) row, after = (size_t) (h.length - row - 1);
    uint8_t *  k = data + h.k_offset;
    uint8_t *  v = data + h.v_offset;
    if (before <= after) {
        memmove(k + kst, k, before * kst);
        memmove(v + vst, v, before * vst);
        h.k_offset += kst;
        h.v_offset += vst;
    } else {
        memmove(k + before * kst, k + (before + 1) * kst, after * kst);
        memmove(v + before * vst, v + (before + 1) * vst, after * vst);
    }
    h.tokens.erase(h.tokens.begin() + row);
    h.length--;
}

void Sequence::drop_row(int32_t layer, int32_t head, int32_t row) {
    const LayerShape & shape = shapes()[(size_t) layer];
    for (auto & block : blocks) {
        const int32_t n = segment(*block, layer, head).n;
        if (row >= n) {
            row -= n;
            continue;
        }
        BlockLayer & bl = block->layers[(size_t) layer];
        if (block->ragged) {
            drop_ragged(bl.heads[(size_t) head], bl.memory.data(), row, row_k(shape, type_), row_v(shape, type_));
        } else {
            bl.gone.resize((size_t) shape.n_heads_kv, 0);
            bl.gone[(size_t) head]++;
        }
        return;
    }
}

void Sequence::drop_empty_blocks() {
    for (size_t b = blocks.size(); b-- > 0;) {
        const Block & block = *blocks[b];
        const auto    empty = [&](const BlockLayer & l) {
            return !l.gone.empty() && std::all_of(l.gone.begin(), l.gone.end(), [&](int32_t g) { return (size_t) g == block.length(); });
        };
        if (!block.ragged && (int32_t) block.length() == block.capacity && std::all_of(block.layers.begin(), block.layers.end(), empty)) {
            blocks.erase(blocks.begin() + (std::ptrdiff_t) b);
            pending_from -= b < pending_from ? 1 : 0;
        }
    }
}

}  // namespace kvedge
