#include "device/looks.h"

#include "kernels/kernels.h"

#include <algorithm>
#include <cmath>
#include <functional>

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
    const auto times = [&](T q) {
        T products = ggml_mul_mat(c, keys, q);
        ggml_prec_set_acc(products, GGML_PREC_F32);
        return products;
    };
    T both   = in.low ? nullptr : times(ggml_cast(c, in.queries, GGML_TYPE_F32));
    T logits = in.low ? ggml_add(c, times(in.queries), times(in.low)) : ggml_add(c, half(both, 0), half(both, 1));
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

float factor_of(const Bulk<float> & queries) {
    constexpr int TOP = 10;  // the largest is brought to 2^TOP, so that what is left of it is a normal number in half precision
    float         most = 0.0f;
    int           exponent = 0;
    for (const float x : queries) {
        most = std::max(most, std::fabs(x));
    }
    std::frexp(most, &exponent);
    return most > 0.0f && std::isfinite(most) ? std::ldexp(1.0f, TOP - exponent) : 1.0f;
}

void split_queries(const WindowQueries & in, const std::vector<int32_t> & heads, int32_t group, ggml_fp16_t * out) {
    const auto         d = (size_t) in.d, half = (size_t) group * (size_t) in.n_window * d;
    std::vector<float> x(d), rounded(d);
    for (const int32_t head : heads) {
        for (int32_t h = head * group; h < (head + 1) * group; h++) {
            for (int32_t w = 0; w < in.n_window; w++, out += d) {
                const float * from = in.q + (size_t) (w * in.n_heads + h) * d;
                std::transform(from, from + d, x.begin(), [&](float v) { return v * in.factor; });
                kernels().from_f32(Type::f16, x.data(), (uint8_t *) out, d);
                kernels().to_f32(Type::f16, (const uint8_t *) out, rounded.data(), d);
                std::transform(x.begin(), x.end(), rounded.begin(), x.begin(), std::minus<float>());
                kernels().from_f32(Type::f16, x.data(), (uint8_t *) (out + half), d);
            }
        }
        out += half;
    }
}

Halves split(ggml_context * c, T x) {
    x      = ggml_scale(c, x, RING_FACTOR);
    T high = ggml_cast(c, ggml_cast(c, x, GGML_TYPE_F16), GGML_TYPE_F32);
    return { high, ggml_cast(c, ggml_cast(c, ggml_sub(c, x, high), GGML_TYPE_F16), GGML_TYPE_F32) };
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
