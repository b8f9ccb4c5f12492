#include "session/serial.h"

#include <algorithm>
#include <new>

namespace kvedge {

namespace {

constexpr int32_t MAX_SPARE = 256;  // rows that a block which still grows may have beyond its tokens

size_t bytes_of(const LayerShape & s, const Storage & t) { return row_k(s, t.k) + row_v(s, t.v); }

// What a ragged block says of itself.
enum : uint8_t { GENERATED = 1, OPEN_K = 2, OPEN_V = 4, ALL_FLAGS = 7 };

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

void write_side(const uint8_t * memory, const Side & side, const SideLayout & layout, Sink & out) {
    for (size_t a = 0; a < 2; a++) {
        if (const size_t n = area_bytes(layout.types[a], layout.d, side[a]); n > 0) {
            out.write(memory + side[a].offset, n);
        }
    }
}

void write_rows(const Sequence & seq, const Block & block, size_t l, Sink & out) {
    const LayerShape & shape = seq.shapes()[l];
    const BlockLayer & layer = block.layers[l];
    for (int32_t h = 0; h < shape.n_heads_kv; h++) {
        if (!layer.heads.empty()) {
            write_side(layer.memory.data(), layer.heads[(size_t) h].k, keys_of(shape, seq.storage()), out);
            write_side(layer.memory.data(), layer.heads[(size_t) h].v, values_of(shape, seq.storage()), out);
        } else if (const Segment s = seq.uniform_segment(block, (int32_t) l, h); s.n > 0) {
            out.write(s.k.data, (size_t) s.n * s.k.stride);
            out.write(s.v.data, (size_t) s.n * s.v.stride);
        }
    }
}

// How many of a side's rows are quantised, and how they lie in groups.
void write_counts(const Side & side, const SideLayout & layout, Sink & out) {
    out.value<int32_t>(side[0].n);
    if (is_grouped(layout.types[0])) {
        out.value<uint32_t>((uint32_t) side[0].live.size());
        out.values(side[0].live);
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

// Whether tokens can be added to a block, or it is the one that is quantised before the next token.
bool grows(const Sequence & seq, size_t b) {
    const Block & block = *seq.blocks[b];
    return b + 1 == seq.blocks.size() && b >= seq.pending_from && !block.ragged &&
           ((int32_t) block.length() < block.capacity || (seq.storage().quantised() && block.generated));
}

// A block whose heads hold different tokens is written as a compressed one, unless tokens can still be added to it.
void write_block(const Sequence & seq, size_t b, bool pending, Sink & out) {
    const Block & block  = *seq.blocks[b];
    const auto    length = (int32_t) block.length();
    const bool    growing = grows(seq, b) && !(is_loose(block) && block.capacity > MAX_SPARE);
    const bool    ragged  = block.ragged || (is_loose(block) && !growing);
    out.value<uint8_t>(ragged);
    if (ragged) {
        const bool plain = !block.ragged && seq.storage().quantised();  // of a block that was closed before it was full
        out.value<uint8_t>((uint8_t) ((block.generated ? GENERATED : 0) | (block.open_k || plain ? OPEN_K : 0) |
                                      (block.open_v || plain ? OPEN_V : 0)));
        out.value<int32_t>(pending ? length : 0);
        out.values(pending ? block.tokens : std::vector<int32_t>());
    } else {
        out.value<uint8_t>(block.generated);
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
        const SideLayout keys = keys_of(seq.shapes()[l], seq.storage()), vals = values_of(seq.shapes()[l], seq.storage());
        for (int32_t h = 0; ragged && layer.heads.empty() && h < seq.shapes()[l].n_heads_kv; h++) {
            write_head(block.tokens, {}, out);
            write_counts(make_side(keys, length, 0), keys, out);
            write_counts(make_side(vals, length, 0), vals, out);
        }
        for (const RaggedHead & head : layer.heads) {
            write_head(head.tokens, head.scores, out);
            if (ragged) {
                write_counts(head.k, keys, out);
                write_counts(head.v, vals, out);
            }
        }
        write_rows(seq, block, l, out);
    }
}

struct Parse {
    FileReader & in;
    Sequence &   seq;
    int32_t      first = 0;  // smallest token index that the next block may list for all its heads

    // The same of each layer and head. A compressed block in groups is two: its whole groups, and what is left of each
    // head, so that a head with less than a group begins in the second, before where another one's first group ends.
    std::vector<std::vector<int32_t>> own = {};

    void begin_at(int32_t token) {
        for (auto & heads : own) {
            std::fill(heads.begin(), heads.end(), token);
        }
    }

    bool side(uint8_t * memory, const Side & side, const SideLayout & layout) {
        for (size_t a = 0; a < 2; a++) {
            const size_t n = area_bytes(layout.types[a], layout.d, side[a]);
            if (n > 0 && !in.read(memory + side[a].offset, n)) {
                return false;
            }
        }
        return true;
    }

    bool rows(Block & block, size_t l) {
        const LayerShape & shape = seq.shapes()[l];
        BlockLayer &       layer = block.layers[l];
        for (int32_t h = 0; h < shape.n_heads_kv; h++) {
            if (!layer.heads.empty()) {
                const RaggedHead & head = layer.heads[(size_t) h];
                if (!side(layer.memory.data(), head.k, keys_of(shape, seq.storage())) ||
                    !side(layer.memory.data(), head.v, values_of(shape, seq.storage()))) {
                    return false;
                }
            } else if (const Segment s = seq.uniform_segment(block, (int32_t) l, h);
                       s.n > 0 && (!in.read(const_cast<uint8_t *>(s.k.data), (size_t) s.n * s.k.stride) ||
                                   !in.read(const_cast<uint8_t *>(s.v.data), (size_t) s.n * s.v.stride))) {
                return false;
            }
        }
        return true;
    }

    bool counts(Side & side, const SideLayout & layout, int32_t length) {
        Area &   stored   = side[0];
        uint32_t n_groups = 0;
        if (!in.value(stored.n) || stored.n < 0 || stored.n > length) {
            return false;
        }
        side[1].n = length - stored.n;
        if (!is_grouped(layout.types[0])) {
            return true;
        }
        if (!in.value(n_groups) || !in.values(stored.live, n_groups)) {
            return false;
        }
        int64_t live = 0;
        for (uint8_t n : stored.live) {
            live += n;
            if (n > GROUP) {
                return false;
            }
        }
        return live == stored.n;
    }

    bool heads(BlockLayer & layer, size_t l, int32_t & next, bool in_areas) {
        const LayerShape & shape = seq.shapes()[l];
        layer.heads.resize((size_t) shape.n_heads_kv);
        for (size_t h = 0; h < layer.heads.size(); h++) {
            RaggedHead & head = layer.heads[h];
            uint8_t      scored;
            if (!in.value(head.length) || head.length < 0 || !in.values(head.tokens, (uint64_t) head.length) ||
                !rising(head.tokens, own[l][h], seq.pos.size()) || !in.value(scored) || scored > 1 ||
                !in.values(head.scores, scored ? (uint64_t) head.length : 0)) {
                return false;
            }
            head.k[1].n = head.v[1].n = head.length;
            if (in_areas && !(counts(head.k, keys_of(shape, seq.storage()), head.length) &&
                              counts(head.v, values_of(shape, seq.storage()), head.length))) {
                return false;
            }
            own[l][h] = head.tokens.empty() ? own[l][h] : head.tokens.back() + 1;
            next      = std::max(next, own[l][h]);
        }
        return true;
    }

    // Whether the file can hold as much.
    bool can_hold(uint64_t n_rows, uint64_t row) const { return row == 0 || n_rows <= in.left() / row; }

    bool ragged(Block & block, size_t l, int32_t & next) {
        const LayerShape & shape = seq.shapes()[l];
        const SideLayout   keys = keys_of(shape, seq.storage()), vals = values_of(shape, seq.storage());
        BlockLayer &       layer = block.layers[l];
        uint64_t           held  = 0;
        if (!heads(layer, l, next, true)) {
            return false;
        }
        for (const RaggedHead & head : layer.heads) {
            for (size_t a = 0; a < 2; a++) {
                held += area_bytes(keys.types[a], keys.d, head.k[a]) + area_bytes(vals.types[a], vals.d, head.v[a]);
            }
            if (held > in.left() || (!block.tokens.empty() && head.tokens != block.tokens)) {
                return false;
            }
        }
        return take(layer, lay_out(shape, seq.storage(), layer.heads)) && rows(block, l);
    }

    bool uniform(Block & block, size_t l, int32_t & next) {
        const LayerShape & shape    = seq.shapes()[l];
        const auto         n_heads  = (size_t) shape.n_heads_kv;
        const auto         capacity = (size_t) block.capacity;
        BlockLayer &       layer    = block.layers[l];
        const Storage      plain = seq.storage().plain();
        const size_t       kst = row_k(shape, plain.k), vst = row_v(shape, plain.v);
        uint8_t            loose;
        if (!in.value(loose) || loose > 1 || (block.scored && !loose) || (loose && block.capacity > MAX_SPARE)) {
            return false;
        }
        if (!loose && !can_hold(n_heads * block.length(), bytes_of(shape, plain))) {
            return false;
        }
        if (loose && !heads(layer, l, next, false)) {
            return false;
        }
        for (size_t h = 0; h < layer.heads.size(); h++) {
            RaggedHead & head = layer.heads[h];
            if ((size_t) head.length > block.length() || head.scores.size() != (block.scored ? (size_t) head.length : 0) ||
                !std::includes(block.tokens.begin(), block.tokens.end(), head.tokens.begin(), head.tokens.end())) {
                return false;
            }
            const size_t row = h * capacity + block.length() - (size_t) head.length;  // rows end where the block does
            head.k[1].offset = row * kst;
            head.v[1].offset = n_heads * capacity * kst + row * vst;
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
        if (!in.value(is_ragged) || is_ragged > 1) {
            return false;
        }
        made->ragged = is_ragged != 0;
        if (!(made->ragged ? listed_tokens(*made, pending) : shared_tokens(*made, last && pending))) {
            return false;
        }
        int32_t next = made->tokens.empty() ? first : made->tokens.back() + 1;
        const bool shared = !made->tokens.empty();  // all heads come after what was before, and what follows after them
        if (shared) {
            begin_at(first);
        }
        made->layers.resize(seq.shapes().size());
        for (size_t l = 0; l < made->layers.size(); l++) {
            if (!(made->ragged ? ragged(*made, l, next) : uniform(*made, l, next))) {
                return false;
            }
        }
        first = next;
        if (shared) {
            begin_at(first);
        }
        seq.blocks.push_back(std::move(made));
        return true;
    }

    // A ragged block lists its tokens while it is pending: generated ones that were quantised.
    bool listed_tokens(Block & block, bool pending) {
        uint8_t flags;
        int32_t length;
        if (!in.value(flags) || flags > ALL_FLAGS || !in.value(length) || length < 0 || pending != (length > 0) ||
            (pending && !seq.storage().quantised()) || !in.values(block.tokens, (uint64_t) length)) {
            return false;
        }
        block.generated = (flags & GENERATED) != 0;
        block.open_k    = (flags & OPEN_K) != 0;
        block.open_v    = (flags & OPEN_V) != 0;
        return rising(block.tokens, first, seq.pos.size());
    }

    bool shared_tokens(Block & block, bool may_grow) {
        uint8_t generated, scored;
        int32_t length;
        if (!in.value(generated) || generated > 1 || !in.value(scored) || scored > 1 || !in.value(length) || length < 1 ||
            !in.value(block.capacity) || !in.values(block.tokens, (uint64_t) length) || !rising(block.tokens, first, seq.pos.size())) {
            return false;
        }
        block.generated = generated != 0;
        block.scored    = scored != 0;
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
    size_t        done = seq.bounded && n > seq.pending_from ? n - (grows(seq, n - 1) ? 1 : 0) : seq.pending_from;
    for (size_t b = done; b < n; b++) {
        done = seq.blocks[b]->streamed ? b + 1 : done;  // what a stream kept so far is pending only while it goes on
    }
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
        write_block(seq, b, b >= done, out);
    }
}

std::unique_ptr<Sequence> read_sequence(FileReader & in, const std::vector<LayerShape> & shapes, const Storage & storage) {
    auto     seq = std::make_unique<Sequence>(shapes, storage);
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
    for (const LayerShape & shape : shapes) {
        parse.own.emplace_back((size_t) shape.n_heads_kv, 0);
    }
    for (uint32_t b = 0; b < n_blocks; b++) {
        if (!parse.block(b + 1 == n_blocks, b >= done)) {
            return nullptr;
        }
        const Block & block = *seq->blocks.back();
        if (!bounded && b >= done && !block.ragged && is_loose(block)) {
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
