// Quantising rows after they were written, block by block, and the way back.

#include "backend/cpu/kernels/quantise.h"
#include "store/store.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace kvedge {

namespace {

constexpr size_t JOIN = 8;  // blocks of GROUP generated rows that become one: mappings and segments stay few

// The keys or values of one head of one block: rows that are quantised already, then plain ones.
struct Source {
    const Area *    stored = nullptr;
    const uint8_t * memory = nullptr;
    Rows            plain{};
    int32_t         n_plain = 0;
};

Source source_of(const uint8_t * memory, const Side & side, const SideLayout & layout) {
    const size_t stride = row_bytes(layout.types[1], layout.d);
    return { &side[0], memory, { memory + side[1].offset, stride, layout.types[1], 0 }, side[1].n };
}

// Where the rows of a new group come from: a group, or plain rows.
struct Origin {
    Rows    rows;
    uint8_t n;
};

// One side of a head, gathered from sources into a new one. now: plain rows are quantised; else there is one source.
class Gathering {
  public:
    Gathering(const std::vector<Source> & sources, const SideLayout & layout, bool now)
        : sources_(sources), layout_(layout), type_(layout.types[0]), stride_(row_bytes(type_, layout.d)), now_(now) {
        if (is_grouped(type_)) {
            find_groups();
        }
    }

    void count(Side & to) const {
        for (const Source & from : sources_) {
            to[0].n += (from.stored ? from.stored->n : 0) + (now_ ? from.n_plain : 0);
            to[1].n += now_ ? 0 : from.n_plain;
        }
        for (const MergedGroup & g : groups_) {
            to[0].live.push_back(g.rows);
        }
    }

    void write(uint8_t * memory, const Side & to, std::vector<float> & wide) const {
        uint8_t * next = memory + to[0].offset;
        if (is_grouped(type_)) {
            write_groups(next, wide);
        }
        for (const Source & from : sources_) {
            if (from.stored && !is_grouped(type_)) {
                memcpy(next, from.memory + from.stored->offset, (size_t) from.stored->n * stride_);
                next += (size_t) from.stored->n * stride_;
            }
            if (!now_) {
                memcpy(memory + to[1].offset, from.plain.data, (size_t) from.n_plain * from.plain.stride);
            } else if (!is_grouped(type_)) {
                next = write_plain(next, from, wide);
            }
        }
    }

  private:
    void find_groups() {
        std::vector<uint8_t> live;
        const auto           add = [&](const Rows & rows, int32_t n) {
            origins_.push_back({ rows, (uint8_t) n });
            live.push_back((uint8_t) n);
        };
        for (const Source & from : sources_) {
            for (size_t g = 0; from.stored && g < from.stored->live.size(); g++) {
                add({ from.memory + from.stored->offset + g * GROUP * stride_, stride_, type_, 0 }, from.stored->live[g]);
            }
            for (int32_t r = 0; now_ && r < from.n_plain; r += GROUP) {
                add(from.plain.from(r), std::min(GROUP, from.n_plain - r));
            }
        }
        groups_ = merge_sparse(live);
    }

    void write_groups(uint8_t * next, std::vector<float> & wide) const {
        const auto d = (size_t) layout_.d;
        for (const MergedGroup & group : groups_) {
            const Origin & only = origins_[group.first];
            if (group.sources == 1 && is_grouped(only.rows.type)) {
                memcpy(next, only.rows.data, group_bytes(type_, group.rows, layout_.d));
            } else {
                size_t row = 0;
                for (size_t o = group.first; o < group.last; o++) {
                    kernels().widen(origins_[o].rows, origins_[o].n, layout_.d, wide.data() + row * d, d);
                    row += origins_[o].n;
                }
                quantise_group(type_, wide.data(), group.rows, layout_.d, next);
            }
            next += GROUP * stride_;
        }
    }

    uint8_t * write_plain(uint8_t * next, const Source & from, std::vector<float> & wide) const {
        for (int32_t r = 0; r < from.n_plain; r++, next += stride_) {
            if (from.plain.type == type_) {
                memcpy(next, from.plain.from(r).data, stride_);
                continue;
            }
            kernels().widen(from.plain.from(r), 1, layout_.d, wide.data(), (size_t) layout_.d);
            quantise_row(type_, wide.data(), layout_.d, next);
        }
        return next;
    }

    const std::vector<Source> & sources_;
    const SideLayout            layout_;
    const Type                  type_;
    const size_t                stride_;
    const bool                  now_;
    std::vector<Origin>         origins_;
    std::vector<MergedGroup>    groups_;
};

bool values_wait(const Storage & storage) { return storage.v == Type::kivi4_v || storage.v == Type::kivi2_v; }

}  // namespace

// A ragged layer of the rows of blocks [first, last), keys quantised, and values if `values` says so or their type does
// not wait; without, there is one block. False: no memory. Throws std::bad_alloc.
bool Store::gather_layer(size_t layer, size_t first, size_t last, bool values, BlockLayer & to) const {
    const LayerShape & shape = shapes()[layer];
    const SideLayout   keys = keys_of(shape, storage_), vals = values_of(shape, storage_);
    const auto         l = (int32_t) layer;
    const auto         n = (size_t) shape.n_heads_kv;
    std::vector<std::vector<Source>> from_k(n), from_v(n);
    std::vector<Gathering>           k, v;
    to.heads.resize(n);
    for (size_t h = 0; h < n; h++) {
        RaggedHead & head   = to.heads[h];
        bool         scores = true;
        for (size_t b = first; b < last; b++) {
            const BlockLayer & from   = blocks[b].layers[layer];
            const bool         listed = !from.heads.empty();
            const auto &       tokens = listed ? from.heads[h].tokens : blocks[b].tokens;
            if (listed) {
                from_k[h].push_back(source_of(from.memory.data(), from.heads[h].k, keys));
                from_v[h].push_back(source_of(from.memory.data(), from.heads[h].v, vals));
                head.scores.insert(head.scores.end(), from.heads[h].scores.begin(), from.heads[h].scores.end());
            } else {
                const Segment s = uniform_segment(blocks[b], l, (int32_t) h);
                from_k[h].push_back({ nullptr, nullptr, s.k, s.n });
                from_v[h].push_back({ nullptr, nullptr, s.v, s.n });
            }
            head.tokens.insert(head.tokens.end(), tokens.begin(), tokens.end());
            scores = scores && (tokens.empty() || (listed && !from.heads[h].scores.empty()));
        }
        head.length = (int32_t) head.tokens.size();
        if (!scores) {
            head.scores = {};
        }
        k.emplace_back(from_k[h], keys, true);
        v.emplace_back(from_v[h], vals, values || !values_wait(storage_));
        k.back().count(head.k);
        v.back().count(head.v);
    }
    to.extent = lay_out(shape, storage_, to.heads);
    to.memory = Pages::take(to.extent);
    if (to.extent > 0 && !to.memory) {
        return false;
    }
    std::vector<float> wide((size_t) GROUP * (size_t) std::max(shape.d_k, shape.d_v));
    for (size_t h = 0; h < n && to.extent > 0; h++) {
        k[h].write(to.memory.data(), to.heads[h].k, wide);
        v[h].write(to.memory.data(), to.heads[h].v, wide);
    }
    return true;
}

// Quantises blocks [first, last), which lie on one side of pending_from, into one that takes their place.
bool Store::seal(size_t first, size_t last, bool values) try {
    Block block;
    block.kind      = !values && values_wait(storage_) ? BlockKind::open_values : BlockKind::ragged;
    block.generated = last - first == 1 && blocks[first].generated;
    block.layers.resize(shapes().size());
    for (size_t b = first; b < last && first >= pending_from; b++) {
        block.tokens.insert(block.tokens.end(), blocks[b].tokens.begin(), blocks[b].tokens.end());
    }
    for (size_t l = 0; l < shapes().size(); l++) {
        if (!gather_layer(l, first, last, values, block.layers[l])) {
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

bool Store::seal_generated() {
    if (!storage_.quantised() || blocks.empty()) {
        return true;
    }
    const Block & newest = blocks.back();
    if (newest.ragged() || !newest.generated || !newest.full() || blocks.size() == pending_from) {
        return true;
    }
    for (size_t b = 0; b < blocks.size(); b++) {
        const Block & x    = blocks[b];
        const bool    last = b + 1 == blocks.size();
        // a prompt that waits for its compression is left alone
        const bool due = x.ragged() ? !last && x.open() : x.generated || b < pending_from;
        if (due && !seal(b, b + 1, !last)) {
            return false;
        }
    }
    return join_sealed();
}

// Joins the newest blocks of a single group each, once there are JOIN of them.
bool Store::join_sealed() {
    size_t last = blocks.size();
    while (last > 0 && (!blocks[last - 1].ragged() || blocks[last - 1].open())) {
        last--;
    }
    size_t first = last;
    while (first > 0 && first != pending_from && blocks[first - 1].ragged() && blocks[first - 1].generated && !blocks[first - 1].open()) {
        first--;
    }
    return last - first < JOIN || seal(first, last, true);
}

bool Store::seal_old(size_t end) {
    if (!storage_.quantised()) {
        return true;
    }
    for (size_t b = 0; b < end; b++) {
        const Block & x    = blocks[b];
        const bool    open = !x.ragged() || x.open();
        if (open && x.newest() < (int32_t) pos.size() - RESIDUAL && !seal(b, b + 1, true)) {
            return false;
        }
    }
    return true;
}

bool Store::unseal_pending() try {
    std::vector<std::pair<size_t, Block>> fresh;
    std::vector<float>                    wide;
    for (size_t b = pending_from; b < blocks.size(); b++) {
        const Block & from = blocks[b];
        if (!from.ragged()) {
            continue;
        }
        Block to     = make_block((int32_t) from.length());
        to.tokens    = from.tokens;
        to.generated = from.generated;
        for (size_t l = 0; l < shapes().size(); l++) {
            const auto dk = (size_t) shapes()[l].d_k, dv = (size_t) shapes()[l].d_v;
            for (int32_t h = 0; h < shapes()[l].n_heads_kv; h++) {
                Place at{ &to, 0 };
                each_ragged(from.layers[l].memory.data(), from.layers[l].heads[(size_t) h], shapes()[l], storage_, [&](const Segment & s) {
                    wide.resize((size_t) s.n * std::max(dk, dv));
                    kernels().widen(s.k, s.n, (int32_t) dk, wide.data(), dk);
                    kernels().from_f32(storage_.plain().k, wide.data(), k_row(at, (int32_t) l, h), (size_t) s.n * dk);
                    kernels().widen(s.v, s.n, (int32_t) dv, wide.data(), dv);
                    kernels().from_f32(storage_.plain().v, wide.data(), v_row(at, (int32_t) l, h), (size_t) s.n * dv);
                    at.row += s.n;
                });
            }
        }
        fresh.emplace_back(b, std::move(to));
    }
    for (auto & f : fresh) {
        blocks[f.first] = std::move(f.second);
    }
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool Store::promote_sealed() {
    const size_t before = pending_from;
    for (; pending_from < blocks.size() && blocks[pending_from].ragged(); pending_from++) {
        blocks[pending_from].tokens = {};
    }
    return pending_from > before;
}

}  // namespace kvedge
