#include "primitives/dct.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

LowPass::LowPass(int32_t n_tokens, double gamma) : T_(n_tokens) {
    const int32_t kept = std::clamp((int32_t) std::floor(gamma * n_tokens + 1e-9), 1, n_tokens);
    all_pass_          = kept == n_tokens;
    n_                 = all_pass_ ? 0 : kept - 1;
    const auto T = (size_t) T_, n = (size_t) n_;
    forward_.resize(n * T);
    backward_.resize(n * T);
    // cos(pi / T * m * (i + 1/2)) depends on m * (2 i + 1) modulo 4 T alone.
    std::vector<double> wave(4 * T);
    for (size_t j = 0; j < wave.size(); j++) {
        wave[j] = std::cos(3.14159265358979323846 * (double) j / (2.0 * (double) T));
    }
    for (size_t m = 0; m < n; m++) {
        for (size_t i = 0; i < T; i++) {
            const auto b        = (float) (std::sqrt(2.0 / (double) T) * wave[(m + 1) * (2 * i + 1) % (4 * T)]);
            forward_[m * T + i] = backward_[i * n + m] = b;
        }
    }
}

// The zeroth frequency is the mean; taking it away first and in double leaves a constant signal exactly zero.
static void subtract_means(std::vector<float> & x, size_t T, size_t ld) {
    for (size_t c = 0; c < ld; c++) {
        double sum = 0.0;
        for (size_t t = 0; t < T; t++) {
            sum += (double) x[t * ld + c];
        }
        for (size_t t = 0; t < T; t++) {
            x[t * ld + c] = (float) ((double) x[t * ld + c] - sum / (double) T);
        }
    }
}

void LowPass::take_away(std::vector<float> & x, int32_t d) const {
    const auto ld = (size_t) pad16(d);
    if (all_pass_) {
        std::fill(x.begin(), x.end(), 0.0f);
        return;
    }
    subtract_means(x, (size_t) T_, ld);
    if (n_ == 0) {
        return;
    }
    std::vector<float> low((size_t) n_ * ld, 0.0f), base(x.size(), 0.0f);
    kernels().gemm_pv(forward_.data(), (size_t) T_, n_, T_, x.data(), ld, d, low.data());
    kernels().gemm_pv(backward_.data(), (size_t) n_, T_, n_, low.data(), ld, d, base.data());
    kernels().axpy(-1.0f, base.data(), x.data(), x.size());
}

void widen_pending(const Sequence & seq, int32_t layer, int32_t head, bool values, std::vector<float> & out) {
    const LayerShape & shape = seq.shapes()[(size_t) layer];
    const auto         d = (size_t) (values ? shape.d_v : shape.d_k), ld = (size_t) pad16((int32_t) d);
    out.assign((size_t) seq.pending_length() * ld, 0.0f);
    float * to = out.data();
    seq.each_segment(layer, head, true, [&](const Segment & seg) {
        const Rows & rows = values ? seg.v : seg.k;
        for (int32_t r = 0; r < seg.n; r++, to += ld) {
            kernels().to_f32(rows.type, rows.data + (size_t) r * rows.stride, to, d);
        }
    });
}

}  // namespace kvedge
