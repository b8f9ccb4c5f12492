// Two channels are filtered as one complex signal z. Let Z be the frequencies of z. The filtered Z[k] depends on Z[k] and its mirror Z[-k]
// alone, with a real symmetric factor `same` and a factor of the mirror that is the conjugate for -k:
//
// - T has no prime factor above 5: the DCT-II of x is an FFT of T numbers: the even tokens of x, then the odd tokens backwards
//   (Makhoul 1980). With V its frequencies and u = e^(-i pi k / 2T) V[k], C[k] ~ Re u and C[T - k] ~ -Im u. Dropping some C and
//   going back leaves (m[k] + m[T-k]) / 2 V[k] + (m[k] - m[T-k]) / 2 e^(i pi k / T) V[-k], m = 1 for a kept C.
// - Any other T: the projection on the first w cosines is D(i - j) + D(i + j + 1) with the Dirichlet kernel
//   D(n) = sin((w - 1/2) pi n / T) / (2T sin(pi n / 2T)): a convolution of x, and a convolution of x reversed. Both are cyclic,
//   with a longer, convenient length.

#include "primitives/dct.h"

#include "plan/device_rows.h"

#include <algorithm>
#include <cmath>
#include <complex>

namespace kvedge {

namespace {

using Complex = std::complex<double>;

constexpr double PI = 3.14159265358979323846;

int32_t without_small_factors(int32_t n) {
    for (int32_t p : { 2, 3, 5 }) {
        while (n % p == 0) {
            n /= p;
        }
    }
    return n;
}

// Radices of the stages, the largest strides first.
std::vector<int32_t> factorize(int32_t n) {
    std::vector<int32_t> out;
    for (int32_t p : { 5, 3, 8, 4, 2 }) {
        for (; n % p == 0; n /= p) {
            out.push_back(p);
        }
    }
    return out;
}

// Writes the discrete Fourier transform of x[0], x[stride], ... (n numbers) to out [n].
void transform(const Complex * x, size_t stride, const int32_t * radices, size_t n, Complex * out) {
    if (n == 1) {
        out[0] = x[0];
        return;
    }
    const auto R = (size_t) radices[0], m = n / R;
    for (size_t q = 0; q < R; q++) {
        transform(x + q * stride, stride * R, radices + 1, m, out + q * m);
    }
    std::vector<Complex> roots(n);
    for (size_t j = 0; j < n; j++) {
        roots[j] = std::polar(1.0, -2.0 * PI * (double) j / (double) n);
    }
    Complex column[8];
    for (size_t j = 0; j < m; j++) {
        for (size_t q = 0; q < R; q++) {
            column[q] = out[q * m + j];
        }
        for (size_t p = 0; p < R; p++) {
            Complex sum = 0.0;
            for (size_t q = 0; q < R; q++) {
                sum += column[q] * roots[q * (j + p * m) % n];
            }
            out[p * m + j] = sum;
        }
    }
}

}  // namespace

HighPass::HighPass(int32_t n_tokens, double gamma) : T_(n_tokens) {
    const int32_t kept = std::clamp((int32_t) std::floor(gamma * n_tokens + 1e-9), 1, n_tokens);
    all_pass_          = kept == n_tokens;
    if (all_pass_) {
        return;
    }
    int32_t n = T_;
    if (without_small_factors(n) != 1) {
        n = 2 * T_ - 1;
        while (without_small_factors(n) != 1) {
            n++;
        }
    }
    plan_stages(n);
    if (n == T_) {
        mix_transform(kept);
    } else {
        mix_convolution(kept);
    }
    filter_.n_rows  = T_;
    filter_.mixes   = mixes_.data();
    filter_.n_mixes = (int32_t) mixes_.size();
}

void HighPass::plan_stages(int32_t n) {
    n_             = n;
    int32_t length = n;
    for (int32_t radix : factorize(n)) {
        const int32_t m = length / radix;
        twiddles_.emplace_back();
        for (int32_t j = 0; j < m; j++) {
            for (int32_t p = 1; p < radix; p++) {
                const double angle = -2.0 * PI * (double) p * (double) j / (double) length;
                twiddles_.back().push_back((float) std::cos(angle));
                twiddles_.back().push_back((float) std::sin(angle));
            }
        }
        filter_.stages[filter_.n_stages++] = { radix, m, twiddles_.back().data() };
        length                             = m;
    }
    order_.resize((size_t) n);
    for (int32_t k = 0; k < n; k++) {
        int32_t rest = k;
        for (int32_t s = 0; s < filter_.n_stages; s++) {
            order_[(size_t) k] += rest % filter_.stages[s].radix * filter_.stages[s].m;
            rest /= filter_.stages[s].radix;
        }
    }
}

void HighPass::mix_transform(int32_t kept) {
    for (int32_t t = 0; t < T_; t++) {
        place_.push_back(t % 2 == 0 ? t / 2 : T_ - 1 - t / 2);
    }
    for (int32_t k = 0; k <= T_ / 2; k++) {
        const int32_t mirror = k == 0 ? 0 : T_ - k;
        const double  a = k < kept ? 0.5 : 0.0, b = mirror < kept ? 0.5 : 0.0;
        if (a + b > 0.0) {
            const Complex factor = k == 0 ? 0.0 : -(a - b) * std::polar(1.0, PI * (double) k / (double) T_);
            mixes_.push_back({ order_[(size_t) k], order_[(size_t) mirror], (float) (1.0 - a - b), (float) factor.real(),
                               mirror == k ? 0.0f : (float) factor.imag() });
        }
    }
}

void HighPass::mix_convolution(int32_t kept) {
    const auto   n = (size_t) n_, T = (size_t) T_;
    const auto   radices = factorize(n_);
    const auto   kernel  = [&](size_t at) {
        const double w = 2.0 * kept - 1.0;
        if (at == 0) {
            return w / (2.0 * (double) T);
        }
        const size_t phase = (size_t) (2 * kept - 1) * at % (4 * T);
        return std::sin(PI * (double) phase / (2.0 * (double) T)) / (2.0 * (double) T * std::sin(PI * (double) at / (2.0 * (double) T)));
    };
    std::vector<Complex> same(n), mirrored(n), x(n);
    for (size_t at = 0; at < T; at++) {
        x[at] = x[(n - at) % n] = kernel(at);
    }
    transform(x.data(), 1, radices.data(), n, same.data());
    std::fill(x.begin(), x.end(), 0.0);
    for (size_t at = 0; at + 1 < 2 * T; at++) {
        x[at] = kernel(at + 1);
    }
    transform(x.data(), 1, radices.data(), n, mirrored.data());
    for (size_t t = 0; t < T; t++) {
        place_.push_back((int32_t) t);
    }
    for (size_t k = 0; k <= n / 2; k++) {
        const size_t mirror = k == 0 ? 0 : n - k;
        mixes_.push_back({ order_[k], order_[mirror], (float) (1.0 - same[k].real()), (float) -mirrored[k].real(),
                           mirror == k ? 0.0f : (float) -mirrored[k].imag() });
    }
}

// Widens quantised rows into `to`, since their blocks cannot be cut by columns.
std::vector<HighPass::Run> HighPass::plain_runs(std::vector<Run> runs, size_t d, std::vector<float> & to) const {
    to.resize(std::any_of(runs.begin(), runs.end(), [](const Run & run) { return is_quantised(run.rows.type); }) ? (size_t) T_ * d : 0);
    float * next = to.data();
    for (Run & run : runs) {
        if (is_quantised(run.rows.type)) {
            kernels().widen(run.rows, run.n, (int32_t) d, next, d);
            run.rows = { (const uint8_t *) next, d * sizeof(float), Type::f32 };
            next += (size_t) run.n * d;
        }
    }
    return runs;
}

// Returns the rows from column `from` on.
static Rows columns_from(const Rows & rows, size_t from) {
    return { rows.data + from * type_size(rows.type), rows.stride, rows.type };
}

// Returns the pending keys or values that count. counts NULL: all.
std::vector<HighPass::Run> HighPass::runs_of(const HeadView & view, bool values, const uint8_t * counts) {
    std::vector<Run> out;
    for (const Segment & seg : view.pending) {
        const Rows rows = values ? seg.v : seg.k;
        for (int32_t r = 0, end; r < seg.n; r = end) {
            const bool in = !counts || counts[r];
            end           = counts ? r + 1 : seg.n;
            while (end < seg.n && (counts[end] != 0) == in) {
                end++;
            }
            if (in) {
                out.push_back({ rows.from(r), end - r });
            }
        }
        counts = counts ? counts + seg.n : nullptr;
    }
    return out;
}

// Writes columns [from, from + w) of the middle row of T to origin. The first row would be a sink, far from all others.
void HighPass::find_origin(const std::vector<Run> & runs, size_t from, size_t w, float * origin) const {
    int32_t left = T_ / 2;
    for (const Run & run : runs) {
        if (left >= 0 && left < run.n) {
            const Rows rows = columns_from(run.rows, from);
            kernels().to_f32(rows.type, rows.data + (size_t) left * rows.stride, origin, w);
        }
        left -= run.n;
    }
}

void HighPass::add_rows(std::vector<Run> && stored, int32_t width, float * deviation, Work & work, Energy & sum) const {
    constexpr size_t WIDTH = 2 * (size_t) BAND_PAIRS;
    const auto       d = (size_t) width, T = (size_t) T_;
    const auto       runs = plain_runs(std::move(stored), d, work.rows);
    work.squares.assign(T * (size_t) BAND_PAIRS, 0.0f);
    for (size_t from = 0; from < d; from += WIDTH) {
        const size_t w = std::min(WIDTH, d - from);
        work.x.resize((size_t) n_ * WIDTH);
        std::fill(work.x.begin() + (std::ptrdiff_t) (w < WIDTH ? 0 : T * WIDTH), work.x.end(), 0.0f);
        float origin[WIDTH] = {};
        find_origin(runs, from, w, origin);
        const int32_t * place = place_.data();
        for (const Run & run : runs) {
            sum.all += kernels().band_load(columns_from(run.rows, from), run.n, (int32_t) w, place, origin, work.x.data());
            place += run.n;
        }
        kernels().band_filter(filter_, work.x.data(), work.squares.data());
    }
    const double scale = 1.0 / ((double) n_ * (double) n_);
    for (size_t t = 0; t < T; t++) {
        const float * squares = work.squares.data() + (size_t) place_[t] * (size_t) BAND_PAIRS;
        double        part[4] = {};  // independent sums, which need not wait for each other
        for (int32_t i = 0; i < BAND_PAIRS; i++) {
            part[i % 4] += (double) squares[i];
        }
        const double square = (part[0] + part[1]) + (part[2] + part[3]);
        sum.high += square * scale;
        if (deviation) {
            deviation[t] += (float) (square * scale / (double) d);
        }
    }
}

double HighPass::measure(const PendingView & view, int32_t layer, const LayerShape & shape, float * deviation) const {
    Work   work;
    double share = 0.0;
    for (bool values : { false, true }) {
        Energy sum;
        for (int32_t h = 0; h < shape.n_heads_kv && !all_pass_; h++) {
            add_rows(runs_of(view.head(layer, h), values, nullptr), values ? shape.d_v : shape.d_k,
                     deviation ? deviation + (size_t) h * (size_t) T_ : nullptr, work, sum);
        }
        share += sum.all > 0.0 ? sum.high / sum.all : 0.0;
    }
    return share;
}

double HighPass::add_deviation(const HeadView & head, const LayerShape & shape, const uint8_t * counts, float * deviation,
                               Work & work) const {
    if (all_pass_) {
        return 0.0;
    }
    Energy             sum;
    std::vector<float> of_values((size_t) T_, 0.0f);
    add_rows(runs_of(head, false, counts), shape.d_k, deviation, work, sum);
    add_rows(runs_of(head, true, counts), shape.d_v, of_values.data(), work, sum);
    for (size_t t = 0; t < of_values.size(); t++) {
        deviation[t] += of_values[t];
    }
    return mean_root(of_values);
}

}  // namespace kvedge
