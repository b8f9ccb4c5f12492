// Packing: what decode policies leave behind in many blocks moves into one that fits.

#include "store/sequence.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace kvedge {

// Whether tokens can still be added to a block.
bool Sequence::grows(size_t block) const {
    const Block & b = *blocks[block];
    return block + 1 == blocks.size() && block >= pending_from && !b.ragged && (int32_t) b.length() < b.capacity;
}

void Sequence::drop_empty_blocks() {
    for (size_t b = blocks.size(); b-- > 0;) {
        const auto left = [](const BlockLayer & l) {
            return !l.heads.empty() && std::all_of(l.heads.begin(), l.heads.end(), [](const RaggedHead & h) { return h.length == 0; });
        };
        if (!grows(b) && std::all_of(blocks[b]->layers.begin(), blocks[b]->layers.end(), left)) {
            blocks.erase(blocks.begin() + (std::ptrdiff_t) b);
            pending_from -= b < pending_from ? 1 : 0;
        }
    }
}

bool Sequence::is_sparse() const {
    uint64_t held = 0, extent = 0;
    for (size_t b = 0; b < blocks.size(); b++) {
        for (size_t l = 0; l < shapes().size() && !grows(b); l++) {
            const BlockLayer & layer = blocks[b]->layers[l];
            uint64_t           rows  = layer.heads.empty() ? blocks[b]->length() * (size_t) shapes()[l].n_heads_kv : 0;
            for (const auto & h : layer.heads) {
                rows += (uint64_t) h.length;
            }
            held += rows * (row_k(shapes()[l], type_) + row_v(shapes()[l], type_));
            extent += layer.extent;
        }
    }
    return extent - held > held / 4;
}

// Moves what the first n blocks hold of a layer into an empty block.
bool Sequence::pack_layer(Block & to, size_t layer, size_t n_blocks) {
    const LayerShape & s  = shapes()[layer];
    const auto         l  = (int32_t) layer;
    BlockLayer &       bl = to.layers[layer];

    std::vector<RaggedHead>              heads((size_t) s.n_heads_kv);
    std::vector<std::vector<RaggedHead>> left(n_blocks, std::vector<RaggedHead>((size_t) s.n_heads_kv));
    for (size_t h = 0; h < heads.size(); h++) {
        bool scores = true;
        for (size_t b = 0; b < n_blocks; b++) {
            const auto & from   = blocks[b]->layers[layer].heads;
            const auto & tokens = from.empty() ? blocks[b]->tokens : from[h].tokens;
            heads[h].tokens.insert(heads[h].tokens.end(), tokens.begin(), tokens.end());
            scores = scores && (tokens.empty() || (!from.empty() && !from[h].scores.empty()));
        }
        heads[h].length = (int32_t) heads[h].tokens.size();
        for (size_t b = 0; b < n_blocks && scores; b++) {
            const auto & from = blocks[b]->layers[layer].heads;
            if (!from.empty()) {
                heads[h].scores.insert(heads[h].scores.end(), from[h].scores.begin(), from[h].scores.end());
            }
        }
    }
    const size_t extent = lay_out_ragged(s, type_, heads);
    Pages        memory = Pages::take(extent);
    if (extent > 0 && !memory) {
        return false;
    }
    for (size_t h = 0; h < heads.size(); h++) {
        uint8_t * k = memory.data() + heads[h].k_offset;
        uint8_t * v = memory.data() + heads[h].v_offset;
        for (size_t b = 0; b < n_blocks; b++) {
            const Segment seg = segment(*blocks[b], l, (int32_t) h);
            if (seg.n > 0) {
                memcpy(k, seg.k.data, (size_t) seg.n * seg.k.stride);
                memcpy(v, seg.v.data, (size_t) seg.n * seg.v.stride);
                k += (size_t) seg.n * seg.k.stride;
                v += (size_t) seg.n * seg.v.stride;
            }
        }
    }
    bl.heads  = std::move(heads);
    bl.extent = extent;
    bl.memory = std::move(memory);
    for (size_t b = 0; b < n_blocks; b++) {
        BlockLayer & gone = blocks[b]->layers[layer];
        gone.heads        = std::move(left[b]);
        gone.extent       = 0;
        gone.memory       = Pages();
    }
    return true;
}

void Sequence::pack_if_sparse() try {
    if (!is_sparse()) {
        return;
    }
    const size_t n_blocks = blocks.size() - (!blocks.empty() && grows(blocks.size() - 1) ? 1 : 0);
    auto         packed   = std::make_unique<Block>();
    packed->ragged        = true;
    packed->layers.resize(shapes().size());
    for (size_t l = 0; l < shapes().size(); l++) {
        packed->layers[l].heads.resize((size_t) shapes()[l].n_heads_kv);
    }
    blocks.reserve(blocks.size() + 1);
    // Packed rows count as compressed. Where a layer cannot be packed, the blocks are as good as before.
    for (size_t l = 0; l < shapes().size(); l++) {
        bool done = false;
        try {
            done = pack_layer(*packed, l, n_blocks);
        } catch (const std::bad_alloc &) {
        }
        if (!done) {
            break;
        }
    }
    blocks.insert(blocks.begin(), std::move(packed));
    pending_from++;
    drop_empty_blocks();
} catch (const std::bad_alloc &) {
    // sparse blocks are right, too
}

}  // namespace kvedge
