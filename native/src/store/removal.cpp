// Taking rows out of a sequence: by position, as llama.cpp asks for it, and one by one, as decode policies do.

#include "store/removal.h"

#include <algorithm>
#include <cstring>

namespace kvedge {

// Keeps the tokens and scores whose flag is set.
void keep_listed(RaggedHead & h, const std::vector<uint8_t> & keep) {
    size_t kept = 0;
    for (size_t r = 0; r < keep.size(); r++) {
        if (keep[r]) {
            h.tokens[kept] = h.tokens[r];
            if (!h.scores.empty()) {
                h.scores[kept] = h.scores[r];
            }
            kept++;
        }
    }
    h.length = (int32_t) kept;
    h.tokens.resize(kept);
    h.scores.resize(h.scores.empty() ? 0 : kept);
}

void Sequence::remove_from_ragged(Block & block, int32_t p0, int32_t p1) {
    std::vector<uint8_t> keep;
    for (size_t l = 0; l < block.layers.size(); l++) {
        uint8_t * data = block.layers[l].memory.data();
        for (auto & h : block.layers[l].heads) {
            keep.clear();
            for (int32_t t : h.tokens) {
                keep.push_back(pos[(size_t) t] < p0 || pos[(size_t) t] >= p1);
            }
            keep_rows(data, h.k, keys_of(shapes()[l], storage_), keep.data());
            keep_rows(data, h.v, values_of(shapes()[l], storage_), keep.data());
            keep_listed(h, keep);
        }
    }
}

// Of a block that will be n_left tokens long: the rows of every head must end there again. Rows only ever move towards the
// front, so that none is overwritten before its turn.
void Sequence::remove_from_loose(Block & block, size_t layer, int32_t p0, int32_t p1, int32_t n_left) {
    const size_t kst = row_k(shapes()[layer], storage_.plain().k), vst = row_v(shapes()[layer], storage_.plain().v);
    BlockLayer & bl   = block.layers[layer];
    const size_t keys = bl.heads.size() * (size_t) block.capacity * kst;
    uint8_t *    data = bl.memory.data();

    std::vector<uint8_t> keep;
    for (size_t i = 0; i < bl.heads.size(); i++) {
        RaggedHead & h = bl.heads[i];
        keep.clear();
        for (int32_t t : h.tokens) {
            keep.push_back(pos[(size_t) t] < p0 || pos[(size_t) t] >= p1);
        }
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

// Of every row [capacity] of x: a block's n entries from `first` on become those in keep, and the rest moves up.
template <class Numbers>
static void close_gaps(Numbers & x, size_t capacity, size_t first, size_t n, const std::vector<int32_t> & keep) {
    for (size_t base = 0; base < x.size() && first < capacity; base += capacity) {
        close_row(x.data() + base, capacity, first, n, keep);
    }
}

void Sequence::remove_from_uniform(Block & block, int32_t p0, int32_t p1, const std::vector<int32_t> & keep) {
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

// Of a block that lists its tokens; first_pending_row is -1 if it is not pending.
void Sequence::remove_listed(Block & block, int32_t p0, int32_t p1, int32_t first_pending_row) {
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
    if (block.ragged) {
        remove_from_ragged(block, p0, p1);
    } else {
        remove_from_uniform(block, p0, p1, keep);
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

bool Sequence::holds(int32_t p0, int32_t p1) const {
    return std::any_of(pos.begin(), pos.end(), [&](int32_t p) { return p >= p0 && p < p1; });
}

// No row is left of them: what comes next takes their indices.
void Sequence::forget_last(int32_t p0, int32_t p1) {
    size_t n = pos.size();
    while (n > 0 && pos[n - 1] >= p0 && pos[n - 1] < p1) {
        n--;
    }
    pos.resize(n);
    image.resize(n);
    for (auto & part : query_parts) {
        part.n = std::min(part.n, std::max(0, (int32_t) n - part.first));
    }
}

void Sequence::remove(int32_t p0, int32_t p1) {
    if (!holds(p0, p1)) {
        return;
    }
    const int32_t n_pending   = pending_length();
    int32_t       pending_row = 0;
    const auto listed      = [&](size_t b) { return !blocks[b]->streamed && (!blocks[b]->ragged || b >= pending_from); };
    for (size_t b = 0; b < blocks.size(); b++) {
        if (blocks[b]->streamed) {
            remove_streamed(*blocks[b], p0, p1, pending_row);
            pending_row += rows_in(*blocks[b], 0, 0);
        } else if (listed(b)) {
            remove_listed(*blocks[b], p0, p1, b >= pending_from ? pending_row : -1);
            pending_row += b >= pending_from ? (int32_t) blocks[b]->length() : 0;
        } else {
            remove_from_ragged(*blocks[b], p0, p1);
        }
    }
    for (size_t b = blocks.size(); b-- > 0;) {
        if (blocks[b]->streamed ? rows_in(*blocks[b], 0, 0) == 0 : listed(b) && blocks[b]->length() == 0) {
            blocks.erase(blocks.begin() + (std::ptrdiff_t) b);
            pending_from -= b < pending_from ? 1 : 0;
        }
    }
    const auto left = query_parts.empty() ? std::vector<int32_t>() : pending_tokens();
    for (size_t i = query_parts.size(); i-- > 0;) {
        const auto at = std::lower_bound(left.begin(), left.end(), query_parts[i].first);
        if (at == left.end() || *at >= query_parts[i].first + query_parts[i].n) {
            drop_query_part(i);
        }
    }
    forget_last(p0, p1);
    if (pending_length() != n_pending) {
        window_from = (int32_t) pos.size();  // the rings count rows that are gone
    }
}

void Sequence::drop_row(int32_t layer, int32_t head, int32_t row) {
    const LayerShape & shape = shapes()[(size_t) layer];
    for (auto & block : blocks) {
        const int32_t n = rows_in(*block, layer, head);
        if (row >= n) {
            row -= n;
            continue;
        }
        loosen(*block, (size_t) layer);
        BlockLayer & bl = block->layers[(size_t) layer];
        RaggedHead & h  = bl.heads[(size_t) head];
        kvedge::drop_row(bl.memory.data(), h.k, keys_of(shape, storage_), row, !block->ragged);
        kvedge::drop_row(bl.memory.data(), h.v, values_of(shape, storage_), row, !block->ragged);
        h.tokens.erase(h.tokens.begin() + row);
        if (!h.scores.empty()) {
            h.scores.erase(h.scores.begin() + row);
        }
        h.length--;
        return;
    }
}

}  // namespace kvedge
