#include "observe/observed.h"

#include <algorithm>

namespace kvedge {

namespace {

// [heads][from] as [heads][to], the new places 0.
template <class T> Bulk<T> widened(const Bulk<T> & x, size_t heads, int32_t from, int32_t to) {
    Bulk<T> grown(heads * (size_t) to, T());
    for (size_t h = 0; h < heads && !x.empty(); h++) {
        std::copy_n(x.begin() + (std::ptrdiff_t) (h * (size_t) from), from, grown.begin() + (std::ptrdiff_t) (h * (size_t) to));
    }
    return grown;
}

// Of a row [capacity]: the n entries from `first` on become those in keep, and the rest moves up.
template <class T> void close_row(T * row, size_t capacity, size_t first, size_t n, const std::vector<int32_t> & keep) {
    size_t to = first;
    for (int32_t r : keep) {
        if (first + (size_t) r < capacity) {  // tokens whose attention nobody sums may follow
            row[to++] = row[first + (size_t) r];
        }
    }
    for (size_t from = first + n; from < capacity; from++) {
        row[to++] = row[from];
    }
    std::fill(row + std::min(to, capacity), row + capacity, T());
}

// The same of every row of x.
template <class Numbers> void close_rows(Numbers & x, size_t capacity, size_t first, size_t n, const std::vector<int32_t> & keep) {
    for (size_t base = 0; base < x.size() && first < capacity; base += capacity) {
        close_row(x.data() + base, capacity, first, n, keep);
    }
}

}  // namespace

bool Observed::ensure_sums(size_t l, int32_t n_rows, bool squares) try {
    sums_.resize(shapes_->size());
    ColumnSums &  cs    = sums_[l];
    const bool    blind = squares && cs.capacity > 0 && cs.squares.empty();  // sums of queries whose squares are not known
    const int32_t held  = blind ? 0 : cs.capacity;
    if (held >= n_rows && !blind) {
        return true;
    }
    const auto heads = (size_t) (*shapes_)[l].n_heads_kv;
    ColumnSums grown;  // takes its place as a whole
    grown.capacity = std::max(n_rows, held + held / 2);
    if (squares || !cs.squares.empty()) {
        grown.squares = widened(cs.squares, heads, held, grown.capacity);
        seen_.resize(std::max(seen_.size(), (size_t) grown.capacity), 0);
    }
    grown.sums = widened(blind ? Bulk<double>() : cs.sums, heads, held, grown.capacity);
    cs         = std::move(grown);
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool Observed::ensure_entropies() try {
    for (size_t l = entropies_.size(); l < shapes_->size(); l++) {
        entropies_.emplace_back((size_t) (*shapes_)[l].n_heads_kv, 0.0);
    }
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool Observed::ensure_queries(int32_t next, int32_t n) try {
    queries_.resize(shapes_->size());
    if (!spans_.empty() && spans_.back().first == next) {
        drop_span(spans_.size() - 1);  // of tokens that were refused after all
    }
    for (size_t l = 0; l < queries_.size(); l++) {
        const LayerShape & s = (*shapes_)[l];
        queries_[l].resize(spans_.size());  // a layer that had memory when another had none
        queries_[l].push_back(Pages::take((size_t) n * (size_t) s.n_heads * (row_k(s, Type::f16) + SEEN_BYTES)));
        if (!queries_[l].back()) {
            return false;
        }
    }
    spans_.push_back({ next, n, n });
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

std::vector<QuerySpan> Observed::queries(size_t layer) const {
    std::vector<QuerySpan> out;
    for (size_t i = 0; i < spans_.size(); i++) {
        out.push_back({ spans_[i].first, spans_[i].n, spans_[i].room, (uint8_t *) queries_[layer][i].data() });
    }
    return out;
}

QuerySpan Observed::newest_queries(size_t layer) const {
    const Span & span = spans_.back();
    return { span.first, span.n, span.room, (uint8_t *) queries_[layer][spans_.size() - 1].data() };
}

void Observed::give_back_queries(size_t layer) {
    for (size_t i = 0; i < spans_.size(); i++) {
        queries_[layer][i] = Pages();
    }
}

void Observed::drop_span(size_t span) {
    spans_.erase(spans_.begin() + (std::ptrdiff_t) span);
    for (auto & layer : queries_) {
        layer.erase(layer.begin() + (std::ptrdiff_t) span);
    }
}

void Observed::count(int32_t n_rows, int32_t n, bool causal, std::vector<uint8_t> modality) {
    const int32_t first = n_rows - n;
    for (int32_t t = 0; t < (int32_t) seen_.size() && t < n_rows; t++) {
        seen_[(size_t) t] += causal && t > first ? n_rows - t : n;
    }
    n_entropies_ += entropies_.empty() ? 0 : n;
    modality_ = std::move(modality);
}

void Observed::start_windows(int32_t next, int32_t n) {
    if (n != window_size_) {
        windows_.assign(shapes_->size(), {});
        window_size_ = n;
        window_from_ = next;
    }
}

bool Observed::ensure_window(size_t l, int32_t next, int32_t n) try {
    start_windows(next, n);
    const auto heads = (size_t) (*shapes_)[l].n_heads;
    windows_[l].q.resize((size_t) n * heads * (size_t) (*shapes_)[l].d_k);
    windows_[l].sinks.reserve(heads);  // filled while a graph runs, where nothing may fail
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool Observed::ensure_moments(size_t l) try {
    const LayerShape & s = (*shapes_)[l];
    moments_.resize(shapes_->size());
    if (moments_[l].empty()) {
        moments_[l] = QueryMoments(s.n_heads, s.d_k);
    }
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

bool Observed::ensure_peaks(size_t l, int32_t n_rows, bool apart) try {
    peaks_.resize(shapes_->size());
    Peaks &            p     = peaks_[l];
    const LayerShape & shape = (*shapes_)[l];
    if (p.capacity == 0) {
        p.each = apart ? shape.n_heads / shape.n_heads_kv : 1;
    }
    if (p.capacity < n_rows) {
        const int32_t grown = std::max(n_rows, p.capacity + p.capacity / 2);
        p.highest           = widened(p.highest, (size_t) (shape.n_heads_kv * p.each), p.capacity, grown);
        p.capacity          = grown;
    }
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

void Observed::keep_first(int32_t n) {
    for (size_t l = 0; l < peaks_.size(); l++) {
        Peaks & p = peaks_[l];
        for (int32_t h = 0; h < (*shapes_)[l].n_heads_kv * p.each; h++) {
            std::fill_n(p.highest.begin() + (std::ptrdiff_t) h * p.capacity, std::min(n, p.capacity), KEPT_FIRST);
        }
    }
}

const Rotation & Observed::rotation(size_t layer) const {
    static const Rotation NONE;
    return rotations_ ? (*rotations_)[layer] : NONE;
}

float * Observed::window_slot(size_t layer, int32_t token) {
    const LayerShape & s = (*shapes_)[layer];
    return windows_[layer].q.data() + (size_t) (token % window_size_) * (size_t) s.n_heads * (size_t) s.d_k;
}

void Observed::note_sinks(size_t layer, const float * logits) {
    windows_[layer].sinks.assign(logits, logits + (*shapes_)[layer].n_heads);
}

Bulk<float> Observed::last_queries(size_t layer, int32_t next, int32_t n) const {
    const size_t row = (size_t) (*shapes_)[layer].n_heads * (size_t) (*shapes_)[layer].d_k;
    Bulk<float>  out((size_t) n * row);
    for (int32_t i = 0; i < n; i++) {
        const auto slot = (size_t) ((next - n + i) % window_size_);
        std::copy_n(windows_[layer].q.begin() + (std::ptrdiff_t) (slot * row), row, out.begin() + (std::ptrdiff_t) ((size_t) i * row));
    }
    return out;
}

void Observed::remove_rows(size_t first, size_t n, const std::vector<int32_t> & keep) {
    for (auto & cs : sums_) {
        close_rows(cs.sums, (size_t) cs.capacity, first, n, keep);
        close_rows(cs.squares, (size_t) cs.capacity, first, n, keep);
    }
    for (auto & p : peaks_) {
        close_rows(p.highest, (size_t) p.capacity, first, n, keep);
    }
    close_rows(seen_, seen_.size(), first, n, keep);
}

void Observed::remove_head_rows(size_t layer, size_t head, size_t first, size_t n, const std::vector<int32_t> & keep) {
    if (!peaks_.empty() && first < (size_t) peaks_[layer].capacity) {
        Peaks &    p   = peaks_[layer];
        const auto row = (size_t) p.capacity, each = (size_t) p.each;
        for (size_t i = head * each; i < (head + 1) * each; i++) {
            close_row(p.highest.data() + i * row, row, first, n, keep);
        }
    }
    if (sums_.empty() || first >= (size_t) sums_[layer].capacity) {
        return;
    }
    const auto capacity = (size_t) sums_[layer].capacity;
    close_row(sums_[layer].sums.data() + head * capacity, capacity, first, n, keep);
}

void Observed::keep_sums(size_t layer, size_t head, const std::vector<int32_t> & kept) {
    const auto capacity = (size_t) sums_[layer].capacity;
    close_row(sums_[layer].sums.data() + head * capacity, capacity, 0, capacity, kept);
}

void Observed::shift_rows(size_t n) {
    std::vector<ColumnSums> all(sums_.size());
    for (size_t l = 0; l < sums_.size(); l++) {
        const ColumnSums & cs = sums_[l];
        Bulk<double> &     shifted = all[l].sums;
        for (size_t from = 0; from < cs.sums.size(); from += (size_t) cs.capacity) {
            shifted.insert(shifted.end(), n, 0.0);
            shifted.insert(shifted.end(), cs.sums.begin() + (std::ptrdiff_t) from,
                           cs.sums.begin() + (std::ptrdiff_t) (from + (size_t) cs.capacity));
        }
        all[l].squares  = cs.squares;
        all[l].capacity = cs.capacity + (cs.capacity > 0 ? (int32_t) n : 0);
    }
    sums_ = std::move(all);
    peaks_.clear();  // no stream goes by them
}

void Observed::forget_queries(const std::vector<int32_t> & pending, int32_t n_tokens) {
    for (size_t i = spans_.size(); i-- > 0;) {
        const auto at = std::lower_bound(pending.begin(), pending.end(), spans_[i].first);
        if (at == pending.end() || *at >= spans_[i].first + spans_[i].n) {
            drop_span(i);
        }
    }
    for (Span & span : spans_) {
        span.n = std::min(span.n, std::max(0, n_tokens - span.first));
    }
}

void Observed::drop_layer(size_t l) {
    if (!sums_.empty()) {
        sums_[l] = {};
    }
    if (!windows_.empty()) {
        windows_[l] = {};
    }
    if (!moments_.empty()) {
        moments_[l] = {};
    }
    if (!peaks_.empty()) {
        peaks_[l] = {};
    }
}

void Observed::drop() {
    sums_        = {};
    seen_        = std::vector<int32_t>();  // = {} would keep its memory
    n_entropies_ = 0;
    entropies_.clear();
    queries_.clear();
    spans_.clear();
    modality_    = std::vector<uint8_t>();
    windows_     = {};
    moments_     = {};
    peaks_       = {};
    window_size_ = 0;
    window_from_ = 0;
}

uint64_t Observed::bytes() const {
    uint64_t n = seen_.capacity() * sizeof(int32_t) + modality_.capacity();
    for (const auto & cs : sums_) {
        n += (cs.sums.capacity() + cs.squares.capacity()) * sizeof(double);
    }
    for (const auto & layer : entropies_) {
        n += layer.capacity() * sizeof(double);
    }
    for (const auto & layer : queries_) {
        for (const auto & part : layer) {
            n += part.size();
        }
    }
    for (const auto & m : moments_) {
        n += m.bytes();
    }
    for (const auto & p : peaks_) {
        n += p.highest.capacity() * sizeof(float);
    }
    for (const auto & w : windows_) {
        n += (w.q.capacity() + w.sinks.capacity()) * sizeof(float);
    }
    return n;
}

}  // namespace kvedge
