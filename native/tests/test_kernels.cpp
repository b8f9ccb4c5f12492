// Compares every kernel table that this machine can run with plain loops in double precision.

#include "kernels/kernels.h"
#include "kernels/quantise.h"
#include "check.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

using namespace kvedge;

static std::mt19937 rng(7);

static std::vector<Type> quantised_types() {
    std::vector<Type> out;
    for (int32_t i = 0; FORMATS.of[i].name; i++) {
        const Type t = (Type) i;
        if (is_quantised(t)) {
            out.push_back(t);
        }
        if (of_keys(t) != t) {
            out.push_back(of_keys(t));
        }
    }
    return out;
}

static std::vector<float> random_floats(size_t n, float scale = 1.0f) {
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float>              x(n);
    for (auto & v : x) {
        v = normal(rng);
    }
    return x;
}

static std::vector<uint8_t> stored(const Kernels & kn, Type type, const std::vector<float> & x) {
    std::vector<uint8_t> out(x.size() * type_size(type));
    kn.from_f32(type, x.data(), out.data(), x.size());
    return out;
}

static std::vector<float> widened(const Kernels & kn, Type type, const std::vector<uint8_t> & x) {
    std::vector<float> out(x.size() / type_size(type));
    kn.to_f32(type, x.data(), out.data(), out.size());
    return out;
}

static void test_conversion(const Kernels & kn) {
    // every half-precision value survives the conversion to f32 and back
    std::vector<uint16_t> halves;
    for (uint32_t h = 0; h < 0x10000; h++) {
        if ((h & 0x7c00) != 0x7c00) {
            halves.push_back((uint16_t) h);
        }
    }
    for (Type type : { Type::f16, Type::bf16 }) {
        std::vector<float>    wide(halves.size());
        std::vector<uint16_t> back(halves.size());
        kn.to_f32(type, halves.data(), wide.data(), halves.size());
        kn.from_f32(type, wide.data(), back.data(), halves.size());
        CHECK(back == halves);
    }
    // rounding is to nearest, ties to even, in the vector part and in the scalar part of a row
    const float values[] = { 1.0f + 1.0f / 2048, 1.0f + 3.0f / 2048, 65519.0f, 65520.0f, 1e-8f, 5.9e-8f, -2.98e-8f, 6.1e-5f };
    for (float v : values) {
        std::vector<float>    row(33, v);
        std::vector<uint16_t> out(33);
        kn.from_f32(Type::f16, row.data(), out.data(), row.size());
        uint16_t expected;
        kernels_generic()->from_f32(Type::f16, &v, &expected, 1);
        for (uint16_t h : out) {
            CHECK(h == expected);
        }
    }
}

static void test_products(const Kernels & kn, Type type, int32_t m, int32_t n, int32_t d) {
    const auto q = random_floats((size_t) m * (size_t) d);
    const auto k = stored(kn, type, random_floats((size_t) n * (size_t) d));
    const auto w = widened(kn, type, k);
    const Rows rows{ k.data(), (size_t) d * type_size(type), type };

    const auto         panel = (size_t) kn.panel;
    const size_t       lds   = ((size_t) n + panel - 1) / panel * panel;
    std::vector<float> packed(lds * (size_t) d), s((size_t) m * lds), s2((size_t) m * lds);
    kn.pack(rows, n, d, packed.data());
    kn.gemm_qk({ q.data(), (size_t) d }, m, packed.data(), n, d, { s.data(), lds });
    kn.rows_dot({ q.data(), (size_t) d }, m, rows, n, d, { s2.data(), lds }, k.data());
    const auto         ld = (size_t) pad16(d);
    std::vector<float> v(ld * (size_t) n, 0.0f), o((size_t) m * ld, 0.5f), o2((size_t) m * ld, 0.5f);
    for (int32_t r = 0; r < m; r++) {  // a query row gives the same bits as when it is computed alone
        std::vector<float> alone(lds), o1(ld, 0.5f), all(ld * (size_t) m, 0.5f);
        kn.rows_dot({ q.data() + (size_t) r * (size_t) d, (size_t) d }, 1, rows, n, d, { alone.data(), lds }, nullptr);
        CHECK(std::memcmp(alone.data(), s2.data() + (size_t) r * lds, (size_t) n * sizeof(float)) == 0);
        kn.rows_axpy({ s.data() + (size_t) r * lds, lds }, 1, rows, n, d, { o1.data(), ld }, nullptr);
        kn.rows_axpy({ s.data(), lds }, m, rows, n, d, { all.data(), ld }, nullptr);
        CHECK(std::memcmp(o1.data(), all.data() + (size_t) r * ld, (size_t) d * sizeof(float)) == 0);
    }
    for (int32_t c = 0; c < n; c++) {
        std::memcpy(v.data() + (size_t) c * ld, w.data() + (size_t) c * (size_t) d, (size_t) d * sizeof(float));
    }
    kn.gemm_pv({ s.data(), lds }, m, n, { v.data(), ld }, d, o.data());
    kn.rows_axpy({ s.data(), lds }, m, rows, n, d, { o2.data(), ld }, nullptr);

    for (int32_t r = 0; r < m; r++) {
        std::vector<double> expected((size_t) d, 0.5), size((size_t) d, 1.0);  // size: sum of magnitudes, as terms may cancel
        for (int32_t c = 0; c < n; c++) {
            double dot = 0.0;
            for (int32_t i = 0; i < d; i++) {
                dot += (double) q[(size_t) (r * d + i)] * w[(size_t) (c * d + i)];
            }
            const float got = s[(size_t) r * lds + (size_t) c];
            CHECK(close_to(got, dot, 1e-5));
            CHECK(close_to(s2[(size_t) r * lds + (size_t) c], dot, 1e-5));
            for (int32_t i = 0; i < d; i++) {
                const double term = (double) got * w[(size_t) (c * d + i)];
                expected[(size_t) i] += term;
                size[(size_t) i] += std::fabs(term);
            }
        }
        for (int32_t i = 0; i < d; i++) {
            CHECK(std::fabs(o[(size_t) r * ld + (size_t) i] - expected[(size_t) i]) <= 1e-6 * size[(size_t) i]);
            CHECK(std::fabs(o2[(size_t) r * ld + (size_t) i] - expected[(size_t) i]) <= 1e-6 * size[(size_t) i]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Quantised rows, decoded bit by bit

static double half(const uint8_t * p) {
    float f;
    kernels_generic()->to_f32(Type::f16, p, &f, 1);
    return f;
}

static double code_at(Type type, const uint8_t * codes, int32_t i) {
    double out = 0.0;
    with_type(type, [&](auto of) {
        if constexpr (is_quantised(of.value)) {
            out = Traits<of.value>::code(codes, i);
        }
    });
    return out;
}

// Returns value i of row r. step: the distance between two neighbouring values that the group or block can represent.
static double decoded(Type type, const std::vector<uint8_t> & data, int32_t d, int32_t r, int32_t i, double & step) {
    const int32_t b = i / 32;
    if (is_grouped(type)) {
        const uint8_t * group = data.data() + (size_t) (r / 32) * 32 * row_bytes(type, d);
        const uint8_t * codes = group + 4 * d + (size_t) (r % 32 * (d / 32) + b) * code_bytes(type);
        step                  = half(group + 2 * i);
        return step * code_at(type, codes, i % 32) + half(group + 2 * d + 2 * i);
    }
    const uint8_t * block = data.data() + (size_t) r * row_bytes(type, d) + (size_t) b * block_bytes(type);
    step                  = std::fabs(half(block));
    return half(block) * code_at(type, block + code_offset(type), i % 32) + (has_minimum(type) ? half(block + 2) : 0.0);
}

static std::vector<uint8_t> quantised(Type type, const std::vector<float> & x, int32_t n, int32_t d) {
    std::vector<uint8_t> out((size_t) ((n + 31) / 32 * 32) * row_bytes(type, d));
    for (int32_t r = 0; r < n; r += is_grouped(type) ? 32 : 1) {
        const float * row = x.data() + (size_t) r * (size_t) d;
        uint8_t *     to  = out.data() + (size_t) r * row_bytes(type, d);
        if (is_grouped(type)) {
            quantise_group(type, row, std::min(32, n - r), d, to);
        } else {
            quantise_row(type, row, d, to);
        }
    }
    return out;
}

static void test_rounding(Type type) {
    const int32_t n = 77, d = 96;
    auto          x = random_floats((size_t) (n * d), 3.0f);
    std::fill(x.begin(), x.begin() + 32, 0.0f);         // a block without a scale
    std::fill(x.begin() + 32, x.begin() + 64, -1.25f);  // a block of equal numbers
    for (int32_t r = 0; r < n; r++) {
        x[(size_t) (r * d + 95)] = 0.75f;  // a channel of equal numbers
    }
    const auto data = quantised(type, x, n, d);
    for (int32_t r = 0; r < n; r++) {
        for (int32_t i = 0; i < d; i++) {
            double       step = 0.0;
            const double got = decoded(type, data, d, r, i, step), was = x[(size_t) (r * d + i)];
            // allowed error: half a step, but a whole step at the end that q4_0 and similar types have no code for; 2^-11 of the scale or
            // minimum; for tq3, half of the widest gap between levels, and the part beyond the last level
            const double beyond = type == Type::tq3 ? std::max(0.0, std::fabs(was) - 26.0 * step) / std::max(step, 1e-30) : 0.0;
            const double most   = type == Type::tq3 ? 5.0 + beyond : format(type).highest < -format(type).lowest ? 1.0 : 0.5;
            CHECK(std::fabs(got - was) <= most * step + 16.0 * (step + std::fabs(was)) / 2048.0);
            CHECK(step > 0.0 || std::fabs(got - was) <= std::fabs(was) / 2048.0);
        }
    }
    // quantising the decoded values again gives the same values, except for the rounding of scales to half precision
    std::vector<float> wide((size_t) (n * d));
    kernels().widen({ data.data(), row_bytes(type, d), type }, n, d, wide.data(), (size_t) d);
    const auto         again = quantised(type, wide, n, d);
    for (int32_t r = 0; r < n; r++) {
        for (int32_t i = 0; i < d; i++) {
            double       step = 0.0;
            const double was = decoded(type, data, d, r, i, step), now = decoded(type, again, d, r, i, step);
            CHECK(std::fabs(now - was) <= 16.0 * step / 1024.0);
        }
    }
}

// Codes of 3 bits: a block of 32 codes is 8 lanes of 12 bits; code i is in lane i % 8, at bit 3 * (i / 8).
static void test_levels() {
    const int levels[] = { -26, -16, -9, -3, 3, 9, 16, 26 };
    for (int32_t shift = 0; shift < 8; shift++) {
        uint8_t codes[32], packed[12];
        float   wide[32];
        for (int32_t i = 0; i < 32; i++) {
            codes[i] = (uint8_t) ((i * 5 + i / 8 + shift) % 8);
        }
        Traits<Type::tq3>::pack(codes, packed);
        std::vector<uint8_t> block(14);
        uint16_t             scale;
        put_half(0.5f, scale);
        std::memcpy(block.data(), &scale, 2);
        std::memcpy(block.data() + 2, packed, 12);
        for (const Kernels * t : runnable_kernels()) {
            t->widen({ block.data(), 14, Type::tq3 }, 1, 32, wide, 32);
            for (int32_t i = 0; i < 32; i++) {
                int32_t code = 0;
                for (int32_t b = 0; b < 3; b++) {
                    const int32_t at = i % 8 * 12 + i / 8 * 3 + b;
                    code += (packed[at / 8] >> at % 8 & 1) << b;
                }
                CHECK(code == codes[i] && wide[i] == 0.5f * (float) levels[code]);
            }
        }
    }
}

// Returns the allowed error of a sum. Kernels with fast integer products round query rows and weights to 16 bits: a term is off by
// 2^-16 of the largest number of its block, which is also part of the sum.
static double tolerance(const Kernels & kn, Type type, int32_t m) {
    const bool x86 = &kn == kernels_avx512vnni() && type == Type::q8_0 && m > 1 && m <= 16;
    const bool arm = (&kn == kernels_neondot() || &kn == kernels_neoni8mm()) && (type == Type::q8_0 || type == Type::q4_0) && m <= 16;
    return x86 || arm ? 1e-4 : 1e-6;
}

static void test_quantised(const Kernels & kn, Type type, int32_t m, int32_t n, int32_t d, int32_t skip) {
    const auto q    = random_floats((size_t) m * (size_t) d);
    const auto data = quantised(type, random_floats((size_t) (n + skip) * (size_t) d), n + skip, d);
    const Rows rows = Rows{ data.data(), row_bytes(type, d), type }.from(skip);

    const auto          ld = (size_t) pad16(d) + 16, panel = (size_t) kn.panel;
    const size_t        lds = ((size_t) n + panel - 1) / panel * panel;
    std::vector<float>  wide((size_t) n * ld), packed(lds * (size_t) d), s((size_t) m * lds), o((size_t) m * ld, 0.5f);
    std::vector<double> exact((size_t) n * (size_t) d);
    kn.widen(rows, n, d, wide.data(), ld);
    kn.pack(rows, n, d, packed.data());
    for (int32_t c = 0; c < n; c++) {
        for (int32_t i = 0; i < d; i++) {
            double       step = 0.0;
            const double x    = decoded(type, data, d, skip + c, i, step);
            exact[(size_t) (c * d + i)] = x;
            CHECK(close_to(wide[(size_t) c * ld + (size_t) i], x, 1e-6));
            const auto p = (size_t) c / panel;
            CHECK(close_to(packed[(p * (size_t) d + (size_t) i) * panel + (size_t) c % panel], x, 1e-6));
        }
    }
    kn.rows_dot({ q.data(), (size_t) d }, m, rows, n, d, { s.data(), lds }, rows.data);
    for (int32_t r = 0; r < m; r++) {
        for (int32_t c = 0; c < n; c++) {
            double dot = 0.0, size = 1.0;
            for (int32_t i = 0; i < d; i++) {
                const double term = (double) q[(size_t) (r * d + i)] * exact[(size_t) (c * d + i)];
                dot += term;
                size += std::fabs(term);
            }
            CHECK(std::fabs(s[(size_t) r * lds + (size_t) c] - dot) <= tolerance(kn, type, m) * size);
        }
    }
    kn.rows_axpy({ s.data(), lds }, m, rows, n, d, { o.data(), ld }, m % 2 ? rows.data : nullptr);
    for (int32_t r = 0; r < m; r++) {
        for (int32_t i = 0; i < d; i++) {
            double sum = 0.5, size = 1.0;
            for (int32_t c = 0; c < n; c++) {
                const double p = s[(size_t) r * lds + (size_t) c], term = p * exact[(size_t) (c * d + i)];
                sum += term;
                size += std::fabs(term) + 2.0 * std::fabs(p);  // 2 p: code and minimum of a value may cancel
            }
            CHECK(std::fabs(o[(size_t) r * ld + (size_t) i] - sum) <= tolerance(kn, type, m) * size);
        }
    }
}

static void test_rows(const Kernels & kn, size_t n) {
    auto  x   = random_floats(n, 8.0f);
    float top = -INFINITY;
    for (float v : x) {
        top = v > top ? v : top;
    }
    CHECK(kn.max(x.data(), n) == top);
    auto         e   = x;
    const float  sum = kn.exp_sum(e.data(), n, top);
    double       ref = 0.0, dot = 0.0, weighted = 0.0;
    const auto   y   = random_floats(n);
    for (size_t i = 0; i < n; i++) {
        const double shifted = (double) x[i] - (double) top, v = std::exp(shifted);
        // the f32 difference is rounded to 2^-24 of its magnitude
        CHECK(std::fabs(e[i] - v) <= (1e-6 - 1.2e-7 * shifted) * v + 1e-37);
        ref += v;
        weighted += v * shifted;
        dot += (double) x[i] * y[i];
    }
    CHECK(close_to(sum, ref, 1e-5));
    CHECK(close_to(kn.dot(x.data(), y.data(), n), dot, 1e-4));
    auto  same = x;
    float product;
    CHECK(close_to(kn.exp_dot(same.data(), n, top, &product), ref, 1e-5) && same == e);
    CHECK(std::fabs(product - weighted) <= 1e-5 * (1.0 - weighted));
    auto sums = y, squares = y;
    kn.add_moments(0.25f, x.data(), sums.data(), squares.data(), n);
    auto z = y;
    kn.axpy(0.25f, x.data(), z.data(), n);
    auto c = x;
    kn.softcap(c.data(), n, 5.0f);
    for (size_t i = 0; i < n; i++) {
        CHECK(close_to(z[i], y[i] + 0.25 * x[i], 1e-6));
        CHECK(close_to(sums[i], y[i] + 0.25 * x[i], 1e-6));
        CHECK(close_to(squares[i], y[i] + 0.0625 * x[i] * x[i], 1e-6));
        CHECK(close_to(c[i], 5.0 * std::tanh(x[i] / 5.0), 1e-5));
    }
}

// Compares softmax_step over parts of `step` logits, for m rows, with one softmax over all logits.
static void test_softmax(const Kernels & kn, int32_t m, int32_t n, int32_t step) {
    const size_t       ld  = 48, lds = ((size_t) step + 15) / 16 * 16;
    const auto         all = random_floats((size_t) (m * n), 8.0f), values = random_floats((size_t) n);
    std::vector<float> top((size_t) m, -INFINITY), sum((size_t) m), o((size_t) m * ld), s((size_t) m * lds);
    for (int32_t from = 0; from < n; from += step) {
        const int32_t w = std::min(step, n - from);
        for (int32_t r = 0; r < m; r++) {
            std::copy_n(all.begin() + r * n + from, w, s.begin() + (std::ptrdiff_t) ((size_t) r * lds));
        }
        kn.softmax_step(s.data(), lds, m, w, { top.data(), sum.data(), o.data(), ld });
        for (int32_t r = 0; r < m; r++) {
            for (int32_t c = 0; c < w; c++) {
                kn.axpy(s[(size_t) r * lds + (size_t) c], std::vector<float>(ld, values[(size_t) (from + c)]).data(),
                        o.data() + (size_t) r * ld, ld);
            }
        }
    }
    for (int32_t r = 0; r < m; r++) {
        const float * x     = all.data() + r * n;
        double        total = 0.0, mean = 0.0;
        const double  most  = *std::max_element(x, x + n);
        for (int32_t c = 0; c < n; c++) {
            total += std::exp(x[c] - most);
            mean += std::exp(x[c] - most) * values[(size_t) c];
        }
        CHECK(top[(size_t) r] == (float) most && close_to(sum[(size_t) r], total, 1e-5));
        CHECK(close_to(o[(size_t) r * ld], mean, 1e-5) && o[(size_t) r * ld] == o[(size_t) r * ld + ld - 1]);
    }
}

// test_kernels [NAME]: NAME: the kernel table that this CPU should use.
int main(int argc, char ** argv) {
    const auto tables = runnable_kernels();
    CHECK(tables.end()[-1] == kernels_generic());
    if (argc > 1) {
        std::fprintf(stderr, "%s is to be chosen, %s is\n", argv[1], kernels().name);
        CHECK(std::strcmp(argv[1], kernels().name) == 0);
    }
    for (const Kernels * t : tables) {
        std::fprintf(stderr, "%s\n", t->name);
        test_conversion(*t);
        for (Type type : { Type::f16, Type::bf16, Type::f32 }) {
            for (int32_t d : { 8, 40, 64, 80, 96, 128, 256 }) {
                for (int32_t m : { 1, 3, 7, 16, 29 }) {
                    test_products(*t, type, m, 1 + (m * 13) % 75, d);
                }
            }
        }
        for (size_t n : { 1, 3, 16, 17, 64, 1000 }) {
            test_rows(*t, n);
        }
        for (int32_t m : { 1, 4, 6, 16 }) {
            test_softmax(*t, m, 130, m == 4 ? 17 : 64);
        }
    }
    test_levels();
    for (Type type : quantised_types()) {
        test_rounding(type);
        for (const Kernels * t : tables) {
            for (int32_t d : { 32, 64, 96, 128, 256, 512 }) {
                for (int32_t m : { 1, 2, 7, 16, 29 }) {
                    for (int32_t skip : { 0, 5, 33 }) {
                        test_quantised(*t, type, m, 1 + (m * 29 + skip) % 75, d, skip);
                    }
                }
            }
        }
    }
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
