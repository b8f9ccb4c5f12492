#include "observe/observed.h"

#include <algorithm>

namespace kvedge {

namespace {

// Returns x [heads][from] as [heads][to]. Each row moves to place `at`; the other places are 0.
template <class T> Bulk<T> moved(const Bulk<T> & x, size_t heads, int32_t from, int32_t to, size_t at = 0) {
    Bulk<T> grown(heads * (size_t) to, T());
    for (size_t h = 0; h < heads && !x.empty(); h++) {
        std::copy_n(x.begin() + (std::ptrdiff_t) (h * (size_t) from), from, grown.begin() + (std::ptrdiff_t) (h * (size_t) to + at));
    }
    return grown;
}

// Removes the entries [first, first + n) of a row [capacity], except those in `keep`. Later entries move up.
template <class T> void close_row(T * row, size_t capacity, size_t first, size_t n, const std::vector<int32_t> & keep) {
    size_t to = first;
    for (int32_t r : keep) {
        if (first + (size_t) r < capacity) {  // tokens beyond the capacity have no sums
            row[to++] = row[first + (size_t) r];
        }
    }
    for (size_t from = n < capacity ? first + n : capacity; from < capacity; from++) {
        row[to++] = row[from];
    }
    std::fill(row + std::min(to, capacity), row + capacity, T());
}

// Applies close_row to n_rows rows of x [..][capacity], from row `row` on. x may be empty.
template <class Numbers> void close_rows(
    Numbers & x, size_t row, size_t n_rows, size_t capacity, size_t first, size_t n, const std::vector<int32_t> & keep) {
    for (size_t base = row * capacity; base < std::min(x.size(), (row + n_rows) * capacity) && first < capacity; base += capacity) {
        close_row(x.data() + base, capacity, first, n, keep);
    }
}

// Applies close_row to all numbers of n_heads KV heads, from `head` on.
void close_heads(LayerSeen & of, size_t head, size_t n_heads, size_t first, size_t n, const std::vector<int32_t> & keep) {
    const auto each = (size_t) of.peaks.each;
    for (auto & numbers : of.columns.of) {
        close_rows(numbers, head, n_heads, (size_t) of.columns.capacity, first, n, keep);
    }
    close_rows(of.peaks.highest, head * each, n_heads * each, (size_t) of.peaks.capacity, first, n, keep);
}

int32_t grown(int32_t capacity, int32_t n_rows) { return capacity >= n_rows ? capacity : std::max(n_rows, capacity + capacity / 2); }

}  // namespace

Columns Columns::widened(const std::array<bool, column::count> & wanted, size_t heads_kv, int32_t to, int32_t from) const {
    Columns more;
    more.capacity = to;
    for (size_t i = 0; i < column::count; i++) {
        if (wanted[i] || !of[i].empty()) {
            more.of[i] = moved(of[i], heads_kv, capacity, to, (size_t) from);
        }
    }
    return more;
}

void LayerSeen::make_room(const Observation & wanted, const LayerShape & shape, int32_t n_rows) {
    const auto heads_kv = (size_t) shape.n_heads_kv;
    for (size_t i = 0; i < column::count; i++) {
        if (wanted.columns[i] && (columns.capacity < n_rows || columns.of[i].empty())) {
            columns = columns.widened(wanted.columns, heads_kv, grown(columns.capacity, n_rows));
        }
    }
    if (wanted.entropy) {
        entropy.resize(heads_kv, 0.0);
    }
    if (wanted.window > 0) {
        window.row = (size_t) shape.n_heads * (size_t) shape.d_k;
        window.q.resize((size_t) wanted.window * window.row);
        window.sinks.reserve((size_t) shape.n_heads);  // a running graph fills it, which must not fail
    }
    if (wanted.moments >= 0 && moments.empty()) {
        moments = QueryMoments(shape.n_heads, shape.d_k);
    }
    if (wanted.peaks && peaks.capacity < n_rows) {
        const int32_t to   = grown(peaks.capacity, n_rows);
        const int32_t each = peaks.capacity > 0 ? peaks.each : wanted.apart ? shape.n_heads / shape.n_heads_kv : 1;
        peaks              = { moved(peaks.highest, heads_kv * (size_t) each, peaks.capacity, to), to, each };
    }
}

uint64_t LayerSeen::bytes() const {
    size_t doubles = entropy.capacity();
    for (const auto & numbers : columns.of) {
        doubles += numbers.capacity();
    }
    return doubles * sizeof(double) + moments.bytes() +
           (peaks.highest.capacity() + window.q.capacity() + window.sinks.capacity()) * sizeof(float);
}

uint64_t observed_bytes(const Observation & wanted, const LayerShape & layer, int32_t n_tokens) {
    const auto T = (uint64_t) n_tokens, heads = (uint64_t) layer.n_heads, heads_kv = (uint64_t) layer.n_heads_kv;
    uint64_t   n = (uint64_t) wanted.window * heads * (uint64_t) layer.d_k * sizeof(float);
    n += (uint64_t) std::count(wanted.columns.begin(), wanted.columns.end(), true) * heads_kv * T * sizeof(double);
    n += wanted.entropy ? heads_kv * sizeof(double) : 0;
    n += wanted.any_peaks() ? (wanted.apart ? heads : heads_kv) * T * sizeof(float) : 0;
    n += wanted.moments >= 0 ? QueryMoments::bytes(layer.n_heads, layer.d_k) : 0;
    return n + (wanted.queries ? heads * T * (row_k(layer, Type::f16) + SEEN_BYTES) : 0);
}

bool Observed::make_room(const Observation & wanted, size_t l, int32_t next, int32_t n_rows) try {
    layers_.resize(shapes_->size());
    if (wanted.window > 0 && wanted.window != have_.window) {
        for (LayerSeen & layer : layers_) {
            layer.window = {};
        }
        have_.window = wanted.window;
        window_from_ = next;
    }
    layers_[l].make_room(wanted, (*shapes_)[l], n_rows);
    if (wanted.counts()) {
        seen_.resize(std::max(seen_.size(), (size_t) layers_[l].columns.capacity), 0);
    }
    for (size_t i = 0; i < column::count; i++) {
        have_.columns[i] = have_.columns[i] || wanted.columns[i];
    }
    have_.entropy = have_.entropy || wanted.entropy;
    have_.moments = std::max(have_.moments, wanted.moments);
    have_.peaks   = have_.peaks || wanted.peaks;
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool KeptQueries::make_room(const std::vector<LayerShape> & shapes, int32_t next, int32_t n) try {
    if (!spans_.empty() && spans_.back().first == next) {
        spans_.pop_back();  // its tokens were refused later
    }
    Span fresh{ next, n, n, {} };
    for (const LayerShape & s : shapes) {
        fresh.pages.push_back(Pages::take(query_bytes(s, n)));
        if (!fresh.pages.back()) {
            return false;
        }
    }
    spans_.push_back(std::move(fresh));
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

std::vector<QuerySpan> KeptQueries::of(size_t layer) const {
    std::vector<QuerySpan> out;
    for (size_t i = 0; i < spans_.size(); i++) {
        out.push_back(span(layer, i));
    }
    return out;
}

void KeptQueries::give_back(size_t layer) {
    for (Span & span : spans_) {
        span.pages[layer] = Pages();
    }
}

void KeptQueries::forget(const std::vector<int32_t> & pending, int32_t n_tokens) {
    for (size_t i = spans_.size(); i-- > 0;) {
        const auto at = std::lower_bound(pending.begin(), pending.end(), spans_[i].first);
        if (at == pending.end() || *at >= spans_[i].first + spans_[i].n) {
            spans_.erase(spans_.begin() + (std::ptrdiff_t) i);
        }
    }
    for (Span & span : spans_) {
        span.n = std::min(span.n, std::max(0, n_tokens - span.first));
    }
}

uint64_t KeptQueries::bytes() const {
    uint64_t n = 0;
    for (const Span & span : spans_) {
        for (const Pages & pages : span.pages) {
            n += pages.size();
        }
    }
    return n;
}

Bulk<float> QueryWindow::last(int32_t next, int32_t n) const {
    Bulk<float> out((size_t) n * row);
    for (int32_t i = 0; i < n; i++) {
        std::copy_n(q.begin() + (std::ptrdiff_t) slot_of(next - n + i), row, out.begin() + (std::ptrdiff_t) ((size_t) i * row));
    }
    return out;
}

bool Observed::make_query_room(int32_t next, int32_t n) {
    have_.queries = true;
    return queries.make_room(*shapes_, next, n);
}

void Observed::count(int32_t n_rows, int32_t n, bool causal, std::vector<uint8_t> modality) {
    const int32_t first = n_rows - n;
    for (int32_t t = 0; t < (int32_t) seen_.size() && t < n_rows; t++) {
        seen_[(size_t) t] += causal && t > first ? n_rows - t : n;
    }
    n_entropies_ += have_.entropy ? n : 0;
    modality_ = std::move(modality);
}

void Observed::keep_first(int32_t n) {
    for (size_t l = 0; l < layers_.size(); l++) {
        Peaks & p = layers_[l].peaks;
        for (int32_t h = 0; h < (*shapes_)[l].n_heads_kv * p.each; h++) {
            std::fill_n(p.highest.begin() + (std::ptrdiff_t) h * p.capacity, std::min(n, p.capacity), KEPT_FIRST);
        }
    }
}

const Rotation & Observed::rotation(size_t layer) const {
    static const Rotation NONE;
    return rotations_ ? (*rotations_)[layer] : NONE;
}

void Observed::remove_rows(size_t first, size_t n, const std::vector<int32_t> & keep) {
    for (size_t l = 0; l < layers_.size(); l++) {
        close_heads(layers_[l], 0, (size_t) (*shapes_)[l].n_heads_kv, first, n, keep);
    }
    close_rows(seen_, 0, 1, seen_.size(), first, n, keep);
}

void Observed::remove_head_rows(size_t layer, size_t head, size_t first, size_t n, const std::vector<int32_t> & keep) {
    if (!layers_.empty()) {
        close_heads(layers_[layer], head, 1, first, n, keep);
    }
}

void Observed::shift_rows(size_t n) {
    std::vector<Columns> all(layers_.size());
    for (size_t l = 0; l < layers_.size(); l++) {
        const Columns & now = layers_[l].columns;
        if (now.capacity > 0) {
            all[l] = now.widened({}, (size_t) (*shapes_)[l].n_heads_kv, now.capacity + (int32_t) n, (int32_t) n);
        }
    }
    for (size_t l = 0; l < layers_.size(); l++) {
        layers_[l].columns = std::move(all[l]);
    }
    drop_peaks();  // streams do not use peaks
    extent.first = 0;
}

void Observed::drop_sums() {
    have_.columns = {};
    for (LayerSeen & layer : layers_) {
        layer.columns = {};
    }
}

void Observed::drop_peaks() {
    have_.peaks = false;
    for (LayerSeen & layer : layers_) {
        layer.peaks = {};
    }
}

void Observed::drop_layer(size_t l) {
    if (!layers_.empty()) {
        layers_[l] = {};
    }
    queries.give_back(l);
}

void Observed::drop() {
    layers_      = std::vector<LayerSeen>();  // = {} would keep its memory
    have_        = {};
    seen_        = std::vector<int32_t>();
    n_entropies_ = 0;
    queries      = {};
    modality_    = std::vector<uint8_t>();
    window_from_ = 0;
    extent = {};
}

uint64_t Observed::bytes() const {
    uint64_t n = seen_.capacity() * sizeof(int32_t) + modality_.capacity() + queries.bytes();
    for (const LayerSeen & layer : layers_) {
        n += layer.bytes();
    }
    return n;
}

}  // namespace kvedge
