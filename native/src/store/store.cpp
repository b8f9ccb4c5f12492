#include "store/store.h"

#include <algorithm>
#include <cstring>

namespace kvedge {

namespace {

constexpr int32_t FIRST_GROWTH = 32;   // rows of the first block that a generation opens
constexpr int32_t MAX_GROWTH   = 256;  // and of the largest

// Room for n more, in steps that keep the cost of a token constant.
template <class T> void grow(std::vector<T> & x, size_t n) {
    if (x.capacity() < x.size() + n) {
        x.reserve(std::max(x.size() + n, x.size() + x.size() / 4));
    }
}

// So that enter() cannot fail before the block is full.
void reserve_room(Block & block) {
    const size_t room = (size_t) block.capacity - block.length();
    block.tokens.reserve((size_t) block.capacity);
    for (auto & layer : block.layers) {
        for (auto & head : layer.heads) {
            head.tokens.reserve((size_t) head.length + room);
            head.scores.reserve(block.kind == BlockKind::scored ? (size_t) head.length + room : 0);
        }
    }
}

// Adds a token to a uniform block that has room for it, and to what its loose heads hold.
void enter(Block & block, int32_t token) {
    block.tokens.push_back(token);
    for (auto & layer : block.layers) {
        for (auto & head : layer.heads) {
            head.tokens.push_back(token);
            head.length++;
            head.k[1].n++;
            head.v[1].n++;
            if (block.kind == BlockKind::scored) {
                head.scores.push_back(0.0);
            }
        }
    }
}

size_t uniform_bytes(const LayerShape & s, const Storage & plain, int32_t capacity) {
    return (size_t) s.n_heads_kv * (size_t) capacity * (row_k(s, plain.k) + row_v(s, plain.v));
}

}  // namespace

int32_t stored_keys(const Storage & storage, int32_t n) { return is_grouped(storage.k) ? n - n % GROUP : n; }

int32_t stored_values(const Storage & storage, int32_t n) {
    const bool kivi = storage.v == Type::kivi4_v || storage.v == Type::kivi2_v;
    return kivi ? std::max(0, n - RESIDUAL) : n;
}

int32_t Block::newest() const {
    int32_t last = tokens.empty() ? -1 : tokens.back();
    for (const auto & layer : layers) {
        for (const auto & head : layer.heads) {
            last = head.tokens.empty() ? last : std::max(last, head.tokens.back());
        }
    }
    return last;
}

void Store::loosen(Block & block, size_t layer) const {
    const LayerShape & s  = shapes()[layer];
    BlockLayer &       bl = block.layers[layer];
    if (!bl.heads.empty()) {
        return;
    }
    std::vector<RaggedHead> heads((size_t) s.n_heads_kv);
    const size_t            kst = row_k(s, storage_.plain().k), vst = row_v(s, storage_.plain().v);
    const size_t            keys = heads.size() * (size_t) block.capacity * kst;
    for (size_t h = 0; h < heads.size(); h++) {
        heads[h].length      = (int32_t) block.length();
        heads[h].k[1].offset = h * (size_t) block.capacity * kst;
        heads[h].v[1].offset = keys + h * (size_t) block.capacity * vst;
        heads[h].k[1].n = heads[h].v[1].n = heads[h].length;
        heads[h].tokens.reserve((size_t) block.capacity);
        heads[h].tokens = block.tokens;
    }
    bl.heads = std::move(heads);
}

bool Block::loose() const {
    return !ragged() && std::any_of(layers.begin(), layers.end(), [](const BlockLayer & l) { return !l.heads.empty(); });
}

Block Store::lay_out_block(int32_t capacity) const {
    Block block;
    block.capacity = capacity;
    block.layers.resize(shapes().size());
    for (size_t l = 0; l < shapes().size(); l++) {
        block.layers[l].extent = uniform_bytes(shapes()[l], storage_.plain(), capacity);
    }
    return block;
}

Block Store::make_block(int32_t capacity) const {
    Block block = lay_out_block(capacity);
    for (auto & layer : block.layers) {
        layer.memory = Pages::take(layer.extent);
        if (!layer.memory) {
            throw std::bad_alloc();
        }
    }
    return block;
}

// Single tokens come one after the other and get room to grow: twice the last block's, but next to a bounded answer no
// more than a quarter of what it holds.
int32_t Store::next_capacity(const Block * last) const {
    if (storage_.quantised()) {
        return GROUP;  // which are quantised when they are complete
    }
    const int32_t most = evicting() ? std::clamp(head_length(0, 0) / 4, FIRST_GROWTH, MAX_GROWTH) : MAX_GROWTH;
    return std::min(last ? std::max(2 * last->capacity, FIRST_GROWTH) : FIRST_GROWTH, most);
}

bool Store::append(int32_t n, const int32_t * new_pos, bool is_image) try {
    blocks.reserve(blocks.size() + 1);
    Block *       last = blocks.size() > pending_from && !blocks.back().ragged() ? &blocks.back() : nullptr;
    const int32_t room = last ? last->capacity - (int32_t) last->length() : 0;
    const int32_t rest = n - std::min(n, room);

    Block fresh;
    if (rest > 0) {
        fresh = make_block(n == 1 ? next_capacity(last) : rest);  // a prompt's blocks fit exactly
        for (size_t l = 0; l < fresh.layers.size() && scored() && n == 1; l++) {
            loosen(fresh, l);
        }
        fresh.kind      = scored() && n == 1 ? BlockKind::scored : BlockKind::uniform;
        fresh.generated = n == 1;
        reserve_room(fresh);
    }
    grow(pos, (size_t) n);
    grow(image, (size_t) n);
    if (last) {
        reserve_room(*last);
    }

    for (int32_t i = 0; i < n; i++) {
        enter(i < n - rest ? *last : fresh, (int32_t) pos.size());
        pos.push_back(new_pos[i]);
        image.push_back(is_image ? 1 : 0);
    }
    if (rest > 0) {
        blocks.push_back(std::move(fresh));
    }
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool Store::append_unallocated(int32_t n, const int32_t * new_pos, const uint8_t * new_image) try {
    Block block = lay_out_block(n);
    reserve_room(block);
    blocks.reserve(blocks.size() + 1);
    grow(pos, (size_t) n);
    grow(image, (size_t) n);
    for (int32_t i = 0; i < n; i++) {
        enter(block, (int32_t) pos.size());
        pos.push_back(new_pos[i]);
        image.push_back(new_image[i] ? 1 : 0);
    }
    blocks.push_back(std::move(block));
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool Store::take_layer(size_t layer) {
    BlockLayer & to = blocks.back().layers[layer];
    to.memory       = Pages::take(to.extent);
    return (bool) to.memory;
}

void Store::give_back_layer(size_t layer) { blocks.back().layers[layer].memory = Pages(); }

void Store::mark_images(int32_t n, const uint8_t * mask) {
    std::transform(mask, mask + n, image.end() - n, [](uint8_t i) { return (uint8_t) (i != 0); });
}

void Store::take_back(int32_t n) {
    blocks.pop_back();
    pos.resize(pos.size() - (size_t) n);
    image.resize(image.size() - (size_t) n);
}

Store::Place Store::place_from_end(int32_t i, int32_t n) {
    int32_t back = n - i;  // 1: the last token
    for (size_t b = blocks.size(); b-- > pending_from;) {
        const int32_t len = (int32_t) blocks[b].length();
        if (back <= len) {
            return { &blocks[b], len - back };
        }
        back -= len;
    }
    return { nullptr, 0 };
}

uint8_t * Store::k_row(const Place & at, int32_t layer, int32_t head) {
    const LayerShape & s = shapes()[(size_t) layer];
    return at.block->layers[(size_t) layer].memory.data() +
           ((size_t) head * (size_t) at.block->capacity + (size_t) at.row) * row_k(s, storage_.plain().k);
}

uint8_t * Store::v_row(const Place & at, int32_t layer, int32_t head) {
    const LayerShape & s     = shapes()[(size_t) layer];
    const Storage      plain = storage_.plain();
    const size_t       keys  = (size_t) s.n_heads_kv * (size_t) at.block->capacity * row_k(s, plain.k);
    return at.block->layers[(size_t) layer].memory.data() + keys +
           ((size_t) head * (size_t) at.block->capacity + (size_t) at.row) * row_v(s, plain.v);
}

Segment Store::uniform_segment(const Block & block, int32_t layer, int32_t head) const {
    const LayerShape & s     = shapes()[(size_t) layer];
    const Storage      plain = storage_.plain();
    const size_t       kst = row_k(s, plain.k), vst = row_v(s, plain.v);
    const auto         cap  = (size_t) block.capacity;
    const uint8_t *    keys = block.layers[(size_t) layer].memory.data();
    const uint8_t *    vals = keys + (size_t) s.n_heads_kv * cap * kst;
    return { { keys + (size_t) head * cap * kst, kst, plain.k },
             { vals + (size_t) head * cap * vst, vst, plain.v },
             (int32_t) block.length() };
}

HeadView Store::view(int32_t layer, int32_t head) const {
    HeadView out;
    for (size_t b = 0; b < blocks.size(); b++) {
        const bool old = b < pending_from;
        each_segment_in(blocks[b], layer, head, [&](const Segment & s) {
            (old ? out.old : out.pending).push_back(s);
            (old ? out.n_old : out.n_pending) += s.n;
        });
    }
    return out;
}

int32_t Store::head_length(int32_t layer, int32_t head) const {
    int32_t n = 0;
    for (const Block & block : blocks) {
        n += block.rows(layer, head);
    }
    return n;
}

int32_t Store::pending_length() const {
    size_t n = 0;
    for (size_t b = pending_from; b < blocks.size(); b++) {
        n += blocks[b].kind == BlockKind::streamed ? (size_t) blocks[b].rows(0, 0) : blocks[b].length();
    }
    return (int32_t) n;
}

std::vector<int32_t> Store::pending_tokens() const {
    std::vector<int32_t> out;
    for (size_t b = pending_from; b < blocks.size(); b++) {
        out.insert(out.end(), blocks[b].tokens.begin(), blocks[b].tokens.end());
    }
    return out;
}

std::vector<int32_t> Store::head_tokens(int32_t layer, int32_t head) const {
    std::vector<int32_t> out;
    for (const Block & block : blocks) {
        const auto & tokens = block.tokens_of(layer, head);
        out.insert(out.end(), tokens.begin(), tokens.end());
    }
    return out;
}

void Store::close_pending() {
    for (size_t b = pending_from; b < blocks.size(); b++) {
        if (blocks[b].ragged()) {
            blocks[b].tokens = {};
            blocks[b].kind   = blocks[b].kind == BlockKind::streamed ? BlockKind::ragged : blocks[b].kind;
        }
    }
    pending_from = blocks.size();
}

void Store::replace_pending(Block && main, Block && tail) {
    blocks.resize(pending_from);
    for (Block * block : { &main, &tail }) {
        if (std::any_of(block->layers.begin(), block->layers.end(), [](const BlockLayer & layer) { return layer.extent > 0; })) {
            blocks.push_back(std::move(*block));
        }
    }
}

uint64_t Store::give_back_pending(size_t layer) {
    uint64_t n = 0;
    for (size_t b = pending_from; b < blocks.size(); b++) {
        n += blocks[b].layers[layer].memory.size();
        blocks[b].layers[layer].memory = Pages();
    }
    return n;
}

uint64_t Store::bytes() const {
    uint64_t n = 0;
    for (const Block & b : blocks) {
        for (const auto & l : b.layers) {
            n += l.memory.size();
        }
    }
    return n;
}

uint64_t Store::index_bytes() const {
    uint64_t n = pos.capacity() * sizeof(int32_t) + image.capacity();
    for (const Block & b : blocks) {
        n += b.tokens.capacity() * sizeof(int32_t);
        for (const auto & l : b.layers) {
            for (const auto & h : l.heads) {
                n += sizeof(RaggedHead) + h.tokens.capacity() * sizeof(int32_t) + h.k[0].live.capacity();
            }
        }
    }
    return n;
}

}  // namespace kvedge
