#include "store/store.h"

#include <algorithm>
#include <new>

namespace kvedge {

namespace {

constexpr int32_t FIRST_GROWTH = 32;   // capacity of the first block of an answer
constexpr int32_t MAX_GROWTH   = 256;  // largest capacity of a block of an answer

// Reserves room for n more elements, at least a quarter more, so that the mean cost of a token is constant.
template <class T> void grow(std::vector<T> & x, size_t n) {
    if (x.capacity() < x.size() + n) {
        x.reserve(std::max(x.size() + n, x.size() + x.size() / 4));
    }
}

// Reserves the lists of a block up to its capacity, so that enter() cannot fail before the block is full.
void reserve_room(Block & block) {
    const size_t room = (size_t) block.capacity - block.length();
    block.tokens.reserve((size_t) block.capacity);
    for (auto & layer : block.layers) {
        for (auto & head : layer.heads) {
            head.tokens.reserve(head.tokens.size() + room);
            head.scores.reserve(block.kind == BlockKind::scored ? head.tokens.size() + room : 0);
        }
    }
}

// Adds a token to a uniform block that has room for it, and to the lists of its loose heads.
void enter(Block & block, int32_t token) {
    block.tokens.push_back(token);
    for (auto & layer : block.layers) {
        for (auto & head : layer.heads) {
            head.tokens.push_back(token);
            if (block.kind == BlockKind::scored) {
                head.scores.push_back(0.0);
            }
        }
    }
}

void add_rows(Block * block, int32_t n) {
    for (size_t l = 0; block && l < block->layers.size(); l++) {
        block->layers[l].rows.add(n);
    }
}

}  // namespace

int32_t stored_keys(const Storage & storage, int32_t n) { return is_grouped(storage.k) ? n - n % GROUP : n; }

int32_t stored_values(const Storage & storage, int32_t n) { return format(storage.v).residual ? std::max(0, n - RESIDUAL) : n; }

int32_t Block::newest() const {
    int32_t last = tokens.empty() ? -1 : tokens.back();
    for (const auto & layer : layers) {
        for (const auto & head : layer.heads) {
            last = head.tokens.empty() ? last : std::max(last, head.tokens.back());
        }
    }
    return last;
}

void HeadList::keep(const std::vector<uint8_t> & flags) {
    size_t kept = 0;
    for (size_t r = 0; r < flags.size(); r++) {
        if (flags[r]) {
            tokens[kept] = tokens[r];
            if (!scores.empty()) {
                scores[kept] = scores[r];
            }
            if (!biases.empty()) {
                biases[kept] = biases[r];
            }
            kept++;
        }
    }
    tokens.resize(kept);
    scores.resize(scores.empty() ? 0 : kept);
    biases.resize(biases.empty() ? 0 : kept);
}

void Block::loosen(size_t layer) {
    BlockLayer & bl = layers[layer];
    if (!bl.heads.empty()) {
        bl.rows.memory().own();
        return;
    }
    std::vector<HeadList> heads((size_t) bl.rows.shape().n_heads_kv);
    for (HeadList & head : heads) {
        head.tokens.reserve((size_t) capacity);
        head.tokens = tokens;
    }
    bl.rows.loosen();
    bl.heads = std::move(heads);
}

bool Block::loose() const {
    return !ragged() && std::any_of(layers.begin(), layers.end(), [](const BlockLayer & l) { return !l.heads.empty(); });
}

// Returns an empty uniform block without memory.
static Block lay_out_block(const Store & store, int32_t capacity) {
    const auto & shapes = store.shapes();
    Block        block;
    block.capacity = capacity;
    block.layers.resize(shapes.size());
    for (size_t l = 0; l < shapes.size(); l++) {
        block.layers[l].rows = LayerRows(shapes[l], store.storage(), capacity);
    }
    return block;
}

Block Store::make_block(int32_t capacity) const {
    Block block = lay_out_block(*this, capacity);
    for (size_t l = 0; l < block.layers.size(); l++) {
        if (!on_device(l) && !block.layers[l].rows.take()) {
            throw std::bad_alloc();
        }
    }
    return block;
}

// Returns the capacity of the next block for single tokens: twice the last block's, up to MAX_GROWTH. If rows are dropped during
// the answer, at most a quarter of the rows that a head holds (but at least FIRST_GROWTH).
static int32_t next_capacity(const Store & store, const Block * last) {
    if (store.storage().quantised()) {
        return GROUP;  // a full block is quantised (seal_generated)
    }
    const int32_t most = store.evicting() ? std::clamp(store.head_length(0, 0) / 4, FIRST_GROWTH, MAX_GROWTH) : MAX_GROWTH;
    return std::min(last ? std::max(2 * last->capacity, FIRST_GROWTH) : FIRST_GROWTH, most);
}

static bool shared(const Block & block) {
    return std::any_of(block.layers.begin(), block.layers.end(), [](const BlockLayer & layer) { return !layer.rows.memory().can_write(); });
}

Store Store::share() const {
    StoreContents all{ pos, image, {}, pending_from, eviction, sinks };
    for (const Block & block : blocks) {
        Block & copy   = all.blocks.emplace_back();
        copy.kind      = block.kind;
        copy.generated = block.generated;
        copy.capacity  = block.capacity;
        copy.tokens    = block.tokens;
        for (const BlockLayer & layer : block.layers) {
            copy.layers.push_back({ layer.rows.share(), layer.heads });
        }
    }
    Store out(shapes(), storage(), std::move(all));
    out.on_device_ = on_device_;
    return out;
}

Store Store::empty_copy() const {
    Store out(shapes(), storage(), { pos, image, {} });
    reserve_blocks(out);
    return out;
}

bool Store::append(int32_t n, const int32_t * new_pos, bool is_image) try {
    blocks.reserve(blocks.size() + 1);
    Block *       last = blocks.size() > pending_from && !blocks.back().ragged() && !shared(blocks.back()) ? &blocks.back() : nullptr;
    const int32_t room = last ? last->capacity - (int32_t) last->length() : 0;
    const int32_t rest = n - std::min(n, room);

    Block fresh;
    if (rest > 0) {
        fresh = make_block(n == 1 ? next_capacity(*this, last) : rest);  // a prompt's block has no spare rows
        for (size_t l = 0; l < fresh.layers.size() && scored() && n == 1; l++) {
            fresh.loosen(l);
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
    add_rows(last, n - rest);
    if (rest > 0) {
        add_rows(&fresh, rest);
        blocks.push_back(std::move(fresh));
    }
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool Store::append_unallocated(int32_t n, const int32_t * new_pos, const uint8_t * new_image) try {
    Block block = lay_out_block(*this, n);
    reserve_room(block);
    blocks.reserve(blocks.size() + 1);
    grow(pos, (size_t) n);
    grow(image, (size_t) n);
    for (int32_t i = 0; i < n; i++) {
        enter(block, (int32_t) pos.size());
        pos.push_back(new_pos[i]);
        image.push_back(new_image[i] ? 1 : 0);
    }
    add_rows(&block, n);
    blocks.push_back(std::move(block));
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool take_layer(Store & store, size_t layer) { return store.mutable_contents().blocks.back().layers[layer].rows.take(); }

void give_back_layer(Store & store, size_t layer) { store.mutable_contents().blocks.back().layers[layer].rows.memory() = SharedPages(); }

void Store::release_to_device(size_t layer) {
    on_device_.resize(shapes().size());
    on_device_[layer] = 1;
    for (Block & block : blocks) {
        block.layers[layer].rows.memory() = SharedPages();
    }
}

bool Store::bring_back(size_t layer) {
    for (size_t b = 0; b < blocks.size(); b++) {
        if (!blocks[b].layers[layer].rows.take()) {
            while (b-- > 0) {
                blocks[b].layers[layer].rows.memory() = SharedPages();
            }
            return false;
        }
    }
    on_device_[layer] = 0;
    return true;
}

void Store::mark_images(int32_t n, const uint8_t * mask) {
    std::transform(mask, mask + n, image.end() - n, [](uint8_t i) { return (uint8_t) (i != 0); });
}

void Store::take_back(int32_t n) noexcept {
    pos.resize(pos.size() - (size_t) n);
    image.resize(image.size() - (size_t) n);
    while (n > 0) {
        Block &       last = blocks.back();
        const int32_t gone = std::min(n, (int32_t) last.length());
        n -= gone;
        if (gone == (int32_t) last.length()) {
            blocks.pop_back();
            continue;
        }
        last.tokens.resize(last.length() - (size_t) gone);
        for (BlockLayer & layer : last.layers) {
            for (HeadList & head : layer.heads) {
                head.tokens.resize(head.tokens.size() - (size_t) gone);
                head.scores.resize(head.scores.empty() ? 0 : head.tokens.size());
            }
        }
        add_rows(&last, -gone);
    }
}

Store::Place Store::place_from_end(int32_t i, int32_t n) {
    int32_t back = n - i;  // distance from the end; 1: the last token
    for (size_t b = blocks.size(); b-- > pending_from;) {
        const int32_t len = (int32_t) blocks[b].length();
        if (back <= len) {
            return { &blocks[b], len - back };
        }
        back -= len;
    }
    return { nullptr, 0 };
}

HeadView Store::view(int32_t layer, int32_t head) const {
    HeadView out;
    for (size_t b = 0; b < blocks.size(); b++) {
        const bool old = b < pending_from;
        auto &     to  = old ? out.old : out.pending;
        blocks[b].layers[(size_t) layer].each_segment(head, [&](const Segment & s) { to.push_back(s); });
        (old ? out.n_old : out.n_pending) += blocks[b].rows(layer, head);
    }
    return out;
}

void read_biases(const Store & store, int32_t layer, int32_t head, float * out) {
    for (const Block & block : store.contents().blocks) {
        const float * from = block.layers[(size_t) layer].biases(head);
        const auto    n    = (size_t) block.rows(layer, head);
        out                = from ? std::copy_n(from, n, out) : std::fill_n(out, n, 0.0f);
    }
}

bool biased(const Store & store) {
    const auto & blocks = store.contents().blocks;
    const auto   has    = [](const BlockLayer & layer) { return layer.bias_bytes() > 0; };
    return std::any_of(blocks.begin(), blocks.end(), [&](const Block & block) {
        return std::any_of(block.layers.begin(), block.layers.end(), has);
    });
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

std::vector<int32_t> pending_tokens(const Store & store) {
    const StoreContents & all = store.contents();
    std::vector<int32_t>  out;
    for (size_t b = all.pending_from; b < all.blocks.size(); b++) {
        out.insert(out.end(), all.blocks[b].tokens.begin(), all.blocks[b].tokens.end());
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

void reserve_blocks(Store & store) { store.mutable_contents().blocks.reserve(store.contents().blocks.size() + 2); }

void replace_pending(Store & store, Block && main, Block && tail) {
    auto & blocks = store.mutable_contents().blocks;
    blocks.resize(store.contents().pending_from);
    for (Block * block : { &main, &tail }) {
        if (std::any_of(block->layers.begin(), block->layers.end(), [](const BlockLayer & layer) { return layer.rows.extent() > 0; })) {
            blocks.push_back(std::move(*block));
        }
    }
}

uint64_t give_back_pending(Store & store, size_t layer) {
    StoreContents & all = store.mutable_contents();
    uint64_t        n   = 0;
    for (size_t b = all.pending_from; b < all.blocks.size(); b++) {
        n += all.blocks[b].layers[layer].rows.bytes();
        all.blocks[b].layers[layer].rows.memory() = SharedPages();
    }
    return n;
}

uint64_t BlockLayer::bias_bytes() const {
    uint64_t n = 0;
    for (const HeadList & head : heads) {
        n += head.biases.capacity() * sizeof(float);
    }
    return n;
}

uint64_t Store::bytes() const {
    uint64_t n = 0;
    for (const Block & block : blocks) {
        for (const auto & layer : block.layers) {
            n += layer.bytes();
        }
    }
    return n;
}

uint64_t plain_bytes(const Store & store) {
    const Storage plain = store.storage().plain();
    uint64_t      n     = 0;
    for (const Block & block : store.contents().blocks) {
        for (size_t l = 0; l < block.layers.size(); l++) {
            const LayerShape & s    = store.shapes()[l];
            const uint64_t     pair = row_k(s, plain.k) + row_v(s, plain.v);
            n += block.kind == BlockKind::whole ? block.length() * (uint64_t) s.n_heads_kv * pair : block.layers[l].bytes();
        }
    }
    return n;
}

uint64_t index_bytes(const Store & store) {
    const StoreContents & all = store.contents();
    uint64_t              n   = all.pos.capacity() * sizeof(int32_t) + all.image.capacity();
    for (const Block & block : all.blocks) {
        n += block.tokens.capacity() * sizeof(int32_t);
        for (const auto & layer : block.layers) {
            n += layer.rows.index_bytes() + layer.heads.size() * sizeof(HeadList);
            for (const auto & head : layer.heads) {
                n += head.tokens.capacity() * sizeof(int32_t);
            }
        }
    }
    return n;
}

}  // namespace kvedge
