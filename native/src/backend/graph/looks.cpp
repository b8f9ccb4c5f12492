#include "backend/graph/looks.h"

#include <algorithm>
#include <cmath>

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
    const auto    half = [&](T x, int64_t i) {
        return ggml_view_3d(c, x, N, W * G, heads, x->nb[1], x->nb[2], (size_t) (i * W * G) * x->nb[1]);
    };
    T products = ggml_mul_mat(c, keys, ggml_cast(c, in.queries, GGML_TYPE_F32));
    ggml_prec_set_acc(products, GGML_PREC_F32);
    T     logits = ggml_add(c, half(products, 0), half(products, 1));
    float scale  = in.scale;
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

float split_queries(const float * q, int64_t W, int64_t H, int64_t Hkv, int64_t d, ggml_fp16_t * out) {
    constexpr int TOP = 10;  // the largest is brought to 2^TOP, so that what is left of it is a normal number in half precision
    float         most = 0.0f;
    for (int64_t i = 0; i < W * H * d; i++) {
        most = std::max(most, std::fabs(q[i]));
    }
    int exponent = 0;
    std::frexp(most, &exponent);
    const float   factor = most > 0.0f && std::isfinite(most) ? std::ldexp(1.0f, TOP - exponent) : 1.0f;
    const int64_t G      = H / Hkv;
    for (int64_t h = 0; h < H; h++) {
        for (int64_t w = 0; w < W; w++) {
            const float * from = q + (w * H + h) * d;
            ggml_fp16_t * high = out + (((h / G * 2) * G + h % G) * W + w) * d, *low = high + G * W * d;
            for (int64_t i = 0; i < d; i++) {
                const float x = from[i] * factor;
                high[i]       = ggml_fp32_to_fp16(x);
                low[i]        = ggml_fp32_to_fp16(x - ggml_fp16_to_fp32(high[i]));
            }
        }
    }
    return 1.0f / factor;
}

T squares(ggml_context * c, T rows) { return ggml_sum_rows(c, ggml_sqr(c, rows)); }

Directions directions(ggml_context * c, T keys, T counts, bool unit) {
    constexpr float SHORTEST = 1e-12f;  // a shorter key points nowhere
    const int64_t   n = keys->ne[1], d = keys->ne[0], heads = keys->ne[2];
    T               units   = ggml_l2_norm(c, keys, SHORTEST);
    T               columns = ggml_cont(c, ggml_transpose(c, unit ? units : keys));
    T sum = counts ? ggml_mul_mat(c, ggml_reshape_2d(c, columns, n, d * heads), counts) : ggml_sum_rows(c, columns);
    T products = ggml_mul_mat(c, units, ggml_reshape_3d(c, sum, d, 1, heads));
    ggml_prec_set_acc(products, GGML_PREC_F32);
    return { sum, products };
}

}  // namespace kvedge
