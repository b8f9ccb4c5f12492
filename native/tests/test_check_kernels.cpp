// The kernel check (api/check_kernels.h) finds every kernel that is wrong, and accepts correct tables.

#include "check.h"
#include "api/check_kernels.h"
#include "kvedge.h"

#include <cstring>

using namespace kvedge;

static const Kernels & right() { return *kernels_generic(); }

// Returns the correct table with one kernel replaced.
template <typename F> static Kernels with(F Kernels::*kernel, F broken) {
    Kernels table = right();
    table.*kernel = broken;
    return table;
}

static void finds(const Kernels & table, const char * name) {
    const std::string said = what_is_wrong(table);
    if (said.find(name) == std::string::npos) {
        std::fprintf(stderr, "a wrong %s: '%s'\n", name, said.c_str());
    }
    CHECK(said.find(name) != std::string::npos);
}

// Kernels with one wrong value.
static void test_reading() {
    finds(with(&Kernels::to_f32, +[](Type t, const void * src, float * dst, size_t n) {
        right().to_f32(t, src, dst, n);
        if (n > 0) dst[n - 1] += 0.125f;
    }), "to_f32");
    finds(with(&Kernels::from_f32, +[](Type t, const float * src, void * dst, size_t n) {
        right().from_f32(t, src, dst, n);
        if (n > 40) std::memcpy((uint8_t *) dst + type_size(t) * 40, dst, type_size(t));
    }), "to_f32");
    finds(with(&Kernels::widen, +[](Rows rows, int32_t n, int32_t d, float * out, size_t ld) {
        right().widen(rows, n, d, out, ld);
        out[(size_t) (n - 1) * ld + (size_t) d - 1] += rows.type == of_keys(Type::kivi2) ? 0.125f : 0.0f;
    }), "widen gives");
    finds(with(&Kernels::widen, +[](Rows rows, int32_t n, int32_t d, float * out, size_t ld) {
        right().widen(rows, n, d, out, ld);
        out[(size_t) (n - 1) * ld + (size_t) d - 1] += rows.type == of_keys(Type::kivi2) ? 0.125f : 0.0f;
    }), "over rows of kivi2 keys");
    finds(with(&Kernels::pack, +[](Rows k, int32_t n, int32_t d, float * out) {
        right().pack(k, n, d, out);
        out[0] += 1.0f;
    }), "gemm_qk");
}

static void test_products() {
    finds(with(&Kernels::gemm_qk, +[](FloatIn q, int32_t m, const float * packed, int32_t n, int32_t d, FloatOut s) {
        right().gemm_qk(q, m, packed, n, d, s);
        s.row(m - 1)[n - 1] += 0.25f;
    }), "gemm_qk");
    finds(with(&Kernels::gemm_pv, +[](FloatIn p, int32_t m, int32_t n, FloatIn v, int32_t d, float * o) {
        right().gemm_pv(p, m, n, v, d, o);
        o[(size_t) (m - 1) * v.ld + (size_t) d - 1] += 0.25f;
    }), "gemm_pv");
    finds(with(&Kernels::rows_dot, +[](FloatIn q, int32_t m, Rows k, int32_t n, int32_t d, FloatOut s, const uint8_t * next) {
        right().rows_dot(q, m, k, n, d, s, next);
        s.row(m - 1)[n - 1] += k.type == Type::q4_0 && m > 1 ? 0.25f : 0.0f;
    }), "rows_dot");
    finds(with(&Kernels::rows_axpy, +[](FloatIn p, int32_t m, Rows v, int32_t n, int32_t d, FloatOut o, const uint8_t * next) {
        right().rows_axpy(p, m, v, n, d, o, next);
        o.row(m - 1)[0] += 0.25f;
    }), "rows_axpy");
}

static void test_elements() {
    finds(with(&Kernels::max, +[](const float * x, size_t n) { return right().max(x, n - n % 2); }), "max");
    finds(with(&Kernels::exp_sum, +[](float * x, size_t n, float shift) { return 1.01f * right().exp_sum(x, n, shift); }), "exp_sum");
    finds(with(&Kernels::exp_dot, +[](float * x, size_t n, float shift, float * dot) {
        const float sum = right().exp_dot(x, n, shift, dot);
        *dot *= 1.01f;
        return sum;
    }), "exp_dot");
    finds(with(&Kernels::softmax_step, +[](float * s, size_t lds, int32_t m, int32_t n, const SoftmaxRows & rows) {
        const float first = rows.o[0];  // the wrong kernel does not rescale this earlier sum
        right().softmax_step(s, lds, m, n, rows);
        rows.o[0] = first;
    }), "softmax_step");
    finds(with(&Kernels::softcap, +[](float * x, size_t n, float cap) { right().softcap(x, n - n % 2, cap); }), "softcap");
    finds(with(&Kernels::axpy, +[](float a, const float * x, float * y, size_t n) { right().axpy(a, x, y, n - n % 2); }), "axpy");
    finds(with(&Kernels::add_moments, +[](float a, const float * x, float * y, float * y2, size_t n) {
        right().add_moments(a, x, y, y2, n);
        y2[n - 1] += 0.1f;
    }), "add_moments");
    finds(with(&Kernels::dot, +[](const float * x, const float * y, size_t n) { return right().dot(x, y, n) + 0.1f * (float) n; }), "dot");
    finds(with(&Kernels::band_load, +[](Rows rows, int32_t n, int32_t d, const int32_t * place, const float * origin, float * x) {
        return 1.01 * right().band_load(rows, n, d, place, origin, x);
    }), "band_load");
    finds(with(&Kernels::band_filter, +[](const BandFilter & filter, float * x, float * squares) {
        right().band_filter(filter, x, squares);
        squares[0] += filter.stages[0].radix == 5 ? 50.0f : 0.0f;
    }), "band_filter");
    finds(with(&Kernels::rotate, +[](FloatOut x, int32_t n, int32_t d, int32_t block) {
        right().rotate(x, n, d, block == 512 ? 256 : block);
    }), "rotate");
    finds(with(&Kernels::rotate, +[](FloatOut x, int32_t n, int32_t d, int32_t block) {
        right().rotate(x, n, d, block);
        x.row(n - 1)[d] += 0.125f;
    }), "rotate");
}

int main() {
    for (int32_t i = 0; const char * name = kvedge_kernels(i); i++) {
        kvedge_error err = {};
        CHECK(kvedge_check_kernels(name, &err) == KVEDGE_OK);
        std::fprintf(stderr, "%s %s\n", name, err.message);
        CHECK(i > 0 || std::strcmp(name, kvedge_simd()) == 0);
    }
    CHECK(kvedge_kernels(0) && !kvedge_kernels(-1) && !kvedge_kernels(99));
    CHECK(kvedge_check_kernels("mmx", nullptr) == KVEDGE_E_UNKNOWN && kvedge_check_kernels(nullptr, nullptr) == KVEDGE_E_ARGUMENT);
    test_reading();
    test_products();
    test_elements();
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
