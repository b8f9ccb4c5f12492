// The projection on the first w of n cosines, by two products with them: exact, and n * w numbers to send and to keep.

#include "backend/graph/highpass.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

using T = ggml_tensor *;

namespace {

constexpr double PI = 3.14159265358979323846;

int64_t kept_of(int32_t n, double gamma) { return std::clamp((int64_t) std::floor(gamma * n + 1e-9), (int64_t) 1, (int64_t) std::max(n, 1)); }

T product(ggml_context * c, T a, T b) {
    T out = ggml_mul_mat(c, a, b);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    return out;
}

// [kept][n]
void fill_basis(int64_t n, int64_t kept, float * out) {
    std::vector<double> cosines((size_t) (4 * n));  // of a quarter of a step each
    for (size_t i = 0; i < cosines.size(); i++) {
        cosines[i] = std::cos(PI * (double) i / (2.0 * (double) n));
    }
    for (int64_t m = 0; m < kept; m++) {
        const double length = std::sqrt((m == 0 ? 1.0 : 2.0) / (double) n);
        for (int64_t t = 0, at = m; t < n; t++) {
            *out++ = (float) (length * cosines[(size_t) at]);
            at += 2 * m;
            at -= at >= 4 * n ? 4 * n : 0;
        }
    }
}

}  // namespace

GraphHighPass::GraphHighPass(int32_t n_tokens, double gamma) : n_(n_tokens), kept_(kept_of(n_tokens, gamma)) {}

bool GraphHighPass::takes(int32_t n_tokens, double gamma) {
    constexpr int64_t MOST = 4 << 20;  // numbers of the basis
    return n_tokens * kept_of(n_tokens, gamma) <= MOST;
}

void GraphHighPass::prepare(ggml_context * c, Parcel & parcel) {
    if (all_pass()) {
        return;
    }
    basis_ = ggml_new_tensor_2d(c, GGML_TYPE_F32, n_, kept_);
    back_  = ggml_cont(c, ggml_transpose(c, basis_));
    parcel.send<float>(basis_, [this](float * to) { fill_basis(n_, kept_, to); });
}

T GraphHighPass::deviation(ggml_context * c, T rows) const {
    const int64_t d = rows->ne[0], heads = rows->ne[2];
    // less the middle row: a part that all rows have would be rounded with them
    T origin = ggml_view_3d(c, rows, d, 1, heads, rows->nb[1], rows->nb[2], (size_t) (n_ / 2) * rows->nb[1]);
    T x      = ggml_reshape_2d(c, ggml_cont(c, ggml_transpose(c, ggml_sub(c, rows, origin))), n_, d * heads);
    T high   = ggml_sub(c, x, product(c, back_, product(c, basis_, x)));
    return ggml_pool_2d(c, ggml_reshape_3d(c, ggml_sqr(c, high), n_, d, heads), GGML_OP_POOL_AVG, 1, (int) d, 1, (int) d, 0, 0);
}

}  // namespace kvedge
