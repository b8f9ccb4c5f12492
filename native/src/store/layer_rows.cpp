#include "store/layer_rows.h"

#include "kernels/kernels.h"
#include "system/file.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace kvedge {

LayerRows::LayerRows(const LayerShape & shape, const Storage & storage, int32_t capacity)
    : shape_(shape), storage_(storage), ragged_(false), capacity_(capacity) {
    const Storage plain = storage.plain();
    extent_ = (size_t) shape.n_heads_kv * (size_t) capacity * (row_k(shape, plain.k) + row_v(shape, plain.v));
}

LayerRows::LayerRows(const LayerShape & shape, const Storage & storage, std::vector<RaggedHead> heads)
    : shape_(shape), storage_(storage), ragged_(true), heads_(std::move(heads)) {
    extent_ = lay_out(shape_, storage_, heads_);
}

static std::vector<RaggedHead> sides_of(const LayerShape & shape, const Storage & storage, const std::vector<StoredRows> & heads) {
    std::vector<RaggedHead> out;
    for (const StoredRows & head : heads) {
        out.push_back({ make_side(keys_of(shape, storage), head.n, head.k), make_side(values_of(shape, storage), head.n, head.v) });
    }
    return out;
}

LayerRows::LayerRows(const LayerShape & shape, const Storage & storage, const std::vector<StoredRows> & heads)
    : LayerRows(shape, storage, sides_of(shape, storage, heads)) {}

LayerRows LayerRows::share() const {
    LayerRows out(shape_, storage_, capacity_);
    out.ragged_ = ragged_;
    out.n_      = n_;
    out.extent_ = extent_;
    out.memory_ = memory_.share();
    out.heads_  = heads_;
    return out;
}

bool LayerRows::take() try {
    memory_ = SharedPages::take(extent_);
    return memory_.size() > 0 || extent_ == 0;
} catch (const std::bad_alloc &) {
    return false;
}

void LayerRows::clear() noexcept {
    memory_ = SharedPages();
    extent_ = 0;
    for (RaggedHead & head : heads_) {
        for (Side * side : { &head.k, &head.v }) {
            for (Area & area : *side) {
                area.n = 0;
                area.live.clear();
            }
        }
    }
}

uint64_t LayerRows::index_bytes() const {
    uint64_t n = 0;
    for (const RaggedHead & head : heads_) {
        n += sizeof(RaggedHead) + head.k[0].live.capacity();
    }
    return n;
}

void LayerRows::add(int32_t n) {
    n_ += n;
    for (RaggedHead & head : heads_) {
        head.k[1].n += n;
        head.v[1].n += n;
    }
}

void fill_rows(LayerRows & to, int32_t head, const LayerRows & from) {
    const auto         dk = (size_t) to.shape().d_k, dv = (size_t) to.shape().d_v;
    const Storage      plain = to.storage().plain();
    std::vector<float> wide;
    int32_t            first = 0;
    from.each_segment(head, [&](const Segment & s) {
        wide.resize((size_t) s.n * std::max(dk, dv));
        kernels().widen(s.k, s.n, (int32_t) dk, wide.data(), dk);
        kernels().from_f32(plain.k, wide.data(), to.k_row(head, first), (size_t) s.n * dk);
        kernels().widen(s.v, s.n, (int32_t) dv, wide.data(), dv);
        kernels().from_f32(plain.v, wide.data(), to.v_row(head, first), (size_t) s.n * dv);
        first += s.n;
    });
}

void LayerRows::keep(const std::vector<int32_t> & rows) {
    const Storage types = ragged_ ? storage_ : storage_.plain();
    const size_t  kst = row_k(shape_, types.k), vst = row_v(shape_, types.v);
    size_t        staying = 0;  // number of first rows that do not move
    while (staying < rows.size() && (size_t) rows[staying] == staying) {
        staying++;
    }
    for (int32_t h = 0; h < shape_.n_heads_kv; h++) {
        RaggedHead * const of = ragged_ ? &heads_[(size_t) h] : nullptr;
        uint8_t * const    k  = memory_.data() + (of ? of->k[0].offset : k_at(h, 0));
        uint8_t * const    v  = memory_.data() + (of ? of->v[0].offset : v_at(h, 0));
        for (size_t to = staying; to < rows.size(); to++) {
            memmove(k + to * kst, k + (size_t) rows[to] * kst, kst);
            memmove(v + to * vst, v + (size_t) rows[to] * vst, vst);
        }
        if (of) {
            of->k[0].n = of->v[0].n = (int32_t) rows.size();
        }
    }
    n_ = ragged_ ? 0 : (int32_t) rows.size();
}

void LayerRows::loosen() {
    memory_.own();
    if (!heads_.empty()) {
        return;
    }
    heads_.resize((size_t) shape_.n_heads_kv);
    for (int32_t h = 0; h < shape_.n_heads_kv; h++) {
        set_loose(h, n_);
    }
}

void LayerRows::set_loose(int32_t head, int32_t n) {
    RaggedHead & of = heads_[(size_t) head];
    of.k[1].n = of.v[1].n = n;
    of.k[1].offset        = k_at(head, n_ - n);
    of.v[1].offset        = v_at(head, n_ - n);
}

void write_rows(LayerRows & to, int32_t head, int32_t first, int32_t n, const float * k, const float * v) {
    write_rows(to.data(), to.head(head)->k, keys_of(to.shape(), to.storage()), first, n, k);
    write_rows(to.data(), to.head(head)->v, values_of(to.shape(), to.storage()), first, n, v);
}

void gather_rows(LayerRows & to, int32_t head, const std::vector<int32_t> & kept, const std::vector<Segment> & from) {
    uint8_t * const k    = to.data() + to.head(head)->k[0].offset;
    uint8_t * const v    = to.data() + to.head(head)->v[0].offset;
    size_t          next = 0;
    int32_t         at   = 0;
    for (const Segment & seg : from) {
        for (; next < kept.size() && kept[next] < at + seg.n; next++) {
            const auto r = (size_t) (kept[next] - at);
            memcpy(k + next * seg.k.stride, seg.k.data + r * seg.k.stride, seg.k.stride);
            memcpy(v + next * seg.v.stride, seg.v.data + r * seg.v.stride, seg.v.stride);
        }
        at += seg.n;
    }
}

// Kept rows of a loose head move only towards the front, so that no row is overwritten before it is copied.
void LayerRows::keep_flagged(int32_t head, const uint8_t * flags, int32_t end) {
    RaggedHead & of   = heads_[(size_t) head];
    uint8_t *    data = memory_.data();
    if (ragged_) {
        keep_rows(data, of.k, keys_of(shape_, storage_), flags);
        keep_rows(data, of.v, values_of(shape_, storage_), flags);
        return;
    }
    const size_t  kst = row_k(shape_, storage_.plain().k), vst = row_v(shape_, storage_.plain().v);
    const int32_t n    = of.k[1].n;
    const auto    left = (int32_t) std::count(flags, flags + n, 1);
    const size_t  k_to = k_at(head, end - left), v_to = v_at(head, end - left);
    size_t        kept = 0;
    for (size_t r = 0; r < (size_t) n; r++) {
        if (flags[r]) {
            memmove(data + k_to + kept * kst, data + of.k[1].offset + r * kst, kst);
            memmove(data + v_to + kept * vst, data + of.v[1].offset + r * vst, vst);
            kept++;
        }
    }
    of.k[1].offset = k_to;
    of.v[1].offset = v_to;
    of.k[1].n = of.v[1].n = left;
    n_                    = end;
}

void LayerRows::drop(int32_t head, int32_t row) {
    drop_row(memory_.data(), heads_[(size_t) head].k, keys_of(shape_, storage_), row, !ragged_);
    drop_row(memory_.data(), heads_[(size_t) head].v, values_of(shape_, storage_), row, !ragged_);
}

// ---------------------------------------------------------------------------------------------------------

// Writes how many rows of a side have the storage type, and the rows left in each group of a grouped type.
static void save_side_counts(const Area & stored, const SideLayout & layout, Sink & out) {
    out.value<int32_t>(stored.n);
    if (is_grouped(layout.types[0])) {
        out.value<uint32_t>((uint32_t) stored.live.size());
        out.values(stored.live);
    }
}

static bool load_side_counts(Side & side, const SideLayout & layout, int32_t length, Reader & in) {
    Area &   stored   = side[0];
    uint32_t n_groups = 0;
    if (!in.value(stored.n) || stored.n < 0 || stored.n > length) {
        return false;
    }
    side[1].n = length - stored.n;
    if (!is_grouped(layout.types[0])) {
        return true;
    }
    if (!in.value(n_groups) || !in.values(stored.live, n_groups)) {
        return false;
    }
    int64_t live = 0;
    for (uint8_t n : stored.live) {
        live += n;
        if (n > GROUP) {
            return false;
        }
    }
    return live == stored.n;
}

// Calls visit(offset, bytes) for every area of a head, in file order.
template <class F>
static void each_stretch(const RaggedHead & head, const LayerShape & shape, const Storage & storage, const F & visit) {
    for (const auto & [side, layout] : { std::pair{ &head.k, keys_of(shape, storage) }, { &head.v, values_of(shape, storage) } }) {
        for (size_t a = 0; a < 2; a++) {
            if (const size_t n = area_bytes(layout.types[a], layout.d, (*side)[a]); n > 0) {
                visit((*side)[a].offset, n);
            }
        }
    }
}

void save_counts(const LayerRows & rows, int32_t head, Sink & out) {
    const RaggedHead   none;
    const RaggedHead & of = rows.head(head) ? *rows.head(head) : none;
    save_side_counts(of.k[0], keys_of(rows.shape(), rows.storage()), out);
    save_side_counts(of.v[0], values_of(rows.shape(), rows.storage()), out);
}

void save_rows(const LayerRows & rows, Sink & out) {
    for (int32_t h = 0; h < rows.shape().n_heads_kv; h++) {
        if (const RaggedHead * head = rows.head(h)) {
            each_stretch(*head, rows.shape(), rows.storage(), [&](size_t at, size_t n) { out.write(rows.data() + at, n); });
            continue;
        }
        rows.each_segment(h, [&](const Segment & s) {
            out.write(s.k.data, (size_t) s.n * s.k.stride);
            out.write(s.v.data, (size_t) s.n * s.v.stride);
        });
    }
}

bool LayerRows::load_counts(int32_t head, int32_t length, Reader & in) {
    RaggedHead & of = heads_[(size_t) head];
    return load_side_counts(of.k, keys_of(shape_, storage_), length, in) && load_side_counts(of.v, values_of(shape_, storage_), length, in);
}

bool LayerRows::load(Reader & in) {
    uint64_t held = 0;
    if (ragged_) {
        extent_ = lay_out(shape_, storage_, heads_);
    }
    for (const RaggedHead & head : heads_) {
        each_stretch(head, shape_, storage_, [&](size_t, size_t n) { held += n; });
    }
    const uint64_t row = row_k(shape_, storage_.plain().k) + row_v(shape_, storage_.plain().v);
    if (held > in.left() || (heads_.empty() && (uint64_t) n_ * (uint64_t) shape_.n_heads_kv > in.left() / row)) {
        return false;
    }
    if (!take()) {
        throw std::bad_alloc();
    }
    bool whole = true;
    for (const RaggedHead & head : heads_) {
        each_stretch(head, shape_, storage_, [&](size_t at, size_t n) { whole = whole && in.read(memory_.data() + at, n); });
    }
    for (int32_t h = 0; heads_.empty() && n_ > 0 && h < shape_.n_heads_kv; h++) {
        whole = whole && in.read(k_row(h, 0), (size_t) n_ * row_k(shape_, storage_.plain().k)) &&
                in.read(v_row(h, 0), (size_t) n_ * row_v(shape_, storage_.plain().v));
    }
    return whole;
}

}  // namespace kvedge
