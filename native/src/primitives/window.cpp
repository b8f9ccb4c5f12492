#include "primitives/window.h"

#include "kernels/kernels.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

constexpr int32_t BLOCK = 128;  // keys packed at a time

// Returns [n] biases of all stored rows of a head; empty: all are 0.
std::vector<float> biases_of(const HeadView & view, size_t n) {
    std::vector<float> out;
    size_t             at = 0;
    for (const auto * segments : { &view.old, &view.pending }) {
        for (const Segment & seg : *segments) {
            if (seg.bias) {
                out.resize(n);
                std::copy_n(seg.bias, seg.n, out.begin() + (std::ptrdiff_t) at);
            }
            at += (size_t) seg.n;
        }
    }
    return out;
}

// Writes s [n_window][stride]: logits of one query head's window over all stored rows of its KV head.
void window_logits(const ScoreInput & in, const HeadView & view, int32_t query_head, float * panel, float * s, size_t stride) {
    const int32_t d = in.shape.d_k;
    const FloatIn q = { in.window_q + (size_t) query_head * (size_t) d, (size_t) in.shape.n_heads * (size_t) d };
    for (const auto * segments : { &view.old, &view.pending }) {
        for (const Segment & seg : *segments) {
            for (int32_t c = 0; c < seg.n; c += BLOCK) {
                const int32_t w = std::min(BLOCK, seg.n - c);
                kernels().pack(seg.k.from(c), w, d, panel);
                kernels().gemm_qk(q, in.n_window, panel, w, d, { s, stride });
                s += w;
            }
        }
    }
}

// Calls visit(window row, weights [sees], total, sees) for every window query of a KV head. The weights, not yet divided by `total`, cover
// the `sees` rows up to the query's own row, stored rows first.
template <class F> void each_window_row(const ScoreInput & in, const HeadView & view, int32_t head, const F & visit) {
    const LayerShape & shape  = in.shape;
    const Kernels &    kn     = kernels();
    const int32_t      group  = shape.n_heads / shape.n_heads_kv;
    const int32_t      n_keys = view.n_old + in.n_tokens;
    const size_t       stride = ((size_t) n_keys + 64 + 15) / 16 * 16;
    std::vector<float> s((size_t) in.n_window * stride), panel((size_t) (BLOCK + 64) * (size_t) shape.d_k);
    const auto         biases = biases_of(view, (size_t) n_keys);
    for (int32_t g = 0; g < group && in.n_window > 0; g++) {
        const int32_t query_head = head * group + g;
        window_logits(in, view, query_head, panel.data(), s.data(), stride);
        for (int32_t r = 0; r < in.n_window; r++) {
            float *    row  = s.data() + (size_t) r * stride;
            const auto sees = (size_t) (n_keys - in.n_window + r + 1);
            if (shape.softcap != 0.0f) {
                kn.softcap(row, sees, shape.softcap);
            }
            if (!biases.empty()) {
                kn.axpy(1.0f, biases.data(), row, sees);
            }
            const float sink  = in.sinks ? in.sinks[query_head] : -INFINITY;
            const float top   = std::max(kn.max(row, sees), sink);
            const float total = kn.exp_sum(row, sees, top) + std::exp(sink - top);
            visit(r, row, total, sees);
        }
    }
}

}  // namespace

void window_attention(const ScoreInput & in, const HeadView & view, int32_t head, GroupReduction reduction, float * out) {
    const int32_t      group = in.shape.n_heads / in.shape.n_heads_kv;
    const auto         first = (size_t) view.n_old;  // the first pending row
    std::vector<float> mean((size_t) in.n_tokens);
    std::fill(out, out + in.n_tokens, 0.0f);
    each_window_row(in, view, head, [&](int32_t r, const float * row, float total, size_t sees) {
        kernels().axpy(1.0f / (total * (float) in.n_window), row + first, mean.data(), sees - first);
        if (r + 1 < in.n_window) {
            return;
        }
        for (int32_t t = 0; t < in.n_tokens; t++) {
            const float m = mean[(size_t) t];
            out[t]        = reduction == GroupReduction::max ? std::max(out[t], m) : out[t] + m / (float) group;
        }
        std::fill(mean.begin(), mean.end(), 0.0f);
    });
}

void faded_votes(const ScoreInput & in, const HeadView & view, int32_t head, double fade, float * out) {
    const int32_t       group = in.shape.n_heads / in.shape.n_heads_kv, W = in.n_window, T = in.n_tokens;
    const auto          first = (size_t) view.n_old;
    std::vector<double> say((size_t) W);  // weight of each query; the last one's is 1
    for (int32_t r = 0; r < W; r++) {
        say[(size_t) r] = std::exp(-fade * (double) (W - 1 - r));
    }
    std::fill(out, out + T, 0.0f);
    each_window_row(in, view, head, [&](int32_t r, const float * row, float total, size_t sees) {
        kernels().axpy((float) (say[(size_t) r] / ((double) total * group)), row + first, out, sees - first - 1);
    });
    double later = 0.0;  // weight of the queries behind t
    for (int32_t t = T - 1, r = W - 1; t >= 0; t--) {
        out[t] /= (float) std::max(later, 1.0);
        if (r >= 0) {
            later += say[(size_t) r--];
        }
    }
}

void pool(Pooling kind, int32_t kernel, float * x, int32_t n) {
    const int32_t            half = kernel / 2;
    const std::vector<float> in(x, x + n);
    if (kind == Pooling::avg) {
        std::fill_n(x, n, 0.0f);
    }
    for (int32_t o = -half; o <= half; o++) {
        const int32_t first = std::max(0, -o), end = std::min(n, n - o);
        for (int32_t i = first; i < end; i++) {
            const float other = in[(size_t) (i + o)];
            x[i]              = kind == Pooling::max ? std::max(x[i], other) : x[i] + other;
        }
    }
    for (int32_t i = 0; i < n && kind == Pooling::avg; i++) {
        x[i] /= (float) kernel;
    }
}

}  // namespace kvedge
