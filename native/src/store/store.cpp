#include "store/store.h"

#include <algorithm>
#include <new>

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

void Store::loosen(Block & block, size_t layer) const {
    BlockLayer & bl = block.layers[layer];
    if (!bl.heads.empty()) {
        return;
    }
    std::vector<HeadList> heads((size_t) shapes()[layer].n_heads_kv);
    for (HeadList & head : heads) {
        head.tokens.reserve((size_t) block.capacity);
        head.tokens = block.tokens;
    }
    bl.rows.loosen();
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
        block.layers[l].rows = LayerRows(shapes()[l], storage_, capacity);
    }
    return block;
}

Block Store::make_block(int32_t capacity) const {
    Block block = lay_out_block(capacity);
    for (size_t l = 0; l < block.layers.size(); l++) {
        const bool away = !away_.empty() && away_[l];
        if (!away && !block.layers[l].rows.take()) {
            throw std::bad_alloc();
        }
    }
    return block;
}

// Single tokens come one after the other and get room to grow: twice the last block's, but next to an answer that evicts no
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
    add_rows(&block, n);
    blocks.push_back(std::move(block));
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool Store::take_layer(size_t layer) {
    return blocks.back().layers[layer].rows.take();
}

void Store::give_back_layer(size_t layer) { blocks.back().layers[layer].rows.give_back(); }

void Store::send_away(size_t layer) {
    away_.resize(shapes().size());
    away_[layer] = 1;
    for (Block & block : blocks) {
        block.layers[layer].rows.give_back();
    }
}

bool Store::bring_back(size_t layer) {
    for (size_t b = 0; b < blocks.size(); b++) {
        if (!blocks[b].layers[layer].rows.take()) {
            while (b-- > 0) {
                blocks[b].layers[layer].rows.give_back();
            }
            return false;
        }
    }
    away_[layer] = 0;
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

void Store::read_biases(int32_t layer, int32_t head, float * out) const {
    for (const Block & block : blocks) {
        const float * from = block.layers[(size_t) layer].biases(head);
        const auto    n    = (size_t) block.rows(layer, head);
        out                = from ? std::copy_n(from, n, out) : std::fill_n(out, n, 0.0f);
    }
}

bool Store::biased() const {
    const auto has = [](const BlockLayer & layer) { return layer.bias_bytes() > 0; };
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
        if (std::any_of(block->layers.begin(), block->layers.end(), [](const BlockLayer & layer) { return layer.rows.extent() > 0; })) {
            blocks.push_back(std::move(*block));
        }
    }
}

uint64_t Store::give_back_pending(size_t layer) {
    uint64_t n = 0;
    for (size_t b = pending_from; b < blocks.size(); b++) {
        n += blocks[b].layers[layer].rows.bytes();
        blocks[b].layers[layer].rows.give_back();
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

uint64_t Store::index_bytes() const {
    uint64_t n = pos.capacity() * sizeof(int32_t) + image.capacity();
    for (const Block & block : blocks) {
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
