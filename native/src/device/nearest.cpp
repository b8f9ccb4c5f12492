// The search for the nearest kept keys by OWN_NEAREST (own.h), for all layers of a device in one graph. The slots of kept rows go to
// the device. For each evicted row its target comes back, and the cosine similarity if the merge rule uses similarities.

#include "device/own.h"
#include "device/compressing.h"

#include "system/threads.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

namespace kvedge {

using T       = ggml_tensor *;
using Outcome = DeviceRows::Outcome;

namespace {

// Builds OWN_NEAREST. entries: size of the result. most: most kept rows of a KV head.
T nearest(ggml_context * c, T keys, T kept, T heads, int64_t entries, const MergeRule & rule, size_t most) {
    const bool similar = rule.uses_similarity;
    T out       = ggml_new_tensor_2d(c, !similar && most <= INT16_MAX ? GGML_TYPE_I16 : GGML_TYPE_I32, entries, similar ? 2 : 1);
    out->op     = GGML_OP_FLASH_ATTN_EXT;
    out->src[0] = out->src[1] = out->src[2] = keys;
    out->src[3] = kept;
    out->src[5] = heads;
    out->op_params[OWN_KIND] = OWN_NEAREST;
    std::memcpy(out->op_params + OWN_KIND + 1, &rule.reach, sizeof(rule.reach));
    return out;
}

}  // namespace

// The inputs of OWN_NEAREST for a layer. KV heads with the most kept rows come first, because they take the longest.
struct GraphRows::Merging::NearestInputs {
    size_t               layer;
    std::vector<int32_t> heads;  // [Hkv][NEAREST_HEAD], in the order of `order`
    std::vector<size_t>  order;  // KV heads, by falling number of kept rows
    int32_t              n_kept = 0, entries = 0;
    T                    out = nullptr;

    // first [Hkv]: slot of each KV head's first pending row
    NearestInputs(size_t layer, const std::vector<std::vector<int32_t>> & kept, int32_t n_tokens, const std::vector<int32_t> & first)
        : layer(layer), order(kept.size()) {
        std::iota(order.begin(), order.end(), (size_t) 0);
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return kept[a].size() > kept[b].size(); });
        for (const size_t h : order) {
            const auto n = (int32_t) kept[h].size();
            heads.insert(heads.end(), { first[h], n_kept, n, entries, n_tokens - n });
            n_kept += n;
            entries += (n_tokens - n + NEAREST_TILE - 1) / NEAREST_TILE * NEAREST_TILE;
        }
    }

    const int32_t * head(size_t i) const { return heads.data() + i * NEAREST_HEAD; }
};

bool GraphRows::Merging::has_own_search(size_t l) const {
    const DeviceLayer & layer = of.from.layers[l];
    if (!kvedge::has_own(layer.device)) {
        return false;
    }
    for (size_t h = 0; h < of.places[l].size(); h++) {  // pending rows must be consecutive, but may reuse slots of dropped rows
        size_t at = 0;
        if (of.from.group_of(l, (int32_t) h, at).ordered) {
            const auto & all = of.places[l][h];
            const auto   gap = std::adjacent_find(all.end() - of.job.n_tokens, all.end(), [](int32_t a, int32_t b) { return b != a + 1; });
            if (gap != all.end()) {
                return false;
            }
        }
    }
    const GgmlContext context = make_context((4 + of.flat_nodes(l)) * ggml_tensor_overhead());
    ggml_context *    c       = context.get();
    const T           list = ggml_new_tensor_1d(c, GGML_TYPE_I32, 1), heads = ggml_new_tensor_2d(c, GGML_TYPE_I32, NEAREST_HEAD, 1);
    const T           keys = of.flat(c, l, true);
    const bool        half = keys->type == GGML_TYPE_F16 || keys->type == GGML_TYPE_BF16;
    return half && ggml_backend_dev_supports_op(layer.device, nearest(c, keys, list, heads, NEAREST_TILE, *of.job.rule, 1));
}

// Searches the targets of layers of one device.
Outcome GraphRows::Merging::search_own(const std::vector<size_t> & layers) {
    std::vector<NearestInputs> all;
    const DeviceLayer & on = of.from.layers[layers[0]];
    GraphTransfer       transfer(on.device, of.from.devices[on.on].worker);
    size_t              nodes = 0;
    for (const size_t l : layers) {
        std::vector<int32_t> first;
        for (size_t h = 0; h < of.places[l].size(); h++) {
            first.push_back(of.places[l][h][of.n_old(l, h)]);
        }
        all.emplace_back(l, of.job.kept[l], of.job.n_tokens, first);
        nodes += 4 + of.flat_nodes(l);
    }
    GraphBuilder   builder(nodes);
    ggml_context * c = builder.context.get();
    for (NearestInputs & x : all) {
        const T kept = ggml_new_tensor_1d(c, GGML_TYPE_I32, x.n_kept);
        const T heads = ggml_new_tensor_2d(c, GGML_TYPE_I32, NEAREST_HEAD, (int64_t) x.order.size());
        transfer.send<int32_t>(heads, [&x](int32_t * to, int32_t) { std::copy(x.heads.begin(), x.heads.end(), to); });
        transfer.send<int32_t>(kept, [this, &x](int32_t * to, int32_t i) {
            const int32_t * head = x.head((size_t) i);
            const auto &    rows = of.job.kept[x.layer][x.order[(size_t) i]];
            std::transform(rows.begin(), rows.end(), to + head[NEAREST_KEPT_AT], [&](int32_t row) { return head[NEAREST_FIRST] + row; });
        }, (int32_t) x.order.size());
        x.out = nearest(c, of.flat(c, x.layer, true), kept, heads, x.entries, *of.job.rule, of.job.kept[x.layer][x.order[0]].size());
        transfer.fetch(x.out);
        builder.add(x.out);
    }
    if (!transfer.allocate()) {
        return of.problem(Outcome::full, layers[0], "has no memory to merge rows");
    }
    of.upload(transfer);
    Outcome outcome = of.prepare(layers[0], builder);
    outcome         = outcome == Outcome::done ? of.compute(layers[0], builder) : outcome;
    if (outcome != Outcome::done) {
        return outcome;
    }
    transfer.download(of.from.n_threads);
    of.rows.work.to_host += transfer.fetched_bytes();
    std::vector<std::pair<const NearestInputs *, size_t>> parts;
    for (const NearestInputs & x : all) {
        for (size_t i = 0; i < x.order.size(); i++) {
            parts.emplace_back(&x, i);
        }
    }
    parallel_for(of.from.n_threads, (int32_t) parts.size(), [&](int32_t p, int32_t) {
        read_own(*parts[(size_t) p].first, parts[(size_t) p].second, transfer);
    });
    return outcome;
}

// Reads the targets of the i-th KV head of x.order from downloaded results.
void GraphRows::Merging::read_own(const NearestInputs & x, size_t i, const GraphTransfer & results) {
    const size_t   h      = x.order[i];
    const auto     begin  = (size_t) x.head(i)[NEAREST_AT];
    const float *  values = results.values(x.out);
    const float *  shares = x.out->ne[1] == 2 ? values + x.entries + begin : nullptr;
    const Joined & to     = joined[x.layer][h];
    std::fill(to.target.begin(), to.target.end(), -1);
    const auto read = [&](const auto * targets) {
        each_evicted(of.job.kept[x.layer][h], of.job.n_tokens, [&](size_t at, int32_t t) {
            to.target[(size_t) t] = targets[begin + at];
            to.share[(size_t) t]  = shares ? shares[at] : 1.0f;
        });
    };
    if (x.out->type == GGML_TYPE_I16) {
        read((const int16_t *) values);
    } else {
        read((const int32_t *) values);
    }
    weigh(x.layer, h);
}

// Allocates `joined` for all KV heads in one piece, which threads touch first. 16,384 tokens of 384 KV heads take 50 MiB; in separate
// pieces the allocation would take as long as the search.
void GraphRows::Merging::make_room() {
    const auto all = (size_t) of.job.n_tokens;
    size_t     n   = 0;
    for (size_t l = 0; l < of.places.size(); l++) {
        for (size_t h = 0; h < of.places[l].size(); h++) {
            n += 2 * all + of.job.kept[l][h].size();
        }
    }
    room = Pages::take(n * sizeof(float));
    if (n > 0 && !room) {
        throw std::bad_alloc();
    }
    auto * at = (float *) room.data();
    joined.resize(of.places.size());
    for (size_t l = 0; l < of.places.size(); l++) {
        for (size_t h = 0; h < of.places[l].size(); h++) {
            const size_t kept = of.job.kept[l][h].size();
            joined[l].push_back({ { (int32_t *) at, all }, { at + all, all }, { at + 2 * all, kept } });
            at += 2 * all + kept;
        }
    }
}

void GraphRows::Merging::weigh(size_t l, size_t h) {
    const auto &      kept   = of.job.kept[l][h];
    const MergeRule & rule   = *of.job.rule;
    const auto *      biases = of.pending_biases(l, h);
    Joined &          to     = joined[l][h];
    ReduceInput       in{};
    in.n_tokens = of.job.n_tokens;
    in.kept     = kept.data();
    in.n_kept   = (int32_t) kept.size();
    in.bias     = biases ? biases->data() : nullptr;
    to_merge_factors(in, rule, { to.target.data(), to.share.data(), to.self.data() }, rule.mass ? of.stay[l][h].data() : nullptr);
}

}  // namespace kvedge
