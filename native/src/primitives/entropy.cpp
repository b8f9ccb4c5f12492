#include "primitives/entropy.h"

#include "kernels/kernels.h"
#include "kernels/softmax.h"

#include <algorithm>
#include <cstring>

namespace kvedge {

namespace {

constexpr size_t KEYS   = 512;  // keys packed at a time: a panel of them stays in a core's cache
constexpr size_t ROWS   = 60;   // queries at a time
constexpr size_t ENOUGH = 24;   // queries for which a matrix product is fast

struct Worker {
    const LayerShape &             shape;
    const HeadView &               view;
    const std::vector<QuerySpan> & spans;
    std::vector<float>             rows, panel, q, s;
    size_t                         stride;

    Worker(const LayerShape & of_layer, const HeadView & of_head, const std::vector<QuerySpan> & kept)
        : shape(of_layer), view(of_head), spans(kept) {
        const auto d = (size_t) shape.d_k;
        stride       = KEYS + 64;  // a panel may write past the last key
        rows.resize(KEYS * d);
        panel.resize(stride * d);
        q.resize(ROWS * d);
        s.resize(ROWS * stride);
    }

    // Packs keys [first, first + n) of the list. Segments come in the order of the pending rows.
    void pack(const std::vector<int32_t> & keys, size_t first, size_t n) {
        const auto d    = (size_t) shape.d_k;
        size_t     next = first;
        int32_t    at   = 0;
        for (const Segment & seg : view.pending) {
            for (; next < first + n && keys[next] < at + seg.n; next++) {
                kernels().widen(seg.k.from(keys[next] - at), 1, shape.d_k, rows.data() + (next - first) * d, d);
            }
            at += seg.n;
        }
        kernels().pack({ (const uint8_t *) rows.data(), d * sizeof(float), Type::f32 }, (int32_t) n, shape.d_k, panel.data());
    }

    // Loads queries [first, first + n) of the list, of one query head.
    void load(const std::vector<int32_t> & queries, size_t first, size_t n, int32_t query_head) {
        const auto d = (size_t) shape.d_k;
        each_query(queries, first, n, query_head, [&](size_t r, const QueryRow & from) {
            kernels().to_f32(Type::f16, from.q, q.data() + r * d, d);
        });
    }

    template <class F>
    void each_query(const std::vector<int32_t> & queries, size_t first, size_t n, int32_t query_head, const F & visit) const {
        auto span = spans.begin();
        for (size_t r = 0; r < n; r++) {
            const int32_t token = queries[first + r];
            while (token >= span->first + span->n) {
                span++;
            }
            visit(r, span->row(shape, token - span->first, query_head));
        }
    }

    // Adds the attention of the loaded queries, which start at place `first`, over the packed keys [key, key + n_keys) of the list to out.
    void attend(const CrossAttention & cross, size_t first, size_t n, size_t key, size_t n_keys, SoftmaxRow * out) {
        const Kernels & kn    = kernels();
        const auto      panel = (size_t) kn.panel, d = (size_t) shape.d_k;
        const auto      from  = [&](size_t r) { return std::max((size_t) cross.unseen[first + r], key) - key; };
        const size_t    left  = from(0) / panel * panel;  // columns that no query looks at
        kn.gemm_qk({ q.data(), d }, (int32_t) n, this->panel.data() + left * d, (int32_t) (n_keys - left), shape.d_k,
                   { s.data() + left, stride });
        for (size_t r = 0; r < n && from(r) < n_keys; r++) {
            float *      row  = s.data() + r * stride + from(r);
            const size_t most = n_keys - from(r);
            if (shape.softcap != 0.0f) {
                kn.softcap(row, most, shape.softcap);
            }
            SoftmaxRow part;
            part.top = kn.max(row, most);
            part.sum = kn.exp_dot(row, most, part.top, &part.dot);
            out[r].add(part);
        }
    }
};

// Returns how many queries from `first` on are taken together: at most ROWS; from ENOUGH on only queries that look at the same keys.
size_t together(const CrossAttention & cross, size_t first) {
    size_t end = first + 1;
    while (end < cross.queries.size() && end - first < ROWS && (end - first < ENOUGH || cross.unseen[end] == cross.unseen[first])) {
        end++;
    }
    return end - first;
}

}  // namespace

double attention_entropy(
    const LayerShape & shape, const HeadView & view, const std::vector<QuerySpan> & spans, int32_t head, const CrossAttention & cross) {
    Worker                  w(shape, view, spans);
    const auto              group = (size_t) (shape.n_heads / shape.n_heads_kv), n = cross.queries.size();
    std::vector<SoftmaxRow> rows(group * n);
    for (size_t g = 0; g < group; g++) {
        w.each_query(cross.queries, 0, n, head * (int32_t) group + (int32_t) g,
                     [&](size_t r, const QueryRow & from) { memcpy(&rows[g * n + r], from.seen, sizeof(SoftmaxRow)); });
    }
    for (size_t k = 0; k < cross.keys.size(); k += KEYS) {
        const size_t n_keys = std::min(KEYS, cross.keys.size() - k);
        if (n == 0 || (size_t) cross.unseen[0] >= k + n_keys) {
            continue;  // all queries have seen these keys
        }
        w.pack(cross.keys, k, n_keys);
        for (size_t r = 0, n_rows; r < n && (size_t) cross.unseen[r] < k + n_keys; r += n_rows) {
            n_rows = together(cross, r);
            for (size_t g = 0; g < group; g++) {
                w.load(cross.queries, r, n_rows, head * (int32_t) group + (int32_t) g);
                w.attend(cross, r, n_rows, k, n_keys, rows.data() + g * n + r);
            }
        }
    }
    double sum = 0.0;
    for (const SoftmaxRow & row : rows) {
        sum += row.entropy();
    }
    return sum;
}

}  // namespace kvedge
