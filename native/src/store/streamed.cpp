// Streams: compressed rows stay pending, so that the next compression chooses among them again. The heads then hold different
// pending tokens, but every head holds the same number.

#include "store/store.h"

#include <algorithm>

namespace kvedge {

bool pending_differs(const Store & store) {
    const StoreContents & all = store.contents();
    return std::any_of(all.blocks.begin() + (std::ptrdiff_t) all.pending_from, all.blocks.end(),
                       [](const Block & b) { return b.kind == BlockKind::streamed; });
}

std::vector<int32_t> pending_tokens(const Store & store, int32_t layer, int32_t head) {
    const StoreContents & all = store.contents();
    std::vector<int32_t>  out;
    for (size_t b = all.pending_from; b < all.blocks.size(); b++) {
        const auto & tokens = all.blocks[b].tokens_of(layer, head);
        out.insert(out.end(), tokens.begin(), tokens.end());
    }
    return out;
}

int32_t even_rows(const Store & store) {
    const auto & shapes = store.shapes();
    const auto & blocks = store.contents().blocks;
    int32_t      old    = 0;
    for (size_t b = 0; b < store.contents().pending_from; b++) {
        const int32_t n = blocks[b].rows(0, 0);
        if (blocks[b].loose()) {
            return -1;
        }
        for (size_t l = 0; l < shapes.size(); l++) {
            for (int32_t h = 0; h < shapes[l].n_heads_kv; h++) {
                if (blocks[b].rows((int32_t) l, h) != n) {
                    return -1;
                }
            }
        }
        old += n;
    }
    return old;
}

void open_stream(Store & store, int32_t n_sinks) {
    StoreContents & all = store.mutable_contents();
    for (size_t b = 0; b < all.pending_from; b++) {
        all.blocks[b].kind = all.blocks[b].ragged() ? BlockKind::streamed : all.blocks[b].kind;
    }
    all.pending_from = 0;
    all.sinks        = n_sinks;
}

void set_sinks(Store & store, int32_t n) { store.mutable_contents().sinks = n; }

void stream_last(Store & store) { store.mutable_contents().blocks.back().kind = BlockKind::streamed; }

}  // namespace kvedge
