// What graphs leave of a prompt on its devices: the queries of the last tokens, and sums over all of them. It stays there from
// graph to graph, and is fetched at once, when somebody wants to see it.

#include "device/graph_rows.h"

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

// ---------------------------------------------------------------------------------------------------------
// Queries

void GraphRows::forget_ring() {
    for (Inputs & inputs : inputs_) {
        inputs.window  = Tensors();
        inputs.queries = nullptr;
    }
    ring_  = {};
    stamp_ = ++*stamps_;
}

bool GraphRows::make_ring(const Incoming & incoming) {
    if (keeps_queries(incoming)) {
        return true;
    }
    forget_ring();
    for (Inputs & inputs : inputs_) {
        inputs.window  = Tensors(1);
        inputs.queries = inputs.window.add(GGML_TYPE_F32, (int64_t) inputs.query * incoming.window);
        if (!inputs.window.allocate(inputs.device)) {
            forget_ring();
            return refuse(inputs.device);
        }
    }
    ring_.window = incoming.window;
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

// Of a ring that is full, or of one that never was.
bool GraphRows::keeps_window(int32_t n) const { return n > 0 && n == ring_.last && (n == ring_.window || n == ring_.tokens); }

int32_t GraphRows::row_in_ring(int32_t place) const {
    return ring_.tokens <= ring_.window ? place : (place - ring_.tokens % ring_.window + ring_.window) % ring_.window;
}

LastQueries GraphRows::read_queries() {
    LastQueries out;
    out.n = ring_.last;
    out.layers.resize(layers_.size());
    for (size_t i = 0; i < inputs_.size(); i++) {
        const auto queries = read(inputs_[i].queries);
        out.fetched += sizeof(float) * queries.size();
        for (size_t l = 0; l < layers_.size(); l++) {
            const LayerShape & shape = (*shapes_)[l];
            const auto         d = (size_t) shape.d_k, heads = (size_t) shape.n_heads, window = (size_t) ring_.window;
            if (!layers_[l].device || layers_[l].inputs != i) {
                continue;
            }
            out.layers[l].reserve((size_t) ring_.last * heads * d);
            for (int32_t t = ring_.tokens - ring_.last; t < ring_.tokens; t++) {
                for (size_t h = 0; h < heads; h++) {
                    const size_t at   = layers_[l].query_at * window + (h * window + (size_t) t % window) * d;
                    const auto   from = queries.begin() + (std::ptrdiff_t) at;
                    out.layers[l].insert(out.layers[l].end(), from, from + (std::ptrdiff_t) d);
                }
            }
        }
    }
    forget_ring();
    return out;
}

// ---------------------------------------------------------------------------------------------------------
// Sums

bool GraphRows::keeps_sums(const Incoming & incoming) const {
    const bool same = incoming.summed == sums_.what && rows_before(incoming) == sums_.from && incoming.parts == sums_.parts;
    const bool fits = incoming.n <= sums_.queries && rows_fit(incoming) && slots_shown() - sums_.from <= sums_.rows;
    return !incoming.summed.any() || (same && fits);
}

void GraphRows::forget_sums() {
    for (Inputs & inputs : inputs_) {
        inputs.sums    = Tensors();
        inputs.columns = inputs.squares = inputs.entropy = inputs.weights = inputs.turned = inputs.sum = nullptr;
    }
    sums_  = {};
    stamp_ = ++*stamps_;
}

bool GraphRows::make_sums(const Incoming & incoming) {
    if (keeps_sums(incoming)) {
        return true;
    }
    forget_sums();
    const Summed &  what = incoming.summed;
    const int32_t   from = rows_before(incoming), rows = slots_shown() - from;
    const Sums      made = { what, false, from, rows, incoming.n, incoming.parts };
    for (size_t i = 0; i < inputs_.size(); i++) {
        Inputs &   inputs = inputs_[i];
        const auto heads  = (int64_t) inputs.heads;
        int64_t    piece  = 0;
        for (size_t l = 0; l < layers_.size(); l++) {
            piece = layers_[l].device && layers_[l].inputs == i ? std::max(piece, piece_of((*shapes_)[l], made)) : piece;
        }
        inputs.sums    = Tensors(6);
        inputs.columns = what.columns ? inputs.sums.add(GGML_TYPE_F32, rows, heads) : nullptr;
        inputs.squares = what.squares ? inputs.sums.add(GGML_TYPE_F32, rows, heads) : nullptr;
        inputs.entropy = what.entropy ? inputs.sums.add(GGML_TYPE_F32, 1, heads) : nullptr;
        inputs.weights = inputs.sums.add(GGML_TYPE_F32, piece);
        inputs.turned  = what.columns ? inputs.sums.add(GGML_TYPE_F32, piece) : nullptr;
        inputs.sum     = what.columns ? inputs.sums.add(GGML_TYPE_F32, rows, heads) : nullptr;
        if (!inputs.sums.allocate(inputs.device)) {
            forget_sums();
            return refuse(inputs.device);
        }
    }
    sums_ = made;
    return true;
}

PromptSums GraphRows::read_sums() {
    PromptSums out;
    out.layers.resize(layers_.size());
    for (size_t i = 0; i < inputs_.size(); i++) {
        const Inputs & from    = inputs_[i];
        const auto     columns = read(from.columns), squares = read(from.squares), entropy = read(from.entropy);
        out.fetched += sizeof(float) * (columns.size() + squares.size() + entropy.size());
        for (size_t l = 0; l < layers_.size(); l++) {
            if (!layers_[l].device || layers_[l].inputs != i) {
                continue;
            }
            const size_t head = layers_[l].head_at, heads = (size_t) (*shapes_)[l].n_heads_kv;
            out.rows      = std::min(layers_[l].groups[0].most_used() - sums_.from, sums_.rows);
            out.layers[l] = { cut(columns, sums_.rows, head, heads, out.rows), cut(squares, sums_.rows, head, heads, out.rows),
                              cut(entropy, 1, head, heads, 1) };
        }
    }
    forget_sums();
    return out;
}

}  // namespace kvedge
