// Taking rows out of a sequence: by position, as llama.cpp asks for it, and one by one, as decode policies do.

#include "store/sequence.h"

#include <algorithm>
#include <cstring>

namespace kvedge {

// Keeps the rows of a head whose tokens stay, moved to its k_to and v_to-th byte. Rows only ever move towards the front, so
// that none is overwritten before its turn.
template <class Stays>
static void keep_rows(RaggedHead & h, uint8_t * data, size_t k_to, size_t v_to, size_t kst, size_t vst, const Stays & stays) {
    size_t kept = 0;
    for (size_t r = 0; r < (size_t) h.length; r++) {
        if (!stays(h.tokens[r])) {
            continue;
        }
        if (k_to + kept * kst != h.k_offset + r * kst) {
            memmove(data + k_to + kept * kst, data + h.k_offset + r * kst, kst);
            memmove(data + v_to + kept * vst, data + h.v_offset + r * vst, vst);
        }
        h.tokens[kept] = h.tokens[r];
        if (!h.scores.empty()) {
            h.scores[kept] = h.scores[r];
        }
        kept++;
    }
    h.k_offset = k_to;
    h.v_offset = v_to;
    h.length   = (int32_t) kept;
    h.tokens.resize(kept);
    h.scores.resize(h.scores.empty() ? 0 : kept);
}

void Sequence::remove_from_ragged(Block & block, int32_t p0, int32_t p1) {
    const auto stays = [&](int32_t t) { return pos[(size_t) t] < p0 || pos[(size_t) t] >= p1; };
    for (size_t l = 0; l < block.layers.size(); l++) {
        const size_t kst = row_k(shapes()[l], type_), vst = row_v(shapes()[l], type_);
        for (auto & h : block.layers[l].heads) {
            keep_rows(h, block.layers[l].memory.data(), h.k_offset, h.v_offset, kst, vst, stays);
        }
    }
}

// Of a block that will be n_left tokens long: the rows of every head must end there again.
void Sequence::remove_from_loose(Block & block, size_t layer, int32_t p0, int32_t p1, int32_t n_left) {
    const size_t kst = row_k(shapes()[layer], type_), vst = row_v(shapes()[layer], type_);
    BlockLayer & bl   = block.layers[layer];
    const size_t keys = bl.heads.size() * (size_t) block.capacity * kst;
    const auto   stays = [&](int32_t t) { return pos[(size_t) t] < p0 || pos[(size_t) t] >= p1; };
    for (size_t i = 0; i < bl.heads.size(); i++) {
        RaggedHead & h     = bl.heads[i];
        const auto   first = (size_t) n_left - (size_t) std::count_if(h.tokens.begin(), h.tokens.end(), stays);
        const size_t row   = i * (size_t) block.capacity + first;
        keep_rows(h, bl.memory.data(), row * kst, keys + row * vst, kst, vst, stays);
    }
}

// Of every row [capacity] of x: a block's n entries from `first` on become those in keep, and the rest moves up.
template <class T>
static void close_gaps(std::vector<T> & x, size_t capacity, size_t first, size_t n, const std::vector<int32_t> & keep) {
    for (size_t base = 0; base < x.size() && first < capacity; base += capacity) {
        T *    row = x.data() + base;
        size_t to  = first;
        for (int32_t r : keep) {
            if (first + (size_t) r < capacity) {  // tokens whose attention nobody sums may follow
                row[to++] = row[first + (size_t) r];
            }
        }
        for (size_t from = first + n; from < capacity; from++) {
            row[to++] = row[from];
        }
        std::fill(row + to, row + capacity, T());
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
        if (!block.layers[l].heads.empty()) {
            remove_from_loose(block, l, p0, p1, (int32_t) keep.size());
            continue;
        }
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
            close_gaps(cs.sums, (size_t) cs.capacity, (size_t) first_pending_row, block.length(), keep);
            close_gaps(cs.squares, (size_t) cs.capacity, (size_t) first_pending_row, block.length(), keep);
        }
        close_gaps(seen, seen.size(), (size_t) first_pending_row, block.length(), keep);
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
    const auto left = pending_tokens();
    for (size_t i = query_parts.size(); i-- > 0;) {
        const auto at = std::lower_bound(left.begin(), left.end(), query_parts[i].first);
        if (at == left.end() || *at >= query_parts[i].first + query_parts[i].n) {
            drop_query_part(i);
        }
    }
    window_from = pending_length();  // the rings count rows that have moved
}

// The gap is closed from the front, where the rows' end must not move, or from the shorter side.
static void drop_from(RaggedHead & h, uint8_t * data, int32_t row, size_t kst, size_t vst, bool from_front) {
    const auto before = (size_t) row, after = (size_t) (h.length - row - 1);
    uint8_t *  k = data + h.k_offset;
    uint8_t *  v = data + h.v_offset;
    if (from_front || before <= after) {
        memmove(k + kst, k, before * kst);
        memmove(v + vst, v, before * vst);
        h.k_offset += kst;
        h.v_offset += vst;
    } else {
        memmove(k + before * kst, k + (before + 1) * kst, after * kst);
        memmove(v + before * vst, v + (before + 1) * vst, after * vst);
    }
    h.tokens.erase(h.tokens.begin() + row);
    if (!h.scores.empty()) {
        h.scores.erase(h.scores.begin() + row);
    }
    h.length--;
}

void Sequence::drop_row(int32_t layer, int32_t head, int32_t row) {
    const LayerShape & shape = shapes()[(size_t) layer];
    for (auto & block : blocks) {
        const int32_t n = segment(*block, layer, head).n;
        if (row < n) {
            loosen(*block, (size_t) layer);
            BlockLayer & bl = block->layers[(size_t) layer];
            drop_from(bl.heads[(size_t) head], bl.memory.data(), row, row_k(shape, type_), row_v(shape, type_), !block->ragged);
            return;
        }
        row -= n;
    }
}

}  // namespace kvedge
