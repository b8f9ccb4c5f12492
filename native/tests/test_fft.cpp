// Compares the band filter of every kernel table that this machine can run with Fourier sums in double precision.

#include "kernels/kernels.h"
#include "check.h"

#include <algorithm>
#include <complex>
#include <random>
#include <vector>

using namespace kvedge;

using Complex = std::complex<double>;

static const double TURN = 2.0 * std::acos(-1.0);

struct Plan {
    BandFilter                      filter{};
    std::vector<std::vector<float>> twiddles;
    std::vector<int32_t>            place;  // row of each frequency

    explicit Plan(const std::vector<int32_t> & radices) {
        int32_t n = 1;
        for (int32_t r : radices) {
            n *= r;
        }
        place.assign((size_t) n, 0);
        filter.n_rows = n;
        int32_t length = n, below = 1;
        for (int32_t radix : radices) {
            const int32_t m = length / radix;
            twiddles.emplace_back();
            for (int32_t j = 0; j < m; j++) {
                for (int32_t p = 1; p < radix; p++) {
                    twiddles.back().push_back((float) std::cos(TURN * p * j / length));
                    twiddles.back().push_back((float) -std::sin(TURN * p * j / length));
                }
            }
            for (int32_t k = 0; k < n; k++) {
                place[(size_t) k] += k / below % radix * m;
            }
            filter.stages[filter.n_stages++] = { radix, m, twiddles.back().data() };
            length = m;
            below *= radix;
        }
    }
};

// Filters random rows: mixes frequency k with its mirror frequency by m, removes the constant part, and compares with Fourier sums.
static void test_filter(const Kernels & kn, const std::vector<int32_t> & radices, int32_t k, BandMix m) {
    Plan              plan(radices);
    const int32_t     n = plan.filter.n_rows, mirror = (n - k) % n;
    const BandMix     mixes[] = { { plan.place[0], plan.place[0], 0.0f, 0.0f, 0.0f },
                                  { plan.place[(size_t) k], plan.place[(size_t) mirror], m.same, m.re, k == mirror ? 0.0f : m.im } };
    const Complex     factor(mixes[1].re, mixes[1].im);
    constexpr int32_t PAIRS = BAND_PAIRS;
    plan.filter.mixes       = mixes;
    plan.filter.n_mixes     = k == 0 ? 1 : 2;

    std::mt19937                    rng(5);
    std::normal_distribution<float> normal(3.0f, 1.0f);
    std::vector<float>              given((size_t) (n * 2 * PAIRS)), squares((size_t) (n * PAIRS), 1.0f);
    double                          energy = 0.0;
    for (float & v : given) {
        v = normal(rng);
        energy += (double) v * v;
    }
    // each channel has its own origin; the origin changes only the constant part, which the filter removes
    std::vector<float>   origin(given.begin(), given.begin() + 2 * PAIRS), loaded(given.size());
    std::vector<int32_t> order;
    for (int32_t t = 0; t < n; t++) {
        order.push_back(t);
    }
    const Rows rows{ (const uint8_t *) given.data(), 2 * PAIRS * sizeof(float), Type::f32 };
    CHECK(close_to(kn.band_load(rows, n, 2 * PAIRS, order.data(), origin.data(), loaded.data()), energy, 1e-6));
    CHECK(std::all_of(loaded.begin(), loaded.begin() + 2 * PAIRS, [](float v) { return v == 0.0f; }));
    kn.band_filter(plan.filter, loaded.data(), squares.data());
    for (int32_t c = 0; c < PAIRS; c++) {
        std::vector<Complex> z((size_t) n), Z((size_t) n);
        for (int32_t t = 0; t < n; t++) {
            z[(size_t) t] = { given[(size_t) (t * 2 * PAIRS + c)], given[(size_t) (t * 2 * PAIRS + PAIRS + c)] };
        }
        for (int32_t f = 1; f < n; f++) {
            for (int32_t t = 0; t < n; t++) {
                Z[(size_t) f] += z[(size_t) t] * std::polar(1.0, -TURN * f * t / n);
            }
        }
        if (k != 0) {
            const Complex a = Z[(size_t) k], b = Z[(size_t) mirror];
            Z[(size_t) k]      = (double) m.same * a + factor * b;
            Z[(size_t) mirror] = (double) m.same * b + std::conj(factor) * a;
        }
        for (int32_t t = 0; t < n; t++) {
            Complex back = 0.0;
            for (int32_t f = 0; f < n; f++) {
                back += Z[(size_t) f] * std::polar(1.0, TURN * f * t / n);
            }
            CHECK(std::fabs(squares[(size_t) (t * PAIRS + c)] - 1.0 - std::norm(back)) <= 1e-5 * n * n + 1e-5 * std::norm(back));
        }
    }
}

int main() {
    const std::vector<std::vector<int32_t>> sizes = { { 2 },    { 3 },       { 4 },       { 5 },       { 8 },         { 2, 3 },
                                                      { 5, 8 }, { 3, 5, 2 }, { 3, 3, 8 }, { 5, 4, 4 }, { 2, 2, 2, 5 } };
    for (const Kernels * t : runnable_kernels()) {
        for (size_t i = 0; i < sizes.size(); i++) {
            test_filter(*t, sizes[i], 0, {});
            test_filter(*t, sizes[i], 1, { 0, 0, 0.0f, 0.0f, 0.0f });
            test_filter(*t, sizes[i], 2 % Plan(sizes[i]).filter.n_rows, { 0, 0, 0.5f, 0.25f, -0.75f });
        }
    }
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
