#include "sequence/serial.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

constexpr int32_t MAX_SPARE = 256;  // largest capacity of a growing block in a file, if it has fewer tokens

// Flags of a head's list: the parts that follow its tokens.
enum : uint8_t { SCORES = 1, BIASES = 2 };

// The form of a block in a file.
enum : uint8_t { UNIFORM = 0, RAGGED = 1, WHOLE = 2 };

// The columns and quantities whose missing tokens are written. Nothing was gathered for a pending token that can be written,
// so the others miss as many tokens as the first one.
constexpr size_t MISSING[] = { column::sums, column::squares, quantity::entropy, quantity::window };

// Flags of a ragged block: Block::generated, keys still plain, values still plain.
enum : uint8_t { GENERATED = 1, OPEN_K = 2, OPEN_V = 4, ALL_FLAGS = 7 };

// Returns whether token indices ascend strictly and lie in [first, n_tokens).
bool rising(const std::vector<int32_t> & tokens, int32_t first, size_t n_tokens) {
    for (int32_t t : tokens) {
        if (t < first || (size_t) t >= n_tokens) {
            return false;
        }
        first = t + 1;
    }
    return true;
}

// Writes the tokens of a head, with scores and biases if it has them. of: the head's list, or NULL.
void write_head(const std::vector<int32_t> & tokens, const HeadList * of, Sink & out) {
    const bool scored = of && !of->scores.empty(), biased = of && !of->biases.empty();
    out.value<int32_t>((int32_t) tokens.size());
    out.values(tokens);
    out.value<uint8_t>((uint8_t) ((scored ? SCORES : 0) | (biased ? BIASES : 0)));
    out.values(scored ? of->scores : std::vector<double>());
    out.values(biased ? of->biases : std::vector<float>());
}

bool are_biases(const std::vector<float> & x) {
    return std::all_of(x.begin(), x.end(), [](float b) { return std::fabs(b) <= MOST_BIAS; });
}

// Returns whether block b can take more tokens, or is a full generated block that seal_generated will quantise.
bool grows(const Store & store, size_t b) {
    const StoreContents & all   = store.contents();
    const Block &         block = all.blocks[b];
    return b + 1 == all.blocks.size() && b >= all.pending_from && !block.ragged() &&
           (!block.full() || (store.storage().quantised() && block.generated));
}

uint8_t flags_of(const Block & block, bool plain) {
    const bool open = plain || block.kind == BlockKind::open;
    return (uint8_t) ((block.generated ? GENERATED : 0) | (open ? OPEN_K : 0) | (open || block.open() ? OPEN_V : 0));
}

// Writes the lists of a layer's heads, if the block is ragged or the layer loose. For a ragged block, also writes the row layouts.
void write_heads(const Store & store, const Block & block, size_t l, bool ragged, Sink & out) {
    const BlockLayer & layer = block.layers[l];
    for (int32_t h = 0; (ragged || !layer.heads.empty()) && h < store.shapes()[l].n_heads_kv; h++) {
        const bool listed = !layer.heads.empty();
        write_head(block.tokens_of((int32_t) l, h), listed ? &layer.heads[(size_t) h] : nullptr, out);
        if (ragged) {
            save_counts(layer.rows, h, out);
        }
    }
}

// Writes a block of kind `whole`: the type's number, the tokens and the quantised rows.
void write_whole_block(const Block & block, Sink & out) {
    out.value<uint8_t>(WHOLE);
    out.value<int32_t>(type_number(block.layers[0].rows.storage().k));
    out.value<int32_t>((int32_t) block.length());
    out.values(block.tokens);
    for (const BlockLayer & layer : block.layers) {
        save_rows(layer.rows, out);
    }
}

// Writes block b. A loose uniform block is written as a ragged block, unless it can still take tokens.
void write_block(const Store & store, size_t b, bool pending, Sink & out) {
    const Block & block   = store.contents().blocks[b];
    const auto    length  = (int32_t) block.length();
    if (block.kind == BlockKind::whole) {
        return write_whole_block(block, out);
    }
    const bool    growing = grows(store, b) && !(block.loose() && block.capacity > MAX_SPARE);
    const bool    ragged  = block.ragged() || (block.loose() && !growing);
    out.value<uint8_t>(ragged ? RAGGED : UNIFORM);
    if (ragged) {
        // a uniform block was closed before it was full: with a quantised storage its rows are still plain
        out.value<uint8_t>(flags_of(block, !block.ragged() && store.storage().quantised()));
        out.value<int32_t>(pending ? length : 0);
        out.values(pending ? block.tokens : std::vector<int32_t>());
    } else {
        out.value<uint8_t>(block.generated);
        out.value<uint8_t>(block.kind == BlockKind::scored);
        out.value<int32_t>(length);
        // a prompt's block that lost its last tokens keeps a capacity of at most MAX_SPARE
        out.value<int32_t>(growing ? std::min(block.capacity, std::max(length, MAX_SPARE)) : length);
        out.values(block.tokens);
    }
    for (size_t l = 0; l < block.layers.size(); l++) {
        if (!ragged) {
            out.value<uint8_t>(!block.layers[l].heads.empty());
        }
        write_heads(store, block, l, ragged, out);
        save_rows(block.layers[l].rows, out);
    }
}

struct Parse {
    Reader &        in;
    const Store &   empty;  // shapes and storage of the sequence
    StoreContents & out;
    int32_t         first = 0;  // smallest token index that the next block may list if all heads share its tokens

    // [layer][head] smallest token index that the next block may list for this head. Heads differ: a compression makes two blocks,
    // full groups (main) and the rest (tail), and a head with less than one group has all its tokens in the second block.
    std::vector<std::vector<int32_t>> own = {};

    void begin_at(int32_t token) {
        for (auto & heads : own) {
            std::fill(heads.begin(), heads.end(), token);
        }
    }

    // Reads the lists of a layer's heads. counted: the block is ragged; only its lists have row layouts and may have biases.
    bool heads(BlockLayer & layer, size_t l, int32_t & next, bool counted) {
        layer.heads.resize((size_t) empty.shapes()[l].n_heads_kv);
        for (size_t h = 0; h < layer.heads.size(); h++) {
            HeadList & head = layer.heads[h];
            int32_t    length;
            uint8_t    has;
            if (!in.value(length) || length < 0 || !in.values(head.tokens, (uint64_t) length) ||
                !rising(head.tokens, own[l][h], out.pos.size()) || !in.value(has) || has > (counted ? SCORES | BIASES : SCORES) ||
                !in.values(head.scores, has & SCORES ? (uint64_t) length : 0) ||
                !in.values(head.biases, has & BIASES ? (uint64_t) length : 0) || !are_biases(head.biases)) {
                return false;
            }
            if (counted && !layer.rows.load_counts((int32_t) h, length, in)) {
                return false;
            }
            own[l][h] = head.tokens.empty() ? own[l][h] : head.tokens.back() + 1;
            next      = std::max(next, own[l][h]);
        }
        return true;
    }

    bool ragged(Block & block, size_t l, int32_t & next) {
        BlockLayer & layer = block.layers[l];
        layer.rows         = LayerRows(empty.shapes()[l], empty.storage(), std::vector<RaggedHead>((size_t) empty.shapes()[l].n_heads_kv));
        if (!heads(layer, l, next, true)) {
            return false;
        }
        for (const HeadList & head : layer.heads) {
            if (!block.tokens.empty() && head.tokens != block.tokens) {
                return false;
            }
        }
        return layer.rows.load(in);
    }

    bool uniform(Block & block, size_t l, int32_t & next) {
        BlockLayer & layer  = block.layers[l];
        const bool   scored = block.kind == BlockKind::scored;
        uint8_t      loose;
        if (!in.value(loose) || loose > 1 || (scored && !loose) || (loose && block.capacity > MAX_SPARE)) {
            return false;
        }
        layer.rows = LayerRows(empty.shapes()[l], empty.storage(), block.capacity);
        layer.rows.add((int32_t) block.length());
        if (loose && !heads(layer, l, next, false)) {
            return false;
        }
        for (size_t h = 0; h < layer.heads.size(); h++) {
            const HeadList & head = layer.heads[h];
            if ((size_t) head.length() > block.length() || head.scores.size() != (scored ? (size_t) head.length() : 0) ||
                !std::includes(block.tokens.begin(), block.tokens.end(), head.tokens.begin(), head.tokens.end())) {
                return false;
            }
            layer.rows.loosen();
            layer.rows.set_loose((int32_t) h, head.length());
        }
        return layer.rows.load(in);
    }

    bool block(bool last, bool pending) {
        Block   made;
        uint8_t form;
        if (!in.value(form) || form > (pending ? WHOLE : RAGGED)) {
            return false;
        }
        if (form == WHOLE) {
            return whole(made);
        }
        const bool is_ragged = form == RAGGED;
        if (!(is_ragged ? listed_tokens(made, pending) : shared_tokens(made, last && pending))) {
            return false;
        }
        int32_t next = made.tokens.empty() ? first : made.tokens.back() + 1;
        const bool shared = !made.tokens.empty();  // all heads share the tokens: older blocks lie before them, newer ones after
        if (shared) {
            begin_at(first);
        }
        made.layers.resize(empty.shapes().size());
        for (size_t l = 0; l < made.layers.size(); l++) {
            if (!(is_ragged ? ragged(made, l, next) : uniform(made, l, next))) {
                return false;
            }
        }
        first = next;
        if (shared) {
            begin_at(first);
        }
        out.blocks.push_back(std::move(made));
        return true;
    }

    bool whole(Block & block) {
        int32_t type, length;
        if (!in.value(type) || type != (int32_t) Type::q8_0 || !in.value(length) || length < 1 ||
            !in.values(block.tokens, (uint64_t) length) || !rising(block.tokens, first, out.pos.size())) {
            return false;
        }
        block.kind = BlockKind::whole;
        for (const LayerShape & shape : empty.shapes()) {
            const std::vector<StoredRows> all((size_t) shape.n_heads_kv, { length, length, length });
            block.layers.push_back({ LayerRows(shape, { Type::q8_0, Type::q8_0 }, all), {} });
            if (shape.d_k % GROUP != 0 || shape.d_v % GROUP != 0 || !block.layers.back().rows.load(in)) {
                return false;
            }
        }
        first = block.tokens.back() + 1;
        begin_at(first);
        out.blocks.push_back(std::move(block));
        return true;
    }

    // Reads the flags and tokens of a ragged block. Only a pending one lists tokens: generated tokens that were already quantised.
    bool listed_tokens(Block & block, bool pending) {
        uint8_t flags;
        int32_t length;
        if (!in.value(flags) || flags > ALL_FLAGS || !in.value(length) || length < 0 || pending != (length > 0) ||
            (pending && !empty.storage().quantised()) || !in.values(block.tokens, (uint64_t) length)) {
            return false;
        }
        block.generated = (flags & GENERATED) != 0;
        block.kind      = flags & OPEN_K ? BlockKind::open : flags & OPEN_V ? BlockKind::open_values : BlockKind::ragged;
        return rising(block.tokens, first, out.pos.size());
    }

    bool shared_tokens(Block & block, bool may_grow) {
        uint8_t generated, scored;
        int32_t length;
        if (!in.value(generated) || generated > 1 || !in.value(scored) || scored > 1 || !in.value(length) || length < 1 ||
            !in.value(block.capacity) || !in.values(block.tokens, (uint64_t) length) || !rising(block.tokens, first, out.pos.size())) {
            return false;
        }
        block.generated = generated != 0;
        block.kind      = scored ? BlockKind::scored : BlockKind::uniform;
        return block.capacity >= length && block.capacity <= (may_grow ? std::max(length, MAX_SPARE) : length);
    }
};

}  // namespace

void write_sequence(const Sequence & seq, Sink & out) {
    // During an answer that drops rows, only the growing block is written as pending: the answer is not compressed again.
    const StoreContents & all  = seq.rows.contents();
    const size_t          n    = all.blocks.size();
    size_t                done = seq.rows.evicting() && n > all.pending_from ? n - (grows(seq.rows, n - 1) ? 1 : 0) : all.pending_from;
    for (size_t b = done; b < n; b++) {
        done = all.blocks[b].kind == BlockKind::streamed ? b + 1 : done;  // a saved stream does not continue: its kept rows are final
    }
    int32_t pending = 0;
    for (size_t b = done; b < n; b++) {
        pending += (int32_t) all.blocks[b].length();
    }
    out.value<uint64_t>(all.pos.size());
    out.values(all.pos);
    out.values(all.image);
    out.value<uint32_t>((uint32_t) n);
    out.value<uint32_t>((uint32_t) done);
    out.value<int32_t>(std::clamp(seq.observed.window_from(), 0, pending));
    for (size_t i : MISSING) {
        out.value<int32_t>(std::clamp(seq.observed.missing.of[i], 0, pending));
    }
    out.value<uint8_t>(seq.rows.evicting());
    out.value<uint8_t>(seq.rows.scored());
    for (size_t b = 0; b < n; b++) {
        write_block(seq.rows, b, b >= done, out);
    }
}

std::unique_ptr<Sequence> read_sequence(Reader & in, const std::vector<LayerShape> & shapes, const Storage & storage) {
    StoreContents all;
    Missing       missing;
    uint64_t      n_tokens;
    uint32_t      n_blocks, done;
    int32_t       window_from;
    uint8_t       evicting, scored;
    if (!in.value(n_tokens) || n_tokens > INT32_MAX || !in.values(all.pos, n_tokens) || !in.values(all.image, n_tokens) ||
        !in.value(n_blocks) || !in.value(done) || !in.value(window_from)) {
        return nullptr;
    }
    for (size_t i : MISSING) {
        if (!in.value(missing.of[i])) {
            return nullptr;
        }
        if (i == column::sums) {
            missing.of.fill(missing.of[i]);
        }
    }
    if (!in.value(evicting) || !in.value(scored)) {
        return nullptr;
    }
    const bool known = std::all_of(all.image.begin(), all.image.end(), [](uint8_t i) { return i <= 1; }) &&
                       std::all_of(all.pos.begin(), all.pos.end(), [](int32_t p) { return p >= 0; });
    if (!known || done > n_blocks || evicting > 1 || scored > evicting) {
        return nullptr;
    }
    const Store empty(shapes, storage);
    Parse       parse{ in, empty, all };
    for (const LayerShape & shape : shapes) {
        parse.own.emplace_back((size_t) shape.n_heads_kv, 0);
    }
    for (uint32_t b = 0; b < n_blocks; b++) {
        if (!parse.block(b + 1 == n_blocks, b >= done) || (!evicting && b >= done && all.blocks.back().loose())) {
            return nullptr;  // damaged, or a pending block has lost rows
        }
    }
    all.pending_from = done;
    all.eviction     = scored ? Eviction::by_score : evicting ? Eviction::by_place : Eviction::none;
    auto seq         = std::make_unique<Sequence>(Store(shapes, storage, std::move(all)));
    seq->observed.skip_windows(window_from);
    seq->observed.missing = missing;
    const int32_t pending   = seq->rows.pending_length();
    const bool    counted   = window_from >= 0 && window_from <= pending &&
                              std::all_of(missing.of.begin(), missing.of.end(), [&](int32_t n) { return n >= 0 && n <= pending; });
    return counted ? std::move(seq) : nullptr;
}

void write_whole(const Sequence & seq, Sink & out) {
    write_sequence(seq, out);
    seq.observed.write(out);
}

std::unique_ptr<Sequence> read_whole(Reader & in, const std::vector<LayerShape> & shapes, const Storage & storage) {
    auto seq = read_sequence(in, shapes, storage);
    return seq && !seq->rows.evicting() && seq->observed.read(seq->rows.n_tokens(), in) ? std::move(seq) : nullptr;
}

}  // namespace kvedge
