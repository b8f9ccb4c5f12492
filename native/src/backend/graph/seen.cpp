// What graphs leave of a prompt on its devices: the queries of the last tokens, and sums over all of them. It stays there from
// graph to graph, and is fetched at once, when somebody wants to see it.

#include "backend/graph/rows.h"

#include <algorithm>

namespace kvedge {

using T = ggml_tensor *;

namespace {

std::vector<float> read(T x) {
    std::vector<float> out(x ? (size_t) ggml_nelements(x) : 0);
    if (x) {
        ggml_backend_tensor_get(x, out.data(), 0, ggml_nbytes(x));
    }
    return out;
}

// The first `rows` numbers of the rows [head, head + n) of x [width, ..].
std::vector<float> cut(const std::vector<float> & x, int32_t width, size_t head, size_t n, int32_t rows) {
    std::vector<float> out;
    out.reserve(x.empty() ? 0 : n * (size_t) rows);
    for (size_t h = head; h < head + n && !x.empty(); h++) {
        const auto from = x.begin() + (std::ptrdiff_t) (h * (size_t) width);
        out.insert(out.end(), from, from + rows);
    }
    return out;
}

}  // namespace

int32_t GraphRows::rows_before(const Incoming & incoming) const {
    for (const Layer & layer : layers_) {
        if (layer.device && even_) {
            return layer.groups[0].most_used() - incoming.pending;
        }
    }
    return 0;
}

bool GraphRows::seen_fits(const Incoming & incoming) const {
    const bool sums = incoming.summed == seen_sums_ && rows_before(incoming) == seen_from_ &&
                      visible_after(incoming.n) - seen_from_ <= seen_rows_;
    return (incoming.window == 0 || incoming.window == seen_window_) && (!incoming.summed.any() || sums);
}

void GraphRows::forget_seen() {
    for (Inputs & inputs : inputs_) {
        inputs.seen    = Tensors();
        inputs.queries = inputs.columns = inputs.squares = inputs.entropy = nullptr;
    }
    seen_window_ = seen_tokens_ = seen_last_ = seen_from_ = seen_rows_ = 0;
    seen_sums_   = {};
    summed_up_   = false;
    stamp_       = ++*stamps_;
}

bool GraphRows::make_seen(const Incoming & incoming) {
    if (seen_fits(incoming)) {
        return true;
    }
    forget_seen();
    const Summed &  sums = incoming.summed;
    const int32_t   from = rows_before(incoming), rows = slots_shown() - from;
    for (Inputs & inputs : inputs_) {
        const auto heads   = (int64_t) inputs.heads;
        const auto numbers = (int64_t) inputs.query * incoming.window;
        inputs.seen        = Tensors(4);
        inputs.queries     = numbers > 0 ? inputs.seen.add(GGML_TYPE_F32, numbers) : nullptr;
        inputs.columns     = sums.columns ? inputs.seen.add(GGML_TYPE_F32, rows, heads) : nullptr;
        inputs.squares     = sums.squares ? inputs.seen.add(GGML_TYPE_F32, rows, heads) : nullptr;
        inputs.entropy     = sums.entropy ? inputs.seen.add(GGML_TYPE_F32, 1, heads) : nullptr;
        if (!inputs.seen.allocate(inputs.device)) {
            forget_seen();
            return refuse(inputs.device);
        }
    }
    seen_window_ = incoming.window;
    seen_sums_   = sums;
    seen_from_   = sums.any() ? from : 0;
    seen_rows_   = sums.any() ? rows : 0;
    return true;
}

// A ring, so that older ones stay where few tokens follow.
T GraphRows::keep_queries(const GraphLayer & in, const Layer & layer) const {
    const int64_t n = in.q->ne[2], kept = std::min<int64_t>(n, window_);
    if (kept == 0) {
        return nullptr;
    }
    ggml_context * c    = in.ctx;
    const Inputs & to   = inputs_[layer.inputs];
    const int64_t  d    = in.q->ne[0], heads = in.q->ne[1];
    const size_t   head = (size_t) d * sizeof(float), room = (size_t) window_;
    T last  = ggml_view_3d(c, in.q, d, heads, kept, in.q->nb[1], in.q->nb[2], (size_t) (n - kept) * in.q->nb[2]);
    T ring  = ggml_view_3d(c, to.queries, d, window_, heads, head, head * room, layer.query_at * room * sizeof(float));
    T place = ggml_view_1d(c, to.written[turn_].index, kept, to.entries * (size_t) n * sizeof(int64_t));
    return ggml_set_rows(c, ring, ggml_permute(c, last, 0, 2, 1, 3), place);
}

Seen GraphRows::read_seen() {
    Seen       out;
    const auto layers = layers_.size();
    out.window        = seen_last_;
    out.queries.resize(layers);
    out.sums.resize(layers);
    for (size_t i = 0; i < inputs_.size(); i++) {
        const Inputs & from    = inputs_[i];
        const auto     queries = seen_last_ > 0 ? read(from.queries) : std::vector<float>();
        const auto     columns = read(from.columns), squares = read(from.squares), entropy = read(from.entropy);
        for (size_t l = 0; l < layers; l++) {
            const Layer &      layer = layers_[l];
            const LayerShape & shape = (*shapes_)[l];
            if (!layer.device || layer.inputs != i) {
                continue;
            }
            const auto d = (size_t) shape.d_k, heads = (size_t) shape.n_heads, window = (size_t) seen_window_, kv = (size_t) shape.n_heads_kv;
            if (summed_up_) {
                out.rows    = std::min(layer.groups[0].most_used() - seen_from_, seen_rows_);
                out.sums[l] = { cut(columns, seen_rows_, layer.head_at, kv, out.rows), cut(squares, seen_rows_, layer.head_at, kv, out.rows),
                                cut(entropy, 1, layer.head_at, kv, 1) };
            }
            out.queries[l].reserve((size_t) seen_last_ * heads * d);
            for (int32_t t = seen_tokens_ - seen_last_; t < seen_tokens_; t++) {
                for (size_t h = 0; h < heads; h++) {
                    const size_t at = layer.query_at * window + (h * window + (size_t) t % window) * d;
                    out.queries[l].insert(out.queries[l].end(), queries.begin() + (std::ptrdiff_t) at,
                                          queries.begin() + (std::ptrdiff_t) (at + d));
                }
            }
        }
    }
    forget_seen();
    return out;
}

}  // namespace kvedge
