// Streams: what was compressed stays pending, so that the next compression looks at it again. The heads then hold different
// pending tokens, but all of them as many.

#include "store/store.h"

#include <algorithm>

namespace kvedge {

bool Store::pending_differs() const {
    return std::any_of(blocks.begin() + (std::ptrdiff_t) pending_from, blocks.end(),
                       [](const Block & b) { return b.kind == BlockKind::streamed; });
}

std::vector<int32_t> Store::pending_tokens(int32_t layer, int32_t head) const {
    std::vector<int32_t> out;
    for (size_t b = pending_from; b < blocks.size(); b++) {
        const auto & tokens = blocks[b].tokens_of(layer, head);
        out.insert(out.end(), tokens.begin(), tokens.end());
    }
    return out;
}

int32_t Store::even_rows() const {
    int32_t old = 0;
    for (size_t b = 0; b < pending_from; b++) {
        const int32_t n = blocks[b].rows(0, 0);
        if (blocks[b].loose()) {
            return -1;
        }
        for (size_t l = 0; l < shapes().size(); l++) {
            for (int32_t h = 0; h < shapes()[l].n_heads_kv; h++) {
                if (blocks[b].rows((int32_t) l, h) != n) {
                    return -1;
                }
            }
        }
        old += n;
    }
    return old;
}

void Store::open_stream(int32_t n_sinks) {
    for (size_t b = 0; b < pending_from; b++) {
        blocks[b].kind = blocks[b].ragged() ? BlockKind::streamed : blocks[b].kind;
    }
    pending_from = 0;
    sinks        = n_sinks;
}

// Where heads lose different numbers of rows, those that lost fewer give up the oldest behind the sinks, too. first: pending
// rows before the block.
Cut Store::cut_streamed(const Block & block, int32_t p0, int32_t p1, size_t first, std::vector<Removed> & gone) const {
    const int32_t n = block.rows(0, 0);
    Cut           cut;
    int32_t       fewest = n;
    auto &        keep   = cut.flags;
    keep.resize(shapes().size());
    for (size_t l = 0; l < keep.size(); l++) {
        for (const HeadList & h : block.layers[l].heads) {
            auto & flags = keep[l].emplace_back(outside(h.tokens, p0, p1));
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

}  // namespace kvedge
