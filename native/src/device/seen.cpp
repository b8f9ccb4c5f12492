#include "device/seen.h"

#include <algorithm>
#include <numeric>

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

// Returns the first `rows` numbers of each of the rows [head, head + n) of x [width, ..]. Empty if x is empty.
std::vector<float> cut(const std::vector<float> & x, int32_t width, size_t head, size_t n, int32_t rows) {
    std::vector<float> out;
    out.reserve(x.empty() ? 0 : n * (size_t) rows);
    for (size_t h = head; h < head + n && !x.empty(); h++) {
        const auto from = x.begin() + (std::ptrdiff_t) (h * (size_t) width);
        out.insert(out.end(), from, from + rows);
    }
    return out;
}

template <class X> uint64_t bytes_of(const std::vector<X> & on) {
    return std::accumulate(on.begin(), on.end(), (uint64_t) 0, [](uint64_t n, const X & x) { return n + x.held.bytes(); });
}

}  // namespace

uint64_t Ring::bytes() const { return bytes_of(on_); }

// ---------------------------------------------------------------------------------------------------------
// Queries

void Ring::forget() {
    on_.clear();
    window_ = kept_ = tokens_ = last_ = 0;
    slots_.change();
}

bool Ring::make(const Incoming & incoming) {
    if (keeps(incoming)) {
        if (kept_ != incoming.window) {
            slots_.change();
        }
        kept_ = incoming.window;
        return true;
    }
    forget();
    on_.resize(slots_.devices.size());
    for (size_t i = 0; i < on_.size(); i++) {
        const DeviceTotals & of = slots_.devices[i];
        on_[i].held             = Tensors(1);
        on_[i].queries          = on_[i].held.add(GGML_TYPE_F32, (int64_t) of.query * incoming.window);
        if (!on_[i].held.allocate(of.device)) {
            forget();
            return slots_.refuse(of.device);
        }
    }
    window_ = kept_ = incoming.window;
    return true;
}

// If the graph keeps no query, the count of tokens starts anew: a window must not skip tokens.
std::vector<int64_t> Ring::enter(int32_t n) {
    std::vector<int64_t> places;
    tokens_ = kept_ > 0 ? tokens_ + n : 0;
    last_   = std::min(tokens_, window_);
    for (int32_t t = tokens_ - std::min(n, kept_); t < tokens_; t++) {
        places.push_back(t % kept_);
    }
    return places;
}

// Writes to a ring, so that a short ubatch replaces only the oldest queries.
T Ring::write(const GraphLayer & in, const DeviceLayer & layer, T index) const {
    const int64_t n = in.q->ne[2], kept = std::min<int64_t>(n, kept_);
    if (kept == 0) {
        return nullptr;
    }
    ggml_context * c    = in.ctx;
    const int64_t  d    = in.q->ne[0], heads = in.q->ne[1];
    const size_t   head = (size_t) d * sizeof(float), room = (size_t) window_;
    T last = ggml_view_3d(c, in.q, d, heads, kept, in.q->nb[1], in.q->nb[2], (size_t) (n - kept) * in.q->nb[2]);
    T ring = ggml_view_3d(c, on_[layer.on].queries, d, window_, heads, head, head * room, layer.query_at * room * sizeof(float));
    T place = ggml_view_1d(c, index, kept, slots_.devices[layer.on].entries * (size_t) n * sizeof(int64_t));
    return ggml_set_rows(c, ring, ggml_permute(c, last, 0, 2, 1, 3), place);
}

// The ring must be full, or hold all tokens since it was read.
bool Ring::holds(int32_t n) const { return n > 0 && n == last_ && (n == window_ || n == tokens_); }

int32_t Ring::row_at(int32_t place) const {
    return tokens_ <= window_ ? place : (place - tokens_ % window_ + window_) % window_;
}

LastQueries Ring::read() {
    LastQueries out;
    out.n = last_;
    out.layers.resize(slots_.layers.size());
    for (size_t i = 0; i < on_.size(); i++) {
        const auto queries = kvedge::read(on_[i].queries);
        out.fetched += sizeof(float) * queries.size();
        for (const size_t l : slots_.devices[i].layers) {
            const LayerShape & shape = (*slots_.shapes)[l];
            const auto         d = (size_t) shape.d_k, heads = (size_t) shape.n_heads, window = (size_t) window_;
            out.layers[l].reserve((size_t) last_ * heads * d);
            for (int32_t t = tokens_ - last_; t < tokens_; t++) {
                for (size_t h = 0; h < heads; h++) {
                    const size_t at   = slots_.layers[l].query_at * window + (h * window + (size_t) t % window) * d;
                    const auto   from = queries.begin() + (std::ptrdiff_t) at;
                    out.layers[l].insert(out.layers[l].end(), from, from + (std::ptrdiff_t) d);
                }
            }
        }
    }
    forget();
    return out;
}

// ---------------------------------------------------------------------------------------------------------
// Sums

uint64_t Sums::bytes() const { return bytes_of(on_); }

bool Sums::keeps(const Incoming & incoming) const {
    const int32_t before = slots_.even ? slots_.even_rows() - incoming.pending : 0;  // rows before the pending rows
    const bool    same   = incoming.summed == what_ && before == from_ && incoming.parts == parts_;
    const bool    fits   = incoming.n <= queries_ && slots_.fits(incoming) && slots_.slots_with_memory() - from_ <= rows_;
    return !incoming.summed.any() || (same && fits);
}

void Sums::forget() {
    on_.clear();
    what_ = now_ = {};
    any_  = false;
    from_ = rows_ = queries_ = 0;
    parts_ = 1;
    slots_.change();
}

bool Sums::make(const Incoming & incoming) {
    if (keeps(incoming)) {
        if (!(now_ == incoming.summed)) {
            slots_.change();
        }
        now_ = incoming.summed;
        return true;
    }
    forget();
    what_ = now_ = incoming.summed;
    from_    = slots_.even ? slots_.even_rows() - incoming.pending : 0;
    rows_    = slots_.slots_with_memory() - from_;
    queries_ = incoming.n;
    parts_   = incoming.parts;
    on_.resize(slots_.devices.size());
    for (size_t i = 0; i < on_.size(); i++) {
        const DeviceTotals & of = slots_.devices[i];
        DeviceTensors &      on = on_[i];
        const auto           heads = (int64_t) of.heads;
        int64_t              piece = 0;
        on.own                     = true;
        for (const size_t l : of.layers) {
            const LayerShape & shape = (*slots_.shapes)[l];
            piece                    = std::max(piece, piece_of(shape));
            on.own                   = on.own && has_sums(of.device, shape, slots_.form.storage);
        }
        on.held    = Tensors(6);
        on.columns = what_.columns ? on.held.add(GGML_TYPE_F32, rows_, heads) : nullptr;
        on.squares = what_.squares ? on.held.add(GGML_TYPE_F32, rows_, heads) : nullptr;
        on.entropy = what_.entropy || on.own ? on.held.add(GGML_TYPE_F32, 1, heads) : nullptr;
        on.weights = on.own ? nullptr : on.held.add(GGML_TYPE_F32, piece);
        on.turned  = what_.columns && !on.own ? on.held.add(GGML_TYPE_F32, piece) : nullptr;
        on.sum     = what_.columns && !on.own ? on.held.add(GGML_TYPE_F32, rows_, heads) : nullptr;
        if (!on.held.allocate(of.device)) {
            forget();
            return slots_.refuse(of.device);
        }
    }
    return true;
}

PromptSums Sums::read() {
    PromptSums out;
    out.layers.resize(slots_.layers.size());
    for (size_t i = 0; i < on_.size(); i++) {
        const DeviceTensors & from = on_[i];
        const auto columns = kvedge::read(from.columns), squares = kvedge::read(from.squares);
        const auto entropy = kvedge::read(what_.entropy ? from.entropy : nullptr);
        out.fetched += sizeof(float) * (columns.size() + squares.size() + entropy.size());
        for (const size_t l : slots_.devices[i].layers) {
            const size_t head = slots_.layers[l].head_at, heads = (size_t) (*slots_.shapes)[l].n_heads_kv;
            out.rows      = std::min(slots_.layers[l].groups[0].most_used() - from_, rows_);
            out.layers[l] = { cut(columns, rows_, head, heads, out.rows), cut(squares, rows_, head, heads, out.rows),
                              cut(entropy, 1, head, heads, 1) };
        }
    }
    forget();
    return out;
}

}  // namespace kvedge
