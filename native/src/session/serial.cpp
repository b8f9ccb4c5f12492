#include "session/serial.h"

#include <algorithm>
#include <new>

namespace kvedge {

namespace {

constexpr int32_t MAX_SPARE = 256;  // rows that a block which still grows may have beyond its tokens

size_t bytes_of(const LayerShape & s, Type t) { return row_k(s, t) + row_v(s, t); }

// Takes a rising row of token indices below n_tokens, all of them from `first` on.
bool rising(const std::vector<int32_t> & tokens, int32_t first, size_t n_tokens) {
    for (int32_t t : tokens) {
        if (t < first || (size_t) t >= n_tokens) {
            return false;
        }
        first = t + 1;
    }
    return true;
}

void write_rows(const Sequence & seq, const Block & block, size_t l, Sink & out) {
    const LayerShape & shape = seq.shapes()[l];
    for (int32_t h = 0; h < shape.n_heads_kv; h++) {
        const Segment s = seq.segment(block, (int32_t) l, h);
        if (s.n > 0) {
            out.write(s.k.data, (size_t) s.n * row_k(shape, seq.type()));
            out.write(s.v.data, (size_t) s.n * row_v(shape, seq.type()));
        }
    }
}

void write_head(const std::vector<int32_t> & tokens, const std::vector<double> & scores, Sink & out) {
    out.value<int32_t>((int32_t) tokens.size());
    out.values(tokens);
    out.value<uint8_t>(!scores.empty());
    out.values(scores);
}

bool is_loose(const Block & block) {
    return std::any_of(block.layers.begin(), block.layers.end(), [](const BlockLayer & l) { return !l.heads.empty(); });
}

bool grows(const Sequence & seq, size_t b) {
    const Block & block = *seq.blocks[b];
    return b + 1 == seq.blocks.size() && b >= seq.pending_from && !block.ragged && (int32_t) block.length() < block.capacity;
}

// A block whose heads hold different tokens is written as a compressed one, unless tokens can still be added to it.
void write_block(const Sequence & seq, size_t b, Sink & out) {
    const Block & block  = *seq.blocks[b];
    const auto    length = (int32_t) block.length();
    const bool    growing = grows(seq, b) && !(is_loose(block) && block.capacity > MAX_SPARE);
    const bool    ragged  = block.ragged || (is_loose(block) && !growing);
    out.value<uint8_t>(ragged);
    if (!ragged) {
        out.value<uint8_t>(block.scored);
        out.value<int32_t>(length);
        // a prompt's block that was cut keeps no more room than a growing one has
        out.value<int32_t>(growing ? std::min(block.capacity, std::max(length, MAX_SPARE)) : length);
        out.values(block.tokens);
    }
    for (size_t l = 0; l < block.layers.size(); l++) {
        const BlockLayer & layer = block.layers[l];
        if (!ragged) {
            out.value<uint8_t>(!layer.heads.empty());
        }
        for (int32_t h = 0; ragged && layer.heads.empty() && h < seq.shapes()[l].n_heads_kv; h++) {
            write_head(block.tokens, {}, out);
        }
        for (const RaggedHead & head : layer.heads) {
            write_head(head.tokens, head.scores, out);
        }
        write_rows(seq, block, l, out);
    }
}

struct Parse {
    FileReader & in;
    Sequence &   seq;
    int32_t      first = 0;  // smallest token index that the next block may hold

    bool rows(const Block & block, size_t l) {
        const LayerShape & shape = seq.shapes()[l];
        for (int32_t h = 0; h < shape.n_heads_kv; h++) {
            const Segment s = seq.segment(block, (int32_t) l, h);
            if (s.n > 0 && (!in.read(const_cast<uint8_t *>(s.k.data), (size_t) s.n * row_k(shape, seq.type())) ||
                            !in.read(const_cast<uint8_t *>(s.v.data), (size_t) s.n * row_v(shape, seq.type())))) {
                return false;
            }
        }
        return true;
    }

    bool heads(BlockLayer & layer, const LayerShape & shape, int32_t & next) {
        layer.heads.resize((size_t) shape.n_heads_kv);
        for (RaggedHead & head : layer.heads) {
            uint8_t scored;
            if (!in.value(head.length) || head.length < 0 || !in.values(head.tokens, (uint64_t) head.length) ||
                !rising(head.tokens, first, seq.pos.size()) || !in.value(scored) || scored > 1 ||
                !in.values(head.scores, scored ? (uint64_t) head.length : 0)) {
                return false;
            }
            next = head.tokens.empty() ? next : std::max(next, head.tokens.back() + 1);
        }
        return true;
    }

    // Whether the file can hold the rows of a layer whose heads are this long in all.
    bool can_hold(uint64_t n_rows, const LayerShape & shape) const { return n_rows <= in.left() / bytes_of(shape, seq.type()); }

    bool ragged(Block & block, size_t l, int32_t & next) {
        const LayerShape & shape = seq.shapes()[l];
        BlockLayer &       layer = block.layers[l];
        uint64_t           held  = 0;
        if (!heads(layer, shape, next)) {
            return false;
        }
        for (const RaggedHead & head : layer.heads) {
            held += (uint64_t) head.length;
        }
        return can_hold(held, shape) && take(layer, lay_out_ragged(shape, seq.type(), layer.heads)) && rows(block, l);
    }

    bool uniform(Block & block, size_t l, int32_t & next) {
        const LayerShape & shape    = seq.shapes()[l];
        const auto         n_heads  = (size_t) shape.n_heads_kv;
        const auto         capacity = (size_t) block.capacity;
        BlockLayer &       layer    = block.layers[l];
        const size_t       kst = row_k(shape, seq.type()), vst = row_v(shape, seq.type());
        uint8_t            loose;
        if (!in.value(loose) || loose > 1 || (block.scored && !loose) || (loose && block.capacity > MAX_SPARE)) {
            return false;
        }
        if (!loose && !can_hold(n_heads * block.length(), shape)) {
            return false;
        }
        if (loose && !heads(layer, shape, next)) {
            return false;
        }
        for (size_t h = 0; h < layer.heads.size(); h++) {
            RaggedHead & head = layer.heads[h];
            if ((size_t) head.length > block.length() || head.scores.size() != (block.scored ? (size_t) head.length : 0) ||
                !std::includes(block.tokens.begin(), block.tokens.end(), head.tokens.begin(), head.tokens.end())) {
                return false;
            }
            const size_t row = h * capacity + block.length() - (size_t) head.length;  // rows end where the block does
            head.k_offset    = row * kst;
            head.v_offset    = n_heads * capacity * kst + row * vst;
        }
        return take(layer, n_heads * capacity * (kst + vst)) && rows(block, l);
    }

    static bool take(BlockLayer & layer, size_t size) {
        layer.extent = size;
        layer.memory = Pages::take(size);
        if (size > 0 && !layer.memory) {
            throw std::bad_alloc();
        }
        return true;
    }

    bool block(bool last, bool pending) {
        auto    made = std::make_unique<Block>();
        uint8_t is_ragged;
        if (!in.value(is_ragged) || is_ragged > 1 || (is_ragged && pending)) {
            return false;
        }
        made->ragged = is_ragged != 0;
        if (!made->ragged && !shared_tokens(*made, last && pending)) {
            return false;
        }
        int32_t next = made->tokens.empty() ? first : made->tokens.back() + 1;
        made->layers.resize(seq.shapes().size());
        for (size_t l = 0; l < made->layers.size(); l++) {
            if (!(made->ragged ? ragged(*made, l, next) : uniform(*made, l, next))) {
                return false;
            }
        }
        first = next;
        seq.blocks.push_back(std::move(made));
        return true;
    }

    bool shared_tokens(Block & block, bool may_grow) {
        uint8_t scored;
        int32_t length;
        if (!in.value(scored) || !in.value(length) || !in.value(block.capacity) || scored > 1 || length < 1 ||
            !in.values(block.tokens, (uint64_t) length) || !rising(block.tokens, first, seq.pos.size())) {
            return false;
        }
        block.scored = scored != 0;
        return block.capacity >= length && block.capacity <= (may_grow ? std::max(length, MAX_SPARE) : length);
    }
};

}  // namespace

bool observes(const Sequence & seq) {
    return !seq.sums.empty() || !seq.windows.empty() || !seq.entropies.empty() || !seq.queries.empty();
}

void write_sequence(const Sequence & seq, Sink & out) {
    // Of an answer that is bounded only the block that grows is still pending: nothing of it is compressed again.
    const size_t  n    = seq.blocks.size();
    const size_t  done = seq.bounded && n > seq.pending_from ? n - (grows(seq, n - 1) ? 1 : 0) : seq.pending_from;
    int32_t       pending = 0;
    for (size_t b = done; b < n; b++) {
        pending += (int32_t) seq.blocks[b]->length();
    }
    out.value<uint64_t>(seq.pos.size());
    out.values(seq.pos);
    out.values(seq.image);
    out.value<uint32_t>((uint32_t) n);
    out.value<uint32_t>((uint32_t) done);
    out.value<int32_t>(std::clamp(seq.window_from, 0, pending));
    for (int32_t n_missing : { seq.missing.sums, seq.missing.squares, seq.missing.entropies, seq.missing.queries }) {
        out.value<int32_t>(std::clamp(n_missing, 0, pending));
    }
    out.value<uint8_t>(seq.bounded);
    out.value<uint8_t>(seq.scored);
    for (size_t b = 0; b < n; b++) {
        write_block(seq, b, out);
    }
}

std::unique_ptr<Sequence> read_sequence(FileReader & in, const std::vector<LayerShape> & shapes, Type type) {
    auto     seq = std::make_unique<Sequence>(shapes, type);
    uint64_t n_tokens;
    uint32_t n_blocks, done;
    uint8_t  bounded, scored;
    Missing & missing = seq->missing;
    if (!in.value(n_tokens) || n_tokens > INT32_MAX || !in.values(seq->pos, n_tokens) || !in.values(seq->image, n_tokens) ||
        !in.value(n_blocks) || !in.value(done) || !in.value(seq->window_from) || !in.value(missing.sums) ||
        !in.value(missing.squares) || !in.value(missing.entropies) || !in.value(missing.queries) || !in.value(bounded) || !in.value(scored)) {
        return nullptr;
    }
    const bool known = std::all_of(seq->image.begin(), seq->image.end(), [](uint8_t i) { return i <= 1; }) &&
                       std::all_of(seq->pos.begin(), seq->pos.end(), [](int32_t p) { return p >= 0; });
    if (!known || done > n_blocks || bounded > 1 || scored > bounded) {
        return nullptr;
    }
    Parse parse{ in, *seq };
    for (uint32_t b = 0; b < n_blocks; b++) {
        if (!parse.block(b + 1 == n_blocks, b >= done)) {
            return nullptr;
        }
        const Block & block = *seq->blocks.back();
        if (!bounded && b >= done && is_loose(block)) {
            return nullptr;  // what is yet to be compressed is whole
        }
    }
    seq->pending_from = done;
    seq->bounded      = bounded != 0;
    seq->scored       = scored != 0;
    const int32_t pending = seq->pending_length();
    for (int32_t count : { seq->window_from, missing.sums, missing.squares, missing.entropies, missing.queries }) {
        if (count < 0 || count > pending) {
            return nullptr;
        }
    }
    return seq;
}

}  // namespace kvedge
