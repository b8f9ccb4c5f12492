// Joins evicted rows to kept rows on their device. One graph compares keys, the host chooses targets by the rule of merge_rows, and
// another graph adds rows up (joins.cpp). For each evicted row three numbers come to the host.
//
// Most devices round the inputs of a matrix product to half precision. This is exact for f16 rows; for other types it finds the
// nearest key except in near ties.

#include "device/compressing.h"

#include "system/threads.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvedge {

using T       = ggml_tensor *;
using Outcome = DeviceRows::Outcome;

namespace {

constexpr size_t BEHIND      = 4;        // numbers appended to each row; 4 keep the rows aligned
constexpr float  LESS        = -128.0f;  // the appended numbers of an evicted row; large, so that a kept row's fit in half precision
constexpr float  MOST        = 4e3f;     // limit of a key's numbers in the comparison, so that products are finite
constexpr float  NOTHING     = -1e20f;   // a score below NOTHING means a key that takes no row
constexpr size_t READY       = 16384;    // evicted rows, of all KV heads, that are prepared at a time
constexpr size_t ENTRY_BYTES = 16;       // device bytes of an evicted row: place, target, score, square

constexpr size_t STEP        = 64;       // lists begin at a multiple of 64 numbers of 4 bytes, as devices may need alignment

size_t stepped(size_t n) { return (n + STEP - 1) / STEP * STEP; }

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// The search in one layer. Heads that keep or evict fewer rows than others pad their lists with their first kept row. Evicted rows
// are listed chunk by chunk, and in each chunk head by head.

struct GraphRows::Merging::ProductSearch {
    size_t layer, heads, n_kept = 0, n_evicted = 0;  // n_kept, n_evicted: most of any head
    size_t chunk   = 0;                              // evicted rows of each head that are compared at a time
    size_t entry   = 0;                              // index of the layer's first result in ProductResults

    // Returns the evicted rows of each head, in whole chunks, that are prepared at a time: an operation on fewer rows is not faster.
    size_t block() const { return std::max<size_t>(1, READY / (chunk * heads)) * chunk; }
    size_t entries() const { return stepped(heads * n_evicted); }
    size_t place(size_t head, size_t i) const {
        const size_t first = i / chunk * chunk, n = std::min(chunk, n_evicted - first);
        return heads * first + head * n + i - first;
    }
};

Outcome GraphRows::Merging::search() {
    make_room();
    std::vector<ProductSearch> searches;
    size_t            entries = 0;
    Outcome           outcome = Outcome::done;
    std::vector<std::vector<size_t>> own(of.from.devices.size());  // [device] layers that OWN_NEAREST searches
    const auto        flush   = [&] {
        outcome = outcome == Outcome::done && !searches.empty() ? search_some(searches) : outcome;
        searches.clear();
        entries = 0;
    };
    for (size_t l = 0; l < of.places.size(); l++) {
        ProductSearch search{ l, of.places[l].size() };
        for (size_t h = 0; h < search.heads; h++) {
            const size_t n   = of.job.kept[l][h].size();
            search.n_kept    = std::max(search.n_kept, n);
            search.n_evicted = std::max(search.n_evicted, (size_t) of.job.n_tokens - n);
        }
        if (search.n_evicted == 0) {
            for (const Joined & x : joined[l]) {
                std::fill(x.target.begin(), x.target.end(), -1);
            }
            continue;
        }
        if (has_own_search(l)) {
            own[of.from.layers[l].on].push_back(l);
            continue;
        }
        const size_t fits = of.work_bytes(l) / (sizeof(float) * search.n_kept * search.heads) / STEP * STEP;
        search.chunk      = std::min(search.n_evicted, std::max(fits, STEP));
        const bool other  = !searches.empty() && of.from.layers[searches[0].layer].on != of.from.layers[l].on;
        if (other || (!searches.empty() && (entries + search.entries()) * ENTRY_BYTES > of.work_bytes(l) / 4)) {
            flush();
        }
        search.entry = entries;
        entries += search.entries();
        searches.push_back(search);
    }
    flush();
    for (const auto & layers : own) {
        outcome = outcome == Outcome::done && !layers.empty() ? search_own(layers) : outcome;
    }
    return outcome;
}

struct GraphRows::Merging::ProductResults {
    Tensors held = Tensors(2);
    T       target;  // [entries] i32
    T       values;  // for each layer [entries] f32 scores of the targets, then [entries] squared lengths of the evicted keys
};

// Finds the nearest kept key of each evicted key: the kept key with the largest score. By distance the score is the product less half
// of the kept key's square; by angle it is the product over the kept key's length, and keys of length 0 never win. The subtracted term is
// part of the product, by numbers appended to each row, because another pass over all products would take as long as the products.
// An appended number is split into two numbers that are exact in half precision.
void GraphRows::Merging::compare(
    const ProductSearch & x, T less_behind, const ProductResults & found, GraphTransfer & lists, GraphBuilder & builder) const {
    constexpr float LITTLE = 1e-36f, MUCH = 1e4f, LARGEST = 6e4f;  // LITTLE avoids division by 0; the others fit in half precision
    ggml_context * c    = builder.context.get();
    const auto     n    = (int64_t) x.n_kept, heads = (int64_t) x.heads;
    const bool     far  = of.job.rule->reach > 0.0f;
    const T        rows = of.flat(c, x.layer, true);
    const T        evicted = ggml_new_tensor_1d(c, GGML_TYPE_I32, (int64_t) x.entries());
    const T        to_keep = ggml_new_tensor_1d(c, GGML_TYPE_I32, n * heads);
    lists.send<int32_t>(evicted, [this, &x](int32_t * to, int32_t h) { write_evicted(x, (size_t) h, to); }, (int32_t) heads);
    lists.send<int32_t>(to_keep, [this, &x](int32_t * to, int32_t h) { write_kept(x, (size_t) h, to); }, (int32_t) heads);
    const T        kept = ggml_clamp(c, ggml_get_rows(c, rows, to_keep), -MOST, MOST);
    const T        own  = squares(c, kept);
    const T        none = far ? nullptr : ggml_scale_bias(c, ggml_step(c, own), -MUCH, MUCH);
    const T        less = far ? ggml_clamp(c, ggml_scale(c, own, 0.5f / (BEHIND / 2 * -LESS)), 0.0f, LARGEST) : none;
    const T        high = ggml_cast(c, ggml_cast(c, less, GGML_TYPE_F16), GGML_TYPE_F32);
    const T        both = ggml_concat(c, high, ggml_sub(c, less, high), 0);
    const T        all  = ggml_concat(c, kept, ggml_concat(c, both, both, 0), 0);
    const int64_t  d    = all->ne[0];
    const T        keys = ggml_reshape_3d(c, all, d, n, heads);
    const T length = far ? nullptr : ggml_reshape_3d(c, ggml_sqrt(c, ggml_scale_bias(c, own, 1.0f, LITTLE)), n, 1, heads);
    T      by    = nullptr;  // the prepared evicted rows of some chunks
    size_t begin = 0;        // index of the first prepared row
    for (size_t first = 0; first < x.n_evicted; first += x.chunk) {
        const auto   m  = (int64_t) std::min(x.chunk, x.n_evicted - first);
        const size_t at = (x.entry + x.heads * first) * sizeof(float), values = at + x.entry * sizeof(float);
        if (first % x.block() == 0) {
            const auto n_rows = (int64_t) (x.heads * std::min(x.block(), x.n_evicted - first));
            const T    list   = ggml_view_1d(c, evicted, n_rows, x.heads * first * sizeof(int32_t));
            const T    e      = ggml_get_rows(c, rows, list);
            const T    square = squares(c, e);
            write_to(square, found.values, values + x.entries() * sizeof(float));
            builder.add(square);  // the square of the original numbers, before the clamp
            by    = ggml_concat(c, ggml_clamp(c, e, -MOST, MOST), ggml_view_2d(c, less_behind, BEHIND, n_rows, less_behind->nb[1], 0), 0);
            begin = first;
        }
        const T some = ggml_view_2d(c, by, d, m * heads, by->nb[1], x.heads * (first - begin) * by->nb[1]);
        T       s    = product(c, keys, ggml_reshape_3d(c, some, d, m, heads));
        s            = ggml_reshape_2d(c, far ? s : ggml_div(c, s, length), n, m * heads);
        const T largest = ggml_argmax(c, s);
        write_to(largest, found.target, at);
        const T score = ggml_get_rows(c, ggml_reshape_3d(c, s, 1, n, m * heads), ggml_reshape_2d(c, largest, 1, m * heads));
        write_to(score, found.values, values);
        builder.add(score);
    }
}

// Compares the rows of some layers of one device, and decides the targets.
Outcome GraphRows::Merging::search_some(std::vector<ProductSearch> & searches) {
    const size_t   layer = searches[0].layer, entries = searches.back().entry + searches.back().entries();
    const auto     device = of.from.layers[layer].device;
    ProductResults found;
    size_t         nodes = 8, widest = 0;
    for (const ProductSearch & x : searches) {
        widest = std::max(widest, std::min(x.block(), x.n_evicted) * x.heads);
        nodes += of.flat_nodes(x.layer) + 28 + 20 * ((x.n_evicted + x.chunk - 1) / x.chunk);
    }
    found.target = found.held.add(GGML_TYPE_I32, (int64_t) entries);
    found.values = found.held.add(GGML_TYPE_F32, (int64_t) (2 * entries));
    GraphBuilder  builder(nodes);
    GraphTransfer lists(device, of.from.devices[of.from.layers[layer].on].worker);
    const T       less = ggml_new_tensor_2d(builder.context.get(), GGML_TYPE_F32, BEHIND, (int64_t) widest);
    lists.send<float>(less, [widest](float * to, int32_t) { std::fill_n(to, BEHIND * widest, LESS); });
    bool room = found.held.allocate(device);
    for (size_t i = 0; i < searches.size() && room; i++) {
        compare(searches[i], less, found, lists, builder);
    }
    if (!room || !lists.allocate()) {
        return of.problem(Outcome::full, layer, "has no memory to merge rows");
    }
    of.upload(lists);
    Outcome outcome = of.prepare(layer, builder);
    outcome         = outcome == Outcome::done ? of.compute(layer, builder) : outcome;
    if (outcome == Outcome::done) {
        std::vector<int32_t> target(entries);
        std::vector<float>   values(2 * entries);
        of.download(found.target, target.data());
        of.download(found.values, values.data());
        each_head(searches, [&](const ProductSearch & x, size_t h) { decide(x, h, target.data() + x.entry, values.data() + 2 * x.entry); });
    }
    return outcome;
}

template <class F> void GraphRows::Merging::each_head(const std::vector<ProductSearch> & searches, const F & visit) const {
    std::vector<std::pair<size_t, size_t>> all;
    for (size_t i = 0; i < searches.size(); i++) {
        for (size_t h = 0; h < searches[i].heads; h++) {
            all.emplace_back(i, h);
        }
    }
    parallel_for(of.from.n_threads, (int32_t) all.size(), [&](int32_t i, int32_t) {
        visit(searches[all[(size_t) i].first], all[(size_t) i].second);
    });
}

void GraphRows::Merging::write_kept(const ProductSearch & x, size_t h, int32_t * to) const {
    const auto &    kept   = of.job.kept[x.layer][h];
    const int32_t * places = of.places[x.layer][h].data() + of.n_old(x.layer, h);
    for (size_t j = 0; j < x.n_kept; j++) {
        to[h * x.n_kept + j] = places[kept[j < kept.size() ? j : 0]];
    }
}

void GraphRows::Merging::write_evicted(const ProductSearch & x, size_t h, int32_t * to) const {
    const auto &    kept   = of.job.kept[x.layer][h];
    const int32_t * places = of.places[x.layer][h].data() + of.n_old(x.layer, h);
    for (size_t i = (size_t) of.job.n_tokens - kept.size(); i < x.n_evicted; i++) {
        to[x.place(h, i)] = places[kept[0]];
    }
    each_evicted(kept, of.job.n_tokens, [&](size_t i, int32_t t) { to[x.place(h, i)] = places[t]; });
}

// Sets the targets and similarities of a KV head from the search results, by the rule of merge_rows.
void GraphRows::Merging::decide(const ProductSearch & x, size_t h, const int32_t * target, const float * values) {
    const auto &      kept = of.job.kept[x.layer][h];
    const MergeRule & rule = *of.job.rule;
    Joined &          to   = joined[x.layer][h];
    std::fill(to.target.begin(), to.target.end(), -1);
    each_evicted(kept, of.job.n_tokens, [&](size_t i, int32_t t) {
        const size_t at    = x.place(h, i);
        const float  score = values[at], own = values[x.entries() + at];
        const bool   found = rule.reach > 0.0f ? in_reach(rule.reach, own, score) : own > 0.0f && score > NOTHING;
        const bool   known = target[at] >= 0 && std::isfinite(own);
        to.target[(size_t) t] = !found || !known ? -1 : target[at] < (int32_t) kept.size() ? target[at] : 0;
        to.share[(size_t) t]  = rule.reach > 0.0f ? 1.0f : score / std::sqrt(own);
    });
    weigh(x.layer, h);
}

}  // namespace kvedge
