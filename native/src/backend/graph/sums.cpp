// What a prompt's attention adds up to (H2O, LOOK-M eq. 4), where the layer lies: a graph of our own computes the attention
// once more after llama.cpp's has run, as many queries at a time as a matrix of some size takes, since flash attention has no
// weights to look at.

#include "backend/graph/rows.h"

#include <algorithm>

namespace kvedge {

using T = ggml_tensor *;

namespace {

constexpr int64_t MATRIX = 32 << 20;  // bytes of the weights that exist at a time

// x [a, b, c] summed over b: [a, 1, c].
T sum_over_second(ggml_context * c, T x) {
    T sum = ggml_sum_rows(c, ggml_cont(c, ggml_transpose(c, x)));
    return ggml_reshape_3d(c, sum, x->ne[0], 1, x->ne[2]);
}

T plus(ggml_context * c, T sum, T x) { return sum ? ggml_add(c, sum, x) : x; }

std::vector<float> read(T x) {
    std::vector<float> out(x ? (size_t) ggml_nelements(x) : 0);
    if (x) {
        ggml_backend_tensor_get(x, out.data(), 0, ggml_nbytes(x));
    }
    return out;
}

}  // namespace

struct GraphRows::SumGraph {
    GgmlContext   context;
    ggml_cgraph * graph   = nullptr;
    T             columns = nullptr, squares = nullptr, entropy = nullptr;

    // Of the weights a [shown, n, H], of which the rows [first, first + rows) count.
    void add(T a, int64_t first, int64_t rows, int64_t n_heads_kv, const Summed & wanted) {
        ggml_context * c     = context.get();
        const int64_t  shown = a->ne[0], n = a->ne[1], share = a->ne[2] / n_heads_kv;
        const size_t   head  = (size_t) share * a->nb[2];
        const size_t   at    = (size_t) first * sizeof(float);
        if (wanted.columns) {
            columns = plus(c, columns, sum_over_second(c, ggml_view_3d(c, a, rows, n * share, n_heads_kv, a->nb[1], head, at)));
        }
        if (wanted.squares) {
            T sum = nullptr;
            for (int64_t g = 0; g < share; g++) {
                T one = ggml_view_3d(c, a, rows, n, n_heads_kv, a->nb[1], head, at + (size_t) g * a->nb[2]);
                sum   = sum ? ggml_add(c, sum, one) : ggml_cont(c, one);
            }
            squares = plus(c, squares, sum_over_second(c, ggml_mul(c, sum, sum)));
        }
        if (wanted.entropy) {
            constexpr float NEVER_ZERO = 1e-30f;  // less than any weight that counts
            T               terms      = ggml_mul(c, a, ggml_log(c, ggml_scale_bias(c, a, 1.0f, NEVER_ZERO)));
            entropy = plus(c, entropy, ggml_sum_rows(c, ggml_reshape_2d(c, terms, shown * n * share, n_heads_kv)));
        }
    }

    void end() {
        for (T x : { columns, squares, entropy }) {
            if (x) {
                ggml_set_output(x);
                ggml_build_forward_expand(graph, x);
            }
        }
    }
};

// Of n queries that look at the first `shown` slots.
GraphRows::SumGraph GraphRows::sum_graph(size_t l, float scale, int32_t n, int32_t shown, int32_t first, int32_t rows) const {
    const LayerShape & shape  = (*shapes_)[l];
    const Layer &      layer  = layers_[l];
    const Group &      group  = layer.groups[0];
    const T            masks  = inputs_[layer.inputs].mask;
    const int64_t      a_time = std::clamp<int64_t>(MATRIX / ((int64_t) sizeof(float) * shown * shape.n_heads), 1, n);
    const size_t       nodes  = (size_t) ((n + a_time - 1) / a_time) * (size_t) (40 + 2 * shape.n_heads / shape.n_heads_kv);

    SumGraph out;
    out.context      = make_context(nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes, false));
    ggml_context * c = out.context.get();
    out.graph        = ggml_new_graph_custom(c, nodes, false);
    T keys           = ggml_view_3d(c, group.k, shape.d_k, shown, shape.n_heads_kv, group.k->nb[1], group.k->nb[2], 0);
    for (int64_t t = 0; t < n; t += a_time) {
        const int64_t m    = std::min(a_time, n - t);
        const size_t  row  = (size_t) shown * sizeof(ggml_fp16_t);
        T             mask = ggml_view_2d(c, masks, shown, m, row, (size_t) t * row);
        T q = ggml_view_3d(c, layer.queries, shape.d_k, shape.n_heads, m, layer.queries->nb[1], layer.queries->nb[2],
                           (size_t) t * layer.queries->nb[2]);
        T a = attention_weights(c, ggml_permute(c, q, 0, 2, 1, 3), keys, mask, scale, shape.softcap);
        out.add(a, first, rows, shape.n_heads_kv, summed_);
    }
    out.end();
    return out;
}

bool GraphRows::make_sums(int32_t n, int32_t n_threads) {
    const int32_t shown = visible_after(n);
    for (size_t l = 0; l < layers_.size() && summed_.any(); l++) {
        if (!layers_[l].device) {
            continue;
        }
        const SumGraph sums = sum_graph(l, 1.0f, n, shown, 0, shown);
        if (!inputs_[layers_[l].inputs].worker.make_room(layers_[l].device, sums.graph, n_threads)) {
            return refuse(layers_[l].device);
        }
    }
    return true;
}

bool GraphRows::sum_attention(size_t l, float scale, int32_t rows, AttentionSums & out) {
    const SumGraph sums = sum_graph(l, scale, n_, visible(), layers_[l].groups[0].used[0] - rows, rows);
    if (!inputs_[layers_[l].inputs].worker.compute(sums.graph)) {
        return refuse(layers_[l].device);
    }
    out = { read(sums.columns), read(sums.squares), read(sums.entropy) };
    return true;
}

}  // namespace kvedge
