// Adds evicted rows to the kept rows that they join, after merging.cpp has chosen the kept rows. OWN_JOINS (cuda/joins.cu,
// cpu/joins.cpp) adds up all rows of a layer. On a device without OWN_JOINS ggml operations add FAN rows at a time. All sums are f32.

#include "device/own.h"
#include "device/compressing.h"

#include "system/threads.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

namespace kvedge {

using T = ggml_tensor *;

// ---------------------------------------------------------------------------------------------------------
// The lists that OWN_JOINS reads, pairs of i32. For each sum: its row in the new tensor, and the number of members of all sums before.
// Then 0 and the total number of members. Then for each member: its row in the old tensor, and its factor (bits of an f32).

namespace {

float as_factor(int32_t bits) {
    float out;
    std::memcpy(&out, &bits, sizeof(out));
    return out;
}

int32_t as_bits(float factor) {
    int32_t out;
    std::memcpy(&out, &factor, sizeof(out));
    return out;
}

}  // namespace

GraphRows::Merging::Lists GraphRows::Merging::count(size_t l, const Group & group) const {
    Lists out;
    for (const int32_t h : group.heads) {
        std::vector<uint8_t> any(of.job.kept[l][(size_t) h].size());
        size_t               sums = 0, members = 0;
        for (const int32_t to : joined[l][(size_t) h].target) {
            if (to >= 0) {
                sums += any[(size_t) to] == 0;
                any[(size_t) to] = 1;
                members++;
            }
        }
        out.sums.push_back(out.sums.back() + sums);
        out.members.push_back(out.members.back() + sums + members);  // a kept row is a member of its own sum
    }
    return out;
}

// Writes the lists of the group's i-th KV head into `all`, the lists of the whole group.
void GraphRows::Merging::write_lists(size_t l, const Group & group, const Lists & lists, size_t i, int32_t * all) const {
    const auto           h      = (size_t) group.heads[i];
    const Joined &       x      = joined[l][h];
    const auto &         kept   = of.job.kept[l][h];
    const int32_t *      places = of.places[l][h].data() + of.n_old(l, h);
    const auto           slots  = of.next.places_of(l, (int32_t) h);
    std::vector<int32_t> next(kept.size());
    int32_t *            sum = all + 2 * lists.sums[i], *members = all + 2 * (lists.n() + 1);
    const auto           put = [&](int32_t & at, int32_t row, float factor) {
        members[2 * at]     = places[row];
        members[2 * at + 1] = as_bits(factor);
        at++;
    };
    for (const int32_t to : x.target) {
        next[(size_t) std::max(to, 0)] += to >= 0 ? 1 : 0;
    }
    auto at = (int32_t) lists.members[i];
    for (size_t j = 0; j < kept.size(); j++) {
        const int32_t n = std::exchange(next[j], at);
        if (n > 0) {
            *sum++ = slots[of.n_old(l, h) + j];
            *sum++ = at;
            put(next[j], kept[j], x.self[j]);
            at += n + 1;
        }
    }
    for (size_t t = 0; t < x.target.size(); t++) {
        if (x.target[t] >= 0) {
            put(next[(size_t) x.target[t]], (int32_t) t, x.share[t]);
        }
    }
    if (i + 1 == group.heads.size()) {
        *sum++ = 0;
        *sum++ = at;
    }
}

// ---------------------------------------------------------------------------------------------------------
// By OWN_JOINS

namespace {

T own_joins(ggml_context * c, T k, T v, T to_k, T to_v, T lists, size_t n) {
    T out                       = kvedge::flat(c, to_k);
    out->op                     = GGML_OP_FLASH_ATTN_EXT;
    out->src[0]                 = k;
    out->src[1]                 = v;
    out->src[2]                 = to_v;
    out->src[5]                 = lists;
    out->op_params[OWN_KIND]     = OWN_JOINS;
    out->op_params[OWN_KIND + 1] = (int32_t) n;
    return out;
}

}  // namespace

bool GraphRows::Merging::has_own(size_t l) const {
    const DeviceLayer & layer = of.from.layers[l];
    const Group &       group = layer.groups[0];
    const bool plain = !of.job.storage.quantised() && ggml_type_of(of.job.storage.k) == group.k->type && ggml_type_of(of.job.storage.v) == group.v->type;
    if (!plain || !kvedge::has_own(layer.device)) {
        return false;
    }
    const GgmlContext context = make_context(4 * ggml_tensor_overhead());
    ggml_context *    c       = context.get();
    const T           k = kvedge::flat(c, group.k), v = kvedge::flat(c, group.v);
    return ggml_backend_dev_supports_op(layer.device, own_joins(c, k, v, k, v, ggml_new_tensor_2d(c, GGML_TYPE_I32, 2, 2), 1));
}

void GraphRows::Merging::add_up_own(size_t l, GraphTransfer & transfer, GraphBuilder & builder) const {
    ggml_context * c    = builder.context.get();
    const T        keys = of.flat(c, l, true), values = of.flat(c, l, false);
    for (size_t g = 0; g < lists[l].size(); g++) {
        const Group & group = of.next.layers[l].groups[g];
        const Lists & own   = lists[l][g];
        if (own.n() > 0) {
            const T list = ggml_new_tensor_2d(c, GGML_TYPE_I32, 2, (int64_t) own.size() / 2);
            transfer.send<int32_t>(list, [this, l, &group, &own](int32_t * to, int32_t i) { write_lists(l, group, own, (size_t) i, to); },
                                 (int32_t) group.heads.size());
            builder.add(own_joins(c, keys, values, kvedge::flat(c, group.k), kvedge::flat(c, group.v), list, own.n()));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// By ggml's operations

namespace {

constexpr size_t FAN = 8;  // rows that one step adds up

size_t fans(size_t n) { return (n + FAN - 1) / FAN; }

size_t levels_of(size_t n) {
    size_t levels = 1;
    for (; n > FAN; n = fans(n)) {
        levels++;
    }
    return levels;
}

}  // namespace

// Read access to the lists that write_lists() wrote.
struct GraphRows::Merging::Sums {
    const int32_t *sums, *members;

    size_t  n(size_t i) const { return (size_t) (sums[2 * i + 3] - sums[2 * i + 1]); }
    size_t  first(size_t i) const { return (size_t) sums[2 * i + 1]; }
    int64_t to(size_t i) const { return sums[2 * i]; }
    int32_t row(size_t member) const { return members[2 * member]; }
    float   factor(size_t member) const { return as_factor(members[2 * member + 1]); }
};

// Returns the levels that compute the sums all[from, to). Sums that need fewer levels must come first.
GraphRows::Merging::Piece GraphRows::Merging::piece_of(const Sums & sums, const std::vector<size_t> & all, size_t from, size_t to) {
    struct List {
        size_t  first, n;
        int64_t to;
    };
    std::vector<List> lists, later;
    for (size_t i = from; i < to; i++) {
        lists.push_back({ sums.first(all[i]), sums.n(all[i]), sums.to(all[i]) });
    }
    Piece out;
    for (bool old = true; !lists.empty(); old = false) {
        Level  level;
        size_t n = 0, at = 0;
        for (const List & x : lists) {
            n += fans(x.n);
        }
        level.n = (int32_t) n;
        level.index.resize(FAN * n);
        level.factor.resize(FAN * n);
        later.clear();
        for (const List & x : lists) {
            const size_t own = fans(x.n);
            for (size_t i = 0; i < own * FAN; i++) {
                // a sum is padded with one of its own rows times 0, so that a NaN does not spread to other sums
                const size_t row = x.first + (i < x.n ? i : (own - 1) * FAN), to_at = i % FAN * n + at + i / FAN;
                level.index[to_at]  = old ? sums.row(row) : (int32_t) row;
                level.factor[to_at] = i >= x.n ? 0.0f : old ? sums.factor(row) : 1.0f;
            }
            if (own == 1) {
                level.ready.push_back(x.to);
            } else {
                later.push_back({ at, own, x.to });
            }
            at += own;
        }
        out.push_back(std::move(level));
        lists.swap(later);
    }
    return out;
}

// Divides the sums of a layer's groups into pieces whose results fit in the work memory. Frees the layer's `joined`.
void GraphRows::Merging::divide(size_t l) {
    const LayerShape & shape = (*of.from.shapes)[l];
    // search() holds a matrix of products and its inputs at the same time, a sum holds rows only: so twice as many bytes
    const size_t most = 2 * of.work_bytes(l) / (sizeof(float) * FAN * (size_t) std::max(shape.d_k, shape.d_v));
    for (size_t g = 0; g < lists[l].size(); g++) {
        const Group &        group = of.next.layers[l].groups[g];
        const Lists &        own   = lists[l][g];
        std::vector<int32_t> all(own.size());
        for (size_t i = 0; i < group.heads.size(); i++) {
            write_lists(l, group, own, i, all.data());
            joined[l][(size_t) group.heads[i]] = Joined();
        }
        const Sums          sums{ all.data(), all.data() + 2 * (own.n() + 1) };
        std::vector<size_t> order(own.n());
        std::iota(order.begin(), order.end(), (size_t) 0);
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return levels_of(sums.n(a)) < levels_of(sums.n(b)); });
        pieces[l].emplace_back();
        for (size_t first = 0, end = 0; first < order.size(); first = end) {
            size_t n = 0;
            do {
                n += fans(sums.n(order[end++]));
            } while (end < order.size() && n + fans(sums.n(order[end])) <= most);
            pieces[l].back().push_back(piece_of(sums, order, first, end));
        }
    }
}

namespace {

template <class X> T sent(ggml_context * c, GraphTransfer & transfer, ggml_type type, const std::vector<X> & x, int64_t ne0, int64_t ne1) {
    const T out = ggml_new_tensor_2d(c, type, ne0, ne1);
    transfer.send<X>(out, [&x](X * to, int32_t) { std::copy(x.begin(), x.end(), to); });
    return out;
}

// Returns n sums [d, n] of FAN rows of a source each, as Level: index [FAN * n], factor [1, FAN * n].
T sum(ggml_context * c, T source, T index, T factor) {
    const int64_t d = source->ne[0], n = index->ne[0] / (int64_t) FAN;
    T             all = ggml_mul(c, ggml_get_rows(c, source, index), factor);
    for (int64_t half = (int64_t) FAN / 2; half > 0; half /= 2) {
        const auto part = [&](int64_t first) {
            return ggml_view_2d(c, all, d, half * n, all->nb[1], (size_t) (first * n) * all->nb[1]);
        };
        all = ggml_add_inplace(c, part(0), part(half));
    }
    return all;
}

}  // namespace

void GraphRows::Merging::add_up_pieces(size_t l, GraphTransfer & transfer, GraphBuilder & builder) const {
    ggml_context * c = builder.context.get();
    const T keys = of.flat(c, l, true), values = of.flat(c, l, false);
    for (size_t g = 0; g < pieces[l].size(); g++) {
        const Group & group = of.next.layers[l].groups[g];
        const T       to_k = kvedge::flat(c, group.k), to_v = kvedge::flat(c, group.v);
        for (const Piece & piece : pieces[l][g]) {
            std::vector<std::array<T, 3>> lists;
            for (const Level & level : piece) {
                const auto n = (int64_t) level.ready.size(), rows = (int64_t) level.index.size();
                lists.push_back({ sent(c, transfer, GGML_TYPE_I32, level.index, rows, 1),
                                  sent(c, transfer, GGML_TYPE_F32, level.factor, 1, rows),
                                  n > 0 ? sent(c, transfer, GGML_TYPE_I64, level.ready, n, 1) : nullptr });
            }
            for (const bool of_keys : { true, false }) {
                T x = of_keys ? keys : values;
                for (const auto & [index, factor, ready] : lists) {
                    x = sum(c, x, index, factor);
                    if (ready) {
                        const T done = ggml_view_2d(c, x, x->ne[0], ready->ne[0], x->nb[1], 0);
                        builder.add(ggml_set_rows(c, of_keys ? to_k : to_v, done, ready));
                    }
                }
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// By either way

void GraphRows::Merging::plan() {
    pieces.resize(of.places.size());
    lists.resize(of.places.size());
    std::vector<std::pair<size_t, size_t>> groups;
    for (size_t l = 0; l < of.places.size(); l++) {
        lists[l].resize(of.next.layers[l].groups.size());
        for (size_t g = 0; g < lists[l].size(); g++) {
            groups.emplace_back(l, g);
        }
    }
    const auto in_parallel = [this](size_t n, const auto & visit) {
        parallel_for(of.from.n_threads, (int32_t) n, [&](int32_t i, int32_t) { visit((size_t) i); });
    };
    in_parallel(groups.size(), [&](size_t i) {
        const auto [l, g] = groups[i];
        lists[l][g]       = count(l, of.next.layers[l].groups[g]);
    });
    in_parallel(lists.size(), [&](size_t l) {
        if (!lists[l].empty() && !has_own(l)) {
            divide(l);
        }
    });
}

size_t GraphRows::Merging::nodes(size_t l) const {
    size_t n = 0;
    for (size_t g = 0; g < lists[l].size(); g++) {
        n += lists[l][g].n() > 0 ? 4 : 0;
        for (const Piece & piece : pieces[l].empty() ? std::vector<Piece>() : pieces[l][g]) {
            n += 2 * 20 * piece.size();
        }
    }
    return n > 0 ? n + 2 * of.flat_nodes(l) : 0;
}

void GraphRows::Merging::add_up(size_t l, GraphTransfer & transfer, GraphBuilder & builder) const {
    if (nodes(l) > 0) {
        pieces[l].empty() ? add_up_own(l, transfer, builder) : add_up_pieces(l, transfer, builder);
    }
}

}  // namespace kvedge
