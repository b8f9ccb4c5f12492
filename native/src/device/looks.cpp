#include "device/looks.h"

#include "device/tensors.h"

namespace kvedge {

using T = ggml_tensor *;

namespace {

// [n, rows, ...] averaged, or the largest taken, over `count` rows at a time.
T over_rows(ggml_context * c, T x, ggml_op_pool how, int64_t count) {
    return ggml_pool_2d(c, x, how, 1, (int) count, 1, (int) count, 0, 0);
}

}  // namespace

T vote(ggml_context * c, T keys, const VoteInputs & in) {
    const int64_t N = keys->ne[1], heads = keys->ne[2], W = in.n_window, G = in.group;
    T             logits = ggml_add(c, product(c, keys, in.queries.high), product(c, keys, in.queries.low));
    float         scale  = in.scale;
    if (in.softcap != 0.0f) {
        logits = ggml_tanh(c, ggml_scale(c, logits, scale / in.softcap));
        scale  = in.softcap;
    }
    // sinks want the query heads on dimension 2, a mask for each head wants the heads alone on dimension 3
    logits    = in.sinks ? ggml_reshape_3d(c, logits, N, W, G * heads) : ggml_reshape_4d(c, logits, N, W, G, heads);
    T weights = ggml_soft_max_ext(c, logits, in.mask, scale, 0.0f);
    if (in.sinks) {
        ggml_soft_max_add_sinks(weights, in.sinks);
    }
    const size_t row  = weights->nb[1], before = (size_t) (N - in.n_tokens) * sizeof(float);
    T            seen = ggml_view_3d(c, weights, in.n_tokens, W, G * heads, row, (size_t) W * row, before);
    if (in.weights) {
        seen = ggml_mul(c, seen, in.weights);
    } else if (before > 0) {
        seen = ggml_cont(c, seen);
    }
    seen = ggml_reshape_3d(c, seen, in.n_tokens, W * G, heads);
    T mean = over_rows(c, seen, GGML_OP_POOL_AVG, in.largest ? W : W * G);
    return in.largest && G > 1 ? over_rows(c, mean, GGML_OP_POOL_MAX, G) : mean;
}

Halves split(ggml_context * c, T x, float factor) {
    x      = ggml_scale(c, x, factor);
    T high = ggml_cast(c, ggml_cast(c, x, GGML_TYPE_F16), GGML_TYPE_F32);
    return { high, ggml_cast(c, ggml_cast(c, ggml_sub(c, x, high), GGML_TYPE_F16), GGML_TYPE_F32) };
}

Directions directions(ggml_context * c, T keys, T counts, bool unit) {
    constexpr float SHORTEST = 1e-12f;  // a shorter key points nowhere
    const int64_t   n = keys->ne[1], d = keys->ne[0], heads = keys->ne[2];
    T               units   = ggml_l2_norm(c, keys, SHORTEST);
    T               columns = ggml_cont(c, ggml_transpose(c, unit ? units : keys));
    T sum = counts ? ggml_mul_mat(c, ggml_reshape_2d(c, columns, n, d * heads), counts) : ggml_sum_rows(c, columns);
    return { sum, product(c, units, ggml_reshape_3d(c, sum, d, 1, heads)) };
}

}  // namespace kvedge
