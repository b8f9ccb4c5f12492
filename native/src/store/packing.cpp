// Packing: moves the rows that decode policies have left in many blocks into one block without gaps.

#include "store/store.h"

#include <algorithm>
#include <new>

namespace kvedge {

// Returns whether a block can take more tokens.
static bool grows(const StoreContents & all, size_t block) {
    const Block & b = all.blocks[block];
    return block + 1 == all.blocks.size() && block >= all.pending_from && !b.ragged() && !b.full();
}

void drop_empty_blocks(Store & store) {
    auto & blocks = store.mutable_contents().blocks;
    for (size_t b = blocks.size(); b-- > 0;) {
        const auto left = [](const BlockLayer & l) {
            return !l.heads.empty() && std::all_of(l.heads.begin(), l.heads.end(), [](const HeadList & h) { return h.tokens.empty(); });
        };
        if (!grows(store.contents(), b) && std::all_of(blocks[b].layers.begin(), blocks[b].layers.end(), left)) {
            blocks.erase(blocks.begin() + (std::ptrdiff_t) b);
            store.mutable_contents().pending_from -= b < store.contents().pending_from ? 1 : 0;
        }
    }
}

// Returns how many of the first blocks can be packed. With a quantised storage, only blocks whose rows are all quantised.
static size_t packable(const Store & store) {
    const auto & blocks = store.contents().blocks;
    if (!store.storage().quantised()) {
        return blocks.size() - (!blocks.empty() && grows(store.contents(), blocks.size() - 1) ? 1 : 0);
    }
    const auto open = std::find_if(blocks.begin(), blocks.end(), [](const Block & b) { return !b.ragged() || b.open(); });
    return (size_t) (open - blocks.begin());
}

// Returns whether the dropped rows of the first n blocks waste more than a quarter of the memory of the other rows.
static bool is_sparse(const Store & store, size_t n) {
    uint64_t held = 0, extent = 0;
    for (size_t l = 0; l < store.shapes().size(); l++) {
        std::vector<const LayerRows *> rows;
        for (size_t b = 0; b < n; b++) {
            rows.push_back(&store.contents().blocks[b].layers[l].rows);
            extent += rows.back()->extent();
        }
        for (int32_t h = 0; h < store.shapes()[l].n_heads_kv; h++) {
            held += joined_bytes(rows, h);
        }
    }
    return extent > held + held / 4;
}

void pack_if_sparse(Store & store) try {
    auto &       blocks   = store.mutable_contents().blocks;
    const auto & shapes   = store.shapes();
    const size_t n_blocks = packable(store);
    if (n_blocks == 0 || !is_sparse(store, n_blocks)) {
        return;
    }
    Block packed;
    packed.kind = BlockKind::ragged;
    packed.layers.resize(shapes.size());
    for (size_t l = 0; l < shapes.size(); l++) {
        packed.layers[l].heads.resize((size_t) shapes[l].n_heads_kv);
        packed.layers[l].rows = LayerRows(shapes[l], store.storage(), std::vector<RaggedHead>(packed.layers[l].heads.size()));
    }
    blocks.reserve(blocks.size() + 1);
    // Packed rows are not pending. If a layer cannot be packed, the old blocks stay valid.
    for (size_t l = 0; l < shapes.size(); l++) {
        BlockLayer                         layer;
        std::vector<std::vector<HeadList>> left(n_blocks, std::vector<HeadList>((size_t) shapes[l].n_heads_kv));
        bool                               done = false;
        try {
            for (size_t b = 0; b < n_blocks; b++) {
                blocks[b].loosen(l);
            }
            done = join_layer(blocks, l, 0, n_blocks, true, layer);
        } catch (const std::bad_alloc &) {
        }
        if (!done) {
            break;
        }
        packed.layers[l] = std::move(layer);
        for (size_t b = 0; b < n_blocks; b++) {
            BlockLayer & gone = blocks[b].layers[l];
            gone.heads        = std::move(left[b]);
            gone.rows.clear();
        }
    }
    blocks.insert(blocks.begin(), std::move(packed));
    store.mutable_contents().pending_from++;
    drop_empty_blocks(store);
} catch (const std::bad_alloc &) {
    // without memory, the sparse blocks stay, which are valid
}

}  // namespace kvedge
