// What is gathered of the pending tokens while they are read: column sums, entropies, queries, and the last queries.

#include "store/sequence.h"

#include <algorithm>

namespace kvedge {

// [heads][from] to [heads][to], the new places 0.
template <class T> static void widen(Bulk<T> & x, size_t heads, int32_t from, int32_t to) {
    Bulk<T> grown(heads * (size_t) to, T());
    for (size_t h = 0; h < heads && !x.empty(); h++) {
        std::copy_n(x.begin() + (std::ptrdiff_t) (h * (size_t) from), from, grown.begin() + (std::ptrdiff_t) (h * (size_t) to));
    }
    x = std::move(grown);
}

bool Sequence::ensure_layer_sums(size_t l, int32_t extra, bool squares) try {
    const int32_t need = pending_length() + extra;
    sums.resize(shapes().size());
    ColumnSums & cs = sums[l];
    if (squares && cs.capacity > 0 && cs.squares.empty()) {
        cs = {};  // sums of queries whose squares are not known
    }
    if (cs.capacity >= need) {
        return true;
    }
    const auto    heads    = (size_t) shapes()[l].n_heads_kv;
    const int32_t capacity = std::max(need, cs.capacity + cs.capacity / 2);
    if (squares || !cs.squares.empty()) {
        widen(cs.squares, heads, cs.capacity, capacity);
        seen.resize(std::max(seen.size(), (size_t) capacity), 0);
    }
    widen(cs.sums, heads, cs.capacity, capacity);
    cs.capacity = capacity;
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool Sequence::ensure_sums(int32_t extra, bool squares) {
    for (size_t l = 0; l < shapes().size(); l++) {
        if (!ensure_layer_sums(l, extra, squares)) {
            return false;
        }
    }
    return true;
}

bool Sequence::ensure_entropies() try {
    for (size_t l = entropies.size(); l < shapes().size(); l++) {
        entropies.emplace_back((size_t) shapes()[l].n_heads_kv, 0.0);
    }
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool Sequence::ensure_queries(int32_t n) try {
    queries.resize(shapes().size());
    if (!query_parts.empty() && query_parts.back().first == (int32_t) pos.size()) {
        drop_query_part(query_parts.size() - 1);  // of tokens that were refused after all
    }
    for (size_t l = 0; l < queries.size(); l++) {
        const LayerShape & s = shapes()[l];
        queries[l].parts.resize(query_parts.size());  // a layer that had memory when another had none
        queries[l].parts.push_back(Pages::take((size_t) n * (size_t) s.n_heads * (row_k(s, Type::f16) + SEEN_BYTES)));
        if (!queries[l].parts.back()) {
            return false;
        }
    }
    query_parts.push_back({ (int32_t) pos.size(), n, n });
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

std::vector<QuerySpan> Sequence::query_spans(int32_t layer) const {
    std::vector<QuerySpan> out;
    for (size_t i = 0; i < query_parts.size(); i++) {
        const QueryPart & part = query_parts[i];
        out.push_back({ part.first, part.n, part.room, (uint8_t *) queries[(size_t) layer].parts[i].data() });
    }
    return out;
}

QueryRow Sequence::query_row(int32_t layer, size_t part, int32_t i, int32_t query_head) const {
    const QuerySpan span{ 0, 0, query_parts[part].room, (uint8_t *) queries[(size_t) layer].parts[part].data() };
    return span.row(shapes()[(size_t) layer], i, query_head);
}

void Sequence::drop_query_part(size_t part) {
    query_parts.erase(query_parts.begin() + (std::ptrdiff_t) part);
    for (auto & layer : queries) {
        layer.parts.erase(layer.parts.begin() + (std::ptrdiff_t) part);
    }
}

void Sequence::observe(int32_t n, bool causal) {
    const int32_t first = pending_length() - n;
    for (int32_t t = 0; t < (int32_t) seen.size() && t < first + n; t++) {
        seen[(size_t) t] += causal && t > first ? first + n - t : n;
    }
    n_entropies += entropies.empty() ? 0 : n;
    modality.clear();
    if (!queries.empty()) {
        for (int32_t token : pending_tokens()) {
            modality.push_back(image[(size_t) token]);
        }
    }
}

void Sequence::start_windows(int32_t n) {
    if (n != window_size) {
        windows.assign(shapes().size(), {});
        window_size = n;
        window_from = (int32_t) pos.size();
    }
}

bool Sequence::ensure_layer_window(size_t l, int32_t n) try {
    start_windows(n);
    windows[l].q.resize((size_t) n * (size_t) shapes()[l].n_heads * (size_t) shapes()[l].d_k);
    windows[l].sinks.reserve((size_t) shapes()[l].n_heads);  // filled while a graph runs, where nothing may fail
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool Sequence::ensure_windows(int32_t n) {
    for (size_t l = 0; l < shapes().size(); l++) {
        if (!ensure_layer_window(l, n)) {
            return false;
        }
    }
    return true;
}

void Sequence::drop_layer_observations(size_t l) {
    if (!sums.empty()) {
        sums[l] = {};
    }
    if (!windows.empty()) {
        windows[l] = {};
    }
}

void Sequence::drop_observations() {
    sums        = {};
    seen        = std::vector<int32_t>();  // = {} would keep its memory
    n_entropies = 0;
    entropies.clear();
    queries.clear();
    query_parts.clear();
    modality = std::vector<uint8_t>();
    windows     = {};
    window_size = 0;
    window_from = 0;
}

uint64_t Sequence::score_bytes() const {
    uint64_t n = 0;
    for (const auto & cs : sums) {
        n += (cs.sums.capacity() + cs.squares.capacity()) * sizeof(double);
    }
    n += seen.capacity() * sizeof(int32_t) + modality.capacity();
    for (const auto & layer : entropies) {
        n += layer.capacity() * sizeof(double);
    }
    for (const auto & layer : queries) {
        for (const auto & part : layer.parts) {
            n += part.size();
        }
    }
    for (const auto & w : windows) {
        n += (w.q.capacity() + w.sinks.capacity()) * sizeof(float);
    }
    for (const auto & b : blocks) {
        for (const auto & l : b->layers) {
            for (const auto & h : l.heads) {
                n += h.scores.capacity() * sizeof(double);
            }
        }
    }
    return n;
}

}  // namespace kvedge
