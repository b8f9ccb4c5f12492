// Checks every kernel of a table against plain loops in double precision, on this processor. The stored rows hold values that every storage
// type has codes for, so that the right result of reading is known without any kernel.

#include "api/check_kernels.h"

#include "kernels/quantise.h"
#include "system/error.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

using namespace kvedge;

namespace {

constexpr double TOLERANCE = 2e-4;  // of the sum of the absolute values of the terms; q8_0 rounds queries to 16 bits

struct TypeName {
    Type        type;
    std::string name;
    // codes of the values, in units of 1/8; the first and the last code both occur wherever values share a scale
    std::vector<int32_t> codes;
};

// Returns the codes of a type.
std::vector<int32_t> codes_of(Type t) {
    std::vector<int32_t> out;
    with_type(t, [&](auto of) {
        const Format & f    = format(of.value);
        const bool     some = is_quantised(of.value);
        const int32_t  low = some ? f.lowest - f.minimum : -31, high = some ? f.highest - f.minimum : 31;
        for (int32_t code = low; code <= high; code++) {
            out.push_back(code);
        }
        if constexpr (decltype(of)::looked_up) {
            out.assign(std::begin(decltype(of)::levels), std::end(decltype(of)::levels));
        }
    });
    return out;
}

// Returns every storage type; twice if keys and values are stored differently.
std::vector<TypeName> all_types() {
    std::vector<TypeName> out;
    for (int32_t i = 0; FORMATS.of[i].name; i++) {
        const Type     t   = (Type) i;
        const Format & f = format(t);
        out.push_back({ t, f.name + std::string(f.residual ? " values" : ""), codes_of(t) });
        if (f.residual) {
            out.push_back({ of_keys(t), f.name + std::string(" keys"), codes_of(t) });
        }
    }
    return out;
}

// The result of comparisons: the first that failed.
struct Check {
    std::string wrong;

    void that(double got, double expected, double size, const char * what) {
        if (wrong.empty() && !(std::fabs(got - expected) <= TOLERANCE * (size + 1e-3))) {
            char text[200];
            std::snprintf(text, sizeof text, "%s gives %g instead of %g", what, got, expected);
            wrong = text;
        }
    }
};

struct Random {
    uint32_t state = 12345;

    uint32_t next() { return (state = state * 1664525u + 1013904223u) >> 8; }
    float    between(float a, float b) { return a + (b - a) * (float) (next() % 65536) / 65535.0f; }

    std::vector<float> many(size_t n, float a, float b) {
        std::vector<float> x(n);
        for (float & v : x) {
            v = between(a, b);
        }
        return x;
    }
};

struct Stored {
    std::vector<float>   values;  // [n][d]
    std::vector<uint8_t> bytes;
};

Stored stored(const Kernels & kn, const TypeName & t, int32_t n, int32_t d, Random & random) {
    Stored out;
    out.values.resize((size_t) n * (size_t) d);
    out.bytes.resize((size_t) ((n + GROUP - 1) / GROUP * GROUP) * row_bytes(t.type, d));
    for (int32_t r = 0; r < n; r++) {
        for (int32_t i = 0; i < d; i++) {
            const int32_t at   = (is_grouped(t.type) ? r : i) % GROUP;
            const int32_t code = t.codes[random.next() % t.codes.size()];
            out.values[(size_t) (r * d + i)] = 0.125f * (float) (at == 0 ? t.codes.front() : at == 1 ? t.codes.back() : code);
        }
    }
    for (int32_t r = 0; r < n; r += is_grouped(t.type) ? GROUP : 1) {
        const float * from = out.values.data() + (size_t) r * (size_t) d;
        uint8_t *     to   = out.bytes.data() + (size_t) r * row_bytes(t.type, d);
        if (is_grouped(t.type)) {
            quantise_group(t.type, from, std::min(GROUP, n - r), d, to);
        } else if (is_quantised(t.type)) {
            quantise_row(t.type, from, d, to);
        } else {
            kn.from_f32(t.type, from, to, (size_t) d);
        }
    }
    return out;
}

// Checks the reading of rows of one type, and their products with m other rows.
void check_rows(const Kernels & kn, const TypeName & t, int32_t m, int32_t d, Check & check, Random & random) {
    const int32_t skip = 5, n = 70;
    const Stored  all  = stored(kn, t, n + skip, d, random);
    const Rows    rows = Rows{ all.bytes.data(), row_bytes(t.type, d), t.type }.from(skip);
    const float * x    = all.values.data() + (size_t) (skip * d);
    const auto    ld = (size_t) pad16(d), panel = (size_t) kn.panel, lds = ((size_t) n + panel - 1) / panel * panel;

    std::vector<float> wide((size_t) n * ld), packed(lds * (size_t) d), s(lds * (size_t) m), s2 = s;
    const auto         q = random.many((size_t) (m * d), -1.0f, 1.0f), p = random.many(lds * (size_t) m, 0.0f, 1.0f);
    kn.widen(rows, n, d, wide.data(), ld);
    kn.pack(rows, n, d, packed.data());
    kn.gemm_qk({ q.data(), (size_t) d }, m, packed.data(), n, d, { s.data(), lds });
    kn.rows_dot({ q.data(), (size_t) d }, m, rows, n, d, { s2.data(), lds }, nullptr);
    std::vector<float> o((size_t) m * ld, 0.5f), o2 = o;
    kn.gemm_pv({ p.data(), lds }, m, n, { wide.data(), ld }, d, o.data());
    kn.rows_axpy({ p.data(), lds }, m, rows, n, d, { o2.data(), ld }, nullptr);

    if (!is_quantised(t.type)) {
        std::vector<float> plain(all.values.size());
        kn.to_f32(t.type, all.bytes.data(), plain.data(), plain.size());
        for (size_t i = 0; i < plain.size(); i++) {
            check.that(plain[i], all.values[i], std::fabs(all.values[i]), "to_f32");
        }
    }
    for (int32_t c = 0; c < n; c++) {
        for (int32_t i = 0; i < d; i++) {
            check.that(wide[(size_t) c * ld + (size_t) i], x[c * d + i], std::fabs(x[c * d + i]), "widen");
        }
        for (int32_t r = 0; r < m; r++) {
            double dot = 0.0, size = 0.0;
            for (int32_t i = 0; i < d; i++) {
                const double term = (double) q[(size_t) (r * d + i)] * x[c * d + i];
                dot += term, size += std::fabs(term);
            }
            check.that(s[(size_t) r * lds + (size_t) c], dot, size, "gemm_qk");
            check.that(s2[(size_t) r * lds + (size_t) c], dot, size, "rows_dot");
        }
    }
    for (int32_t r = 0; r < m; r++) {
        for (int32_t i = 0; i < d; i++) {
            double sum = 0.5, size = 0.5;
            for (int32_t c = 0; c < n; c++) {
                const double term = (double) p[(size_t) r * lds + (size_t) c] * x[c * d + i];
                sum += term, size += std::fabs(term);
            }
            check.that(o[(size_t) r * ld + (size_t) i], sum, size, "gemm_pv");
            check.that(o2[(size_t) r * ld + (size_t) i], sum, size, "rows_axpy");
        }
    }
}

void check_elements(const Kernels & kn, size_t n, Check & check, Random & random) {
    const auto x = random.many(n, -8.0f, 8.0f), y = random.many(n, -1.0f, 1.0f);
    const auto top = *std::max_element(x.begin(), x.end());
    auto       e = x, e2 = x, capped = x, sums = y, squares = y, added = y;
    double     total = 0.0, weighted = 0.0, dot = 0.0, size = 0.0;
    float      product = 0.0f;
    const auto sum = kn.exp_sum(e.data(), n, top), sum2 = kn.exp_dot(e2.data(), n, top, &product);
    kn.softcap(capped.data(), n, 5.0f);
    kn.add_moments(0.25f, x.data(), sums.data(), squares.data(), n);
    kn.axpy(0.25f, x.data(), added.data(), n);
    for (size_t i = 0; i < n; i++) {
        const double shifted = (double) x[i] - top, v = std::exp(shifted), a = 0.25 * (double) x[i];
        total += v, weighted += v * shifted, dot += (double) x[i] * y[i], size += std::fabs((double) x[i] * y[i]);
        check.that(e[i], v, v, "exp_sum");
        check.that(e2[i], v, v, "exp_dot");
        check.that(capped[i], 5.0 * std::tanh(x[i] / 5.0), 1.0, "softcap");
        check.that(sums[i], y[i] + a, 1.0, "add_moments");
        check.that(squares[i], y[i] + a * a, 1.0, "add_moments");
        check.that(added[i], y[i] + a, 1.0, "axpy");
    }
    check.that(sum, total, total, "exp_sum");
    check.that(sum2, total, total, "exp_dot");
    check.that(product, weighted, total - weighted, "exp_dot");
    check.that(kn.max(x.data(), n), top, 0.0, "max");
    check.that(kn.dot(x.data(), y.data(), n), dot, size, "dot");
}

// Checks a softmax in two parts: earlier sums shrink to the larger logits of the second part.
void check_softmax(const Kernels & kn, Check & check, Random & random) {
    const int32_t      m = 6, n = 40;
    const size_t       lds = 48, ld = 16;
    std::vector<float> top(m, -INFINITY), sum(m, 0.0f), o(m * ld, 0.0f), first, second;
    first = random.many(m * lds, -4.0f, 4.0f), second = random.many(m * lds, 0.0f, 8.0f);
    auto s = first;
    kn.softmax_step(s.data(), lds, m, n, { top.data(), sum.data(), o.data(), ld });
    std::fill(o.begin(), o.end(), 1.0f);
    s = second;
    const auto before = top;
    kn.softmax_step(s.data(), lds, m, n, { top.data(), sum.data(), o.data(), ld });
    for (size_t r = 0; r < (size_t) m; r++) {
        const float * a = first.data() + r * lds;
        const float * b = second.data() + r * lds;
        const double  most = std::max(*std::max_element(a, a + n), *std::max_element(b, b + n));
        double        total = 0.0;
        for (int32_t c = 0; c < n; c++) {
            total += std::exp(a[c] - most) + std::exp(b[c] - most);
            check.that(s[r * lds + (size_t) c], std::exp(b[c] - most), 1.0, "softmax_step");
        }
        check.that(top[r], most, 0.0, "softmax_step");
        check.that(sum[r], total, total, "softmax_step");
        check.that(o[r * ld], std::exp(before[r] - most), 1.0, "softmax_step");
    }
}

// Checks a filter of one stage that lets everything pass: the result is n times the input.
void check_filter(const Kernels & kn, int32_t n, Check & check, Random & random) {
    const size_t       row = 2 * (size_t) BAND_PAIRS;
    const TypeName     f32 = { Type::f32, "f32", codes_of(Type::f32) };
    const Stored       given = stored(kn, f32, n, (int32_t) row, random);
    std::vector<float> x((size_t) n * row), origin(given.values.begin(), given.values.begin() + (std::ptrdiff_t) row);
    std::vector<float> squares((size_t) n * (size_t) BAND_PAIRS), twiddle;
    std::vector<int32_t> place;
    for (int32_t i = 0; i < n; i++) {
        place.push_back(n - 1 - i);
        twiddle.insert(twiddle.end(), { 1.0f, 0.0f });
    }
    double       all = 0.0;
    const double got = kn.band_load({ given.bytes.data(), row * sizeof(float), Type::f32 }, n, (int32_t) row, place.data(),
                                    origin.data(), x.data());
    BandFilter filter{};
    filter.n_rows = n, filter.n_stages = 1;
    filter.stages[0] = { n, 1, twiddle.data() };
    const auto loaded = x;
    kn.band_filter(filter, x.data(), squares.data());
    for (size_t r = 0; r < (size_t) n; r++) {
        for (size_t i = 0; i < row; i++) {
            const float v = given.values[r * row + i];
            all += (double) v * v;
            check.that(loaded[(size_t) place[r] * row + i], v - origin[i], 1.0, "band_load");
        }
        for (size_t i = 0; i < (size_t) BAND_PAIRS; i++) {
            const double a = loaded[r * row + i], b = loaded[r * row + i + (size_t) BAND_PAIRS];
            check.that(squares[r * (size_t) BAND_PAIRS + i], (a * a + b * b) * n * n, (a * a + b * b + 1.0) * n * n, "band_filter");
        }
    }
    check.that(got, all, all, "band_load");
}

// Checks the rotation. The matrix consists of signs: entry (i, j) is negative if i and j share an odd number of bits.
void check_rotation(const Kernels & kn, int32_t d, int32_t block, Check & check, Random & random) {
    const int32_t n = 3;
    const auto    ld = (size_t) d + 16;
    const auto    x  = random.many((size_t) n * ld, -2.0f, 2.0f);
    auto          got = x;
    kn.rotate({ got.data(), ld }, n, d, block);
    for (size_t at = 0; at < x.size(); at++) {
        const auto i = (int32_t) (at % ld), first = i / block * block;
        double     sum = 0.0, size = 0.0;
        for (int32_t j = 0; i < d && j < block; j++) {
            bool negative = false;
            for (int32_t bits = (i - first) & j; bits != 0; bits &= bits - 1) {
                negative = !negative;
            }
            const double term = x[at - (size_t) (i - first) + (size_t) j] / std::sqrt((double) block);
            sum += negative ? -term : term, size += std::fabs(term);
        }
        check.that(got[at], i < d ? sum : x[at], size, "rotate");  // numbers behind a row do not change
    }
}

}  // namespace

std::string kvedge::what_is_wrong(const Kernels & kn) {
    Random random;
    for (const TypeName & t : all_types()) {
        for (int32_t m : { 1, 7, 16 }) {
            for (int32_t d : { 64, 96 }) {
                Check check;
                check_rows(kn, t, m, d, check, random);
                if (!check.wrong.empty()) {
                    return check.wrong + " over rows of " + t.name;
                }
            }
        }
    }
    Check check;
    for (size_t n : { 1, 17, 1000 }) {
        check_elements(kn, n, check, random);
    }
    check_softmax(kn, check, random);
    for (int32_t n : { 2, 3, 4, 5, 8 }) {
        check_filter(kn, n, check, random);
    }
    for (const auto & [d, block] : { std::pair<int32_t, int32_t>{ 64, 64 }, { 192, 64 }, { 384, 128 }, { 512, 512 } }) {
        check_rotation(kn, d, block, check, random);
    }
    return check.wrong;
}

extern "C" const char * kvedge_kernels(int32_t i) try {
    const Tables    tables = runnable_kernels();
    const Kernels * table  = i < 0 || i >= tables.n ? nullptr : tables.table[i];
    return table ? table->name : nullptr;
} catch (...) {
    return nullptr;
}

extern "C" kvedge_status kvedge_check_kernels(const char * name, kvedge_error * err) try {
    if (!name) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_check_kernels: name is NULL; pass a name that kvedge_kernels() returns");
    }
    for (const Kernels * table : runnable_kernels()) {
        if (std::strcmp(table->name, name) != 0) {
            continue;
        }
        const std::string wrong = what_is_wrong(*table);
        return wrong.empty() ? ok(err) : fail(err, KVEDGE_E_UNSUPPORTED, "%s: %s", name, wrong.c_str());
    }
    return fail(err, KVEDGE_E_UNKNOWN, "no kernels '%s' can run on this processor; pass a name that kvedge_kernels() returns", name);
} catch (...) {
    return caught(err, "check the kernels");
}
