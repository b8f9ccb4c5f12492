// Joins the rows of several blocks into one ragged layer, and quantises them.

#include "kernels/kernels.h"
#include "kernels/quantise.h"
#include "store/layer_rows.h"

#include <algorithm>
#include <cstring>

namespace kvedge {

namespace {

// The keys or values of one head of one block: rows of the storage type (stored), then plain rows.
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

// A source of rows for a new group: an old group, or plain rows.
struct Origin {
    Rows    rows;
    uint8_t n;
};

// Gathers one side (keys or values) of a head from several sources. now: quantises plain rows; else there must be only one source.
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
            if (from.stored && from.stored->n > 0 && !is_grouped(type_)) {
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

// Appends the keys and values of a head of a block to the sources k and v.
void add_sources(const LayerRows & from, int32_t h, std::vector<Source> & k, std::vector<Source> & v) {
    if (const RaggedHead * head = from.head(h)) {
        k.push_back(source_of(from.data(), head->k, keys_of(from.shape(), from.storage())));
        v.push_back(source_of(from.data(), head->v, values_of(from.shape(), from.storage())));
        return;
    }
    from.each_segment(h, [&](const Segment & s) {
        k.push_back({ nullptr, nullptr, s.k, s.n });
        v.push_back({ nullptr, nullptr, s.v, s.n });
    });
}

}  // namespace

bool join(const std::vector<const LayerRows *> & blocks, const Storage & storage, bool values, LayerRows & to) {
    const LayerShape &               shape = blocks[0]->shape();
    const auto                       n     = (size_t) shape.n_heads_kv;
    std::vector<std::vector<Source>> from_k(n), from_v(n);
    std::vector<Gathering>           k, v;
    std::vector<RaggedHead>          heads(n);
    for (size_t h = 0; h < n; h++) {
        for (const LayerRows * from : blocks) {
            add_sources(*from, (int32_t) h, from_k[h], from_v[h]);
        }
        k.emplace_back(from_k[h], keys_of(shape, storage), true);
        v.emplace_back(from_v[h], values_of(shape, storage), values || !format(storage.v).residual);
        k.back().count(heads[h].k);
        v.back().count(heads[h].v);
    }
    LayerRows joined(shape, storage, std::move(heads));
    if (!joined.take()) {
        return false;
    }
    std::vector<float> wide((size_t) GROUP * (size_t) std::max(shape.d_k, shape.d_v));
    for (size_t h = 0; h < n && joined.extent() > 0; h++) {
        k[h].write(joined.data(), joined.head((int32_t) h)->k, wide);
        v[h].write(joined.data(), joined.head((int32_t) h)->v, wide);
    }
    to = std::move(joined);
    return true;
}

// A group keeps the memory of its dropped rows until merge_sparse merges it.
uint64_t joined_bytes(const std::vector<const LayerRows *> & blocks, int32_t h) {
    std::vector<uint8_t> live;
    uint64_t             n_k = 0, n_v = 0, k = 0, v = 0;
    for (const LayerRows * from : blocks) {
        uint64_t n = 0;
        from->each_segment(h, [&](const Segment & s) { n += (uint64_t) s.n; });
        k = row_k(from->shape(), from->storage().k);
        v = row_v(from->shape(), from->storage().v);
        n_v += n;
        if (is_grouped(from->storage().k)) {
            const auto & groups = from->head(h)->k[0].live;
            live.insert(live.end(), groups.begin(), groups.end());
        } else {
            n_k += n;
        }
    }
    return (n_k + GROUP * merge_sparse(live).size()) * k + n_v * v;
}

}  // namespace kvedge
