// Quantises stored rows block by block (sealing), and makes them plain again (unsealing).

#include "store/store.h"
#include "system/threads.h"

#include <algorithm>
#include <atomic>
#include <new>

namespace kvedge {

namespace {

constexpr size_t JOIN = 8;  // number of blocks with GROUP generated rows that are joined, so that there are few mappings and segments

}  // namespace

bool join_layer(const std::vector<Block> & blocks, size_t layer, size_t first, size_t last, bool values, BlockLayer & to) {
    std::vector<const LayerRows *> rows;
    to.heads.resize((size_t) blocks[first].layers[layer].rows.shape().n_heads_kv);
    for (size_t b = first; b < last; b++) {
        rows.push_back(&blocks[b].layers[layer].rows);
    }
    for (size_t h = 0; h < to.heads.size(); h++) {
        HeadList & head   = to.heads[h];
        bool       scores = true;
        for (size_t b = first; b < last; b++) {
            const BlockLayer & from   = blocks[b].layers[layer];
            const bool         listed = !from.heads.empty();
            const auto &       tokens = blocks[b].tokens_of((int32_t) layer, (int32_t) h);
            if (from.biases((int32_t) h)) {
                head.biases.resize(head.tokens.size());
                head.biases.insert(head.biases.end(), from.heads[h].biases.begin(), from.heads[h].biases.end());
            }
            if (listed) {
                head.scores.insert(head.scores.end(), from.heads[h].scores.begin(), from.heads[h].scores.end());
            }
            head.tokens.insert(head.tokens.end(), tokens.begin(), tokens.end());
            scores = scores && (tokens.empty() || (listed && !from.heads[h].scores.empty()));
        }
        if (!scores) {
            head.scores = {};
        }
        head.biases.resize(head.biases.empty() ? 0 : head.tokens.size());
    }
    return join(rows, blocks[first].layers[layer].rows.storage(), values, to.rows);
}

// Replaces the blocks [first, last) by one quantised block. All of them are pending, or none is. values: as in join_layer.
// False: no memory; nothing changed.
static bool seal(Store & store, size_t first, size_t last, bool values) try {
    auto &   blocks       = store.mutable_contents().blocks;
    size_t & pending_from = store.mutable_contents().pending_from;
    Block    block;
    block.kind      = !values && format(store.storage().v).residual ? BlockKind::open_values : BlockKind::ragged;
    block.generated = last - first == 1 && blocks[first].generated;
    block.layers.resize(store.shapes().size());
    for (size_t b = first; b < last && first >= pending_from; b++) {
        block.tokens.insert(block.tokens.end(), blocks[b].tokens.begin(), blocks[b].tokens.end());
    }
    for (size_t l = 0; l < block.layers.size(); l++) {
        if (!join_layer(blocks, l, first, last, values, block.layers[l])) {
            return false;
        }
    }
    blocks[first] = std::move(block);
    blocks.erase(blocks.begin() + (std::ptrdiff_t) first + 1, blocks.begin() + (std::ptrdiff_t) last);
    pending_from -= last <= pending_from ? last - first - 1 : 0;
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

// Joins the newest generated blocks that are quantised, once there are JOIN of them. False: no memory.
static bool join_sealed(Store & store) {
    const auto & blocks = store.contents().blocks;
    size_t last = blocks.size();
    while (last > 0 && (!blocks[last - 1].ragged() || blocks[last - 1].open())) {
        last--;
    }
    size_t first = last;
    while (first > 0 && first != store.contents().pending_from && blocks[first - 1].ragged() && blocks[first - 1].generated && !blocks[first - 1].open()) {
        first--;
    }
    return last - first < JOIN || seal(store, first, last, true);
}

bool seal_generated(Store & store) {
    const auto & blocks       = store.contents().blocks;
    const size_t pending_from = store.contents().pending_from;
    if (!store.storage().quantised() || blocks.empty()) {
        return true;
    }
    const Block & newest = blocks.back();
    if (newest.ragged() || !newest.generated || !newest.full() || blocks.size() == pending_from) {
        return true;
    }
    for (size_t b = 0; b < blocks.size(); b++) {
        const Block & x    = blocks[b];
        const bool    last = b + 1 == blocks.size();
        // blocks of a pending prompt stay plain until its compression
        const bool due = x.ragged() ? !last && x.open() : x.generated || b < pending_from;
        if (due && !seal(store, b, b + 1, !last)) {
            return false;
        }
    }
    return join_sealed(store);
}

bool seal_old(Store & store, size_t end) {
    if (!store.storage().quantised()) {
        return true;
    }
    for (size_t b = 0; b < end; b++) {
        const Block & x    = store.contents().blocks[b];
        const bool    open = !x.ragged() || x.open();
        if (open && x.newest() < store.n_tokens() - RESIDUAL && !seal(store, b, b + 1, true)) {
            return false;
        }
    }
    return true;
}

bool unseal_pending(Store & store, Sealed * was) try {
    auto & blocks = store.mutable_contents().blocks;
    Sealed fresh;
    for (size_t b = store.contents().pending_from; b < blocks.size(); b++) {
        const Block & from = blocks[b];
        if (!from.ragged() || from.kind == BlockKind::whole) {
            continue;
        }
        Block to     = store.make_block((int32_t) from.length());
        to.tokens    = from.tokens;
        to.generated = from.generated;
        for (size_t l = 0; l < store.shapes().size(); l++) {
            for (int32_t h = 0; h < store.shapes()[l].n_heads_kv; h++) {
                fill_rows(to.layers[l].rows, h, from.layers[l].rows);
            }
            to.layers[l].rows.add((int32_t) from.length());
        }
        fresh.emplace_back(b, std::move(to));
    }
    for (auto & f : fresh) {
        std::swap(blocks[f.first], f.second);
    }
    if (was) {
        *was = std::move(fresh);
    }
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

void seal_again(Store & store, Sealed && was) noexcept {
    for (auto & [place, block] : was) {
        std::swap(store.mutable_contents().blocks[place], block);
    }
    was.clear();
}

size_t first_plain(const Store & store) {
    const StoreContents & all = store.contents();
    return (size_t) (std::find_if(all.blocks.begin() + (std::ptrdiff_t) all.pending_from, all.blocks.end(), [](const Block & b) {
        return !b.ragged() || b.kind == BlockKind::whole;
    }) - all.blocks.begin());
}

bool has_whole(const Store & store) {
    const auto & blocks = store.contents().blocks;
    return std::any_of(blocks.begin(), blocks.end(), [](const Block & b) { return b.kind == BlockKind::whole; });
}

// Quantises a uniform block, layer by layer. False: no memory; the block is then invalid.
static bool seal_block(Block & block, const Storage & as, int32_t n_threads) {
    std::atomic<bool> good{ true };
    parallel_for(n_threads, (int32_t) block.layers.size(), [&](int32_t l, int32_t) {
        LayerRows & rows = block.layers[(size_t) l].rows;
        if (!join({ &rows }, as, true, rows)) {
            good = false;
        }
    });
    block.kind      = BlockKind::whole;
    block.generated = false;  // join_sealed must not join it
    return good;
}

bool seal_whole(Store & store, const Storage & as, int32_t n_threads) try {
    auto & blocks = store.mutable_contents().blocks;
    return std::all_of(blocks.begin() + (std::ptrdiff_t) store.contents().pending_from, blocks.end(),
                       [&](Block & block) { return block.ragged() || seal_block(block, as, n_threads); });
} catch (const std::bad_alloc &) {
    return false;
}

}  // namespace kvedge
