// Writes and reads what was observed, for session files with whole rows: the conversation continues from it. A file may be
// damaged, so reading checks every size.

#include "observe/observed.h"
#include "system/file.h"

#include <algorithm>

namespace kvedge {

namespace {

constexpr int32_t MOST_COUNTED = 1 << 30;  // largest number of queries that a file may name; sums of it cannot overflow

// bit i < column::FILED: column i
enum : uint8_t { ENTROPY = 4, QUERIES = 8, PEAKS = 16, STOPPED = 32, ALL_QUANTITIES = 63 };

bool filed(size_t quantity) { return quantity < column::FILED || quantity >= column::count; }

template <class Numbers> void write_list(const Numbers & x, Sink & out) {
    out.value<uint64_t>(x.size());
    out.values(x);
}

// Reads n numbers; or none, if `optional`. Returns false if the bytes are damaged.
template <class Numbers> bool read_list(Numbers & x, uint64_t n, Reader & in, bool optional = true) {
    uint64_t found;
    return in.value(found) && (found == n || (optional && found == 0)) && in.values(x, found);
}

bool counts(const std::vector<int32_t> & x) {
    return std::all_of(x.begin(), x.end(), [](int32_t n) { return n >= 0 && n <= MOST_COUNTED; });
}

void write_layer(const LayerSeen & seen, Sink & out) {
    out.value<int32_t>(seen.columns.capacity);
    for (size_t i = 0; i < column::FILED; i++) {
        write_list(seen.columns.of[i], out);
    }
    write_list(seen.entropy, out);
    write_list(seen.window.q, out);
    write_list(seen.window.sinks, out);
    out.value<int32_t>(seen.peaks.capacity);
    out.value<int32_t>(seen.peaks.each);
    write_list(seen.peaks.highest, out);
    out.value<uint8_t>(!seen.moments.empty());
    if (!seen.moments.empty()) {
        seen.moments.write(out);
    }
}

bool read_layer(LayerSeen & seen, const LayerShape & shape, int32_t n_window, Reader & in) {
    const auto heads = (uint64_t) shape.n_heads, heads_kv = (uint64_t) shape.n_heads_kv;
    uint8_t    has_moments;
    seen.window.row = (size_t) heads * (size_t) shape.d_k;
    if (!in.value(seen.columns.capacity) || seen.columns.capacity < 0) {
        return false;
    }
    for (size_t i = 0; i < column::FILED; i++) {
        if (!read_list(seen.columns.of[i], heads_kv * (uint64_t) seen.columns.capacity, in, i > 0)) {
            return false;
        }
    }
    if (!read_list(seen.entropy, heads_kv, in) ||
        !read_list(seen.window.q, (uint64_t) n_window * seen.window.row, in) || !read_list(seen.window.sinks, heads, in) ||
        !in.value(seen.peaks.capacity) || seen.peaks.capacity < 0 || !in.value(seen.peaks.each) ||
        (seen.peaks.each != 1 && seen.peaks.each != shape.n_heads / shape.n_heads_kv) ||
        !read_list(seen.peaks.highest, heads_kv * (uint64_t) seen.peaks.each * (uint64_t) seen.peaks.capacity, in, false)) {
        return false;
    }
    return in.value(has_moments) && has_moments <= 1 && (!has_moments || seen.moments.read(shape.n_heads, shape.d_k, in));
}

}  // namespace

void QueryMoments::write(Sink & out) const {
    out.value<int32_t>(next_);
    out.values(n_);
    out.values(origin_);
    out.values(sum_);
    out.values(outer_);
}

bool QueryMoments::read(int32_t n_heads, int32_t d, Reader & in) {
    const auto heads = (uint64_t) n_heads, each = (uint64_t) d;
    d_               = d;
    return in.value(next_) && next_ >= 0 && in.values(n_, heads) && counts(n_) && in.values(origin_, heads * each) &&
           in.values(sum_, heads * each) && in.values(outer_, heads * (each * (each + 1) / 2));
}

void KeptQueries::write(const std::vector<LayerShape> & shapes, Sink & out) const {
    out.value<uint32_t>((uint32_t) spans_.size());
    for (const Span & span : spans_) {
        for (int32_t n : { span.first, span.n, span.room }) {
            out.value<int32_t>(n);
        }
        for (size_t l = 0; l < shapes.size(); l++) {
            out.write(span.pages[l].data(), query_bytes(shapes[l], span.room));
        }
    }
}

bool KeptQueries::read(const std::vector<LayerShape> & shapes, int32_t n_tokens, Reader & in) {
    uint32_t n_spans;
    int32_t  next = 0;
    if (!in.value(n_spans)) {
        return false;
    }
    for (uint32_t i = 0; i < n_spans; i++) {
        Span span{};
        if (!in.value(span.first) || !in.value(span.n) || !in.value(span.room) || span.first < next || span.n < 0 || span.room < 1 ||
            span.n > span.room || span.n > n_tokens - span.first) {
            return false;
        }
        next = span.first + span.n;
        for (const LayerShape & shape : shapes) {
            const size_t size = query_bytes(shape, span.room);
            if (size > in.left()) {
                return false;
            }
            span.pages.push_back(Pages::take(size));
            if (!span.pages.back()) {
                throw std::bad_alloc();
            }
            if (!in.read(span.pages.back().data(), size)) {
                return false;
            }
        }
        spans_.push_back(std::move(span));
    }
    return true;
}

void Observed::write(Sink & out) const {
    uint8_t quantities = (uint8_t) ((have_.entropy ? ENTROPY : 0) | (have_.queries ? QUERIES : 0) | (have_.peaks ? PEAKS : 0) |
                                    (extent.stopped >= 0 ? STOPPED : 0));
    for (size_t i = 0; i < column::FILED; i++) {
        quantities = (uint8_t) (quantities | (have_.columns[i] ? 1 << i : 0));
    }
    out.value<uint8_t>(quantities);
    for (int32_t n : { have_.window, have_.moments, window_from_, n_entropies_ }) {
        out.value<int32_t>(n);
    }
    for (size_t i = 0; i < quantity::count; i++) {
        if (filed(i)) {
            out.value<int32_t>(missing.of[i]);
        }
    }
    write_list(seen_, out);
    write_list(modality_, out);
    out.value<uint8_t>(!layers_.empty());
    for (const LayerSeen & layer : layers_) {
        write_layer(layer, out);
    }
    queries.write(*shapes_, out);
}

bool Observed::read(int32_t n_tokens, Reader & in) {
    uint8_t    quantities, has_layers;
    const auto fits = [&](int32_t n) { return n >= 0 && n <= n_tokens; };
    if (!in.value(quantities) || quantities > ALL_QUANTITIES || !in.value(have_.window) || have_.window < 0 || !in.value(have_.moments) ||
        have_.moments < -1 || !in.value(window_from_) || !fits(window_from_) || !in.value(n_entropies_) || n_entropies_ < 0 ||
        n_entropies_ > MOST_COUNTED) {
        return false;
    }
    for (size_t i = 0; i < column::FILED; i++) {
        have_.columns[i] = (quantities >> i & 1) != 0;
    }
    have_.entropy = (quantities & ENTROPY) != 0;
    have_.queries = (quantities & QUERIES) != 0;
    have_.peaks   = (quantities & PEAKS) != 0;
    extent.stopped = (quantities & STOPPED) != 0 ? 0 : -1;  // the true token may be later; then windows are only longer than needed
    for (size_t i = 0; i < quantity::count; i++) {
        missing.of[i] = n_tokens;
        if (filed(i) && (!in.value(missing.of[i]) || !fits(missing.of[i]))) {
            return false;
        }
    }
    uint64_t n_seen, n_modality;
    if (!in.value(n_seen) || !in.values(seen_, n_seen) || !counts(seen_) || !in.value(n_modality) || !in.values(modality_, n_modality) ||
        std::any_of(modality_.begin(), modality_.end(), [](uint8_t image) { return image > 1; }) || !in.value(has_layers) || has_layers > 1) {
        return false;
    }
    if (have_.any() && !has_layers) {
        return false;
    }
    layers_.resize(has_layers ? shapes_->size() : 0);
    for (size_t l = 0; l < layers_.size(); l++) {
        if (!read_layer(layers_[l], (*shapes_)[l], have_.window, in)) {
            return false;
        }
    }
    return queries.read(*shapes_, n_tokens, in);
}

}  // namespace kvedge
