// Streams: what was compressed stays pending, so that the next compression looks at it again. The heads then hold different
// pending tokens, but all of them as many.

#include "store/removal.h"

#include <algorithm>

namespace kvedge {

bool Sequence::pending_differs() const {
    return std::any_of(blocks.begin() + (std::ptrdiff_t) pending_from, blocks.end(), [](const auto & b) { return b->streamed; });
}

std::vector<int32_t> Sequence::pending_tokens(int32_t layer, int32_t head) const {
    std::vector<int32_t> out;
    for (size_t b = pending_from; b < blocks.size(); b++) {
        const auto & heads  = blocks[b]->layers[(size_t) layer].heads;
        const auto & tokens = heads.empty() ? blocks[b]->tokens : heads[(size_t) head].tokens;
        out.insert(out.end(), tokens.begin(), tokens.end());
    }
    return out;
}

bool Sequence::open_stream(int32_t n_sinks) {
    size_t old = 0;
    for (size_t b = 0; b < pending_from; b++) {
        const int32_t n = rows_in(*blocks[b], 0, 0);
        for (size_t l = 0; l < shapes().size(); l++) {
            if (!blocks[b]->ragged && !blocks[b]->layers[l].heads.empty()) {
                return false;
            }
            for (int32_t h = 0; h < shapes()[l].n_heads_kv; h++) {
                if (rows_in(*blocks[b], (int32_t) l, h) != n) {
                    return false;
                }
            }
        }
        old += (size_t) n;
    }
    for (auto & cs : sums) {  // of what was compressed before nothing is known
        Bulk<double> shifted;
        for (size_t from = 0; from < cs.sums.size(); from += (size_t) cs.capacity) {
            shifted.insert(shifted.end(), old, 0.0);
            shifted.insert(shifted.end(), cs.sums.begin() + (std::ptrdiff_t) from,
                           cs.sums.begin() + (std::ptrdiff_t) (from + (size_t) cs.capacity));
        }
        cs.sums = std::move(shifted);
        cs.capacity += cs.capacity > 0 ? (int32_t) old : 0;
    }
    for (size_t b = 0; b < pending_from; b++) {
        blocks[b]->streamed = blocks[b]->ragged;
    }
    pending_from = 0;
    sinks        = n_sinks;
    return true;
}

void Sequence::keep_sums(size_t layer, size_t head, const std::vector<int32_t> & kept) {
    ColumnSums & cs       = sums[layer];
    const auto   capacity = (size_t) cs.capacity;
    close_row(cs.sums.data() + head * capacity, capacity, 0, capacity, kept);
}

// Where heads lose different numbers of rows, those that lost fewer give up the oldest behind the sinks, too.
void Sequence::remove_streamed(Block & block, int32_t p0, int32_t p1, int32_t first_pending_row) {
    const int32_t                                  n = rows_in(block, 0, 0);
    std::vector<std::vector<std::vector<uint8_t>>> keep(shapes().size());
    int32_t                                        fewest = n;
    for (size_t l = 0; l < keep.size(); l++) {
        for (const RaggedHead & h : block.layers[l].heads) {
            auto & flags = keep[l].emplace_back();
            for (int32_t t : h.tokens) {
                flags.push_back(pos[(size_t) t] < p0 || pos[(size_t) t] >= p1);
            }
            fewest = std::min(fewest, (int32_t) std::count(flags.begin(), flags.end(), 1));
        }
    }
    if (fewest == n) {
        return;
    }
    for (size_t l = 0; l < keep.size(); l++) {
        for (size_t h = 0; h < keep[l].size(); h++) {
            auto & flags   = keep[l][h];
            auto   surplus = (int32_t) std::count(flags.begin(), flags.end(), 1) - fewest;
            for (int32_t r = std::min(sinks, fewest), left = 0; r < n && left < surplus; r++) {
                left += flags[(size_t) r];
                flags[(size_t) r] = 0;
            }
            std::vector<int32_t> rows;
            for (int32_t r = 0; r < n; r++) {
                if (flags[(size_t) r]) {
                    rows.push_back(r);
                }
            }
            RaggedHead & head = block.layers[l].heads[h];
            uint8_t *    data = block.layers[l].memory.data();
            keep_rows(data, head.k, keys_of(shapes()[l], storage_), flags.data());
            keep_rows(data, head.v, values_of(shapes()[l], storage_), flags.data());
            keep_listed(head, flags);
            if (!sums.empty() && sums[l].capacity > 0) {
                const auto capacity = (size_t) sums[l].capacity;
                if ((size_t) first_pending_row < capacity) {
                    close_row(sums[l].sums.data() + h * capacity, capacity, (size_t) first_pending_row, (size_t) n, rows);
                }
            }
        }
    }
}

}  // namespace kvedge
