// Rows of numbers: their sums, maxima and exponentials. Part of kernels_impl.h, under its rules.

#pragma once

#include "kernels.h"
#include "kernels_compiler.h"

namespace kvedge {
namespace {

constexpr float NEG_INF = -__builtin_huge_valf();

// Writes the largest of each of R rows to top [R].
template <int R> inline void row_tops(const float * x, size_t ldx, size_t n, float * top) {
    V      a[R];
    size_t i = 0;
    KVEDGE_UNROLL
    for (int r = 0; r < R; r++) {
        a[r] = V::set1(NEG_INF);
    }
    for (; i + V::W <= n; i += V::W) {
        KVEDGE_UNROLL
        for (int r = 0; r < R; r++) {
            a[r] = V::max(a[r], V::load(x + r * ldx + i));
        }
    }
    KVEDGE_UNROLL
    for (int r = 0; r < R; r++) {
        if (i < n) {
            a[r] = V::max(a[r], V::load_first(x + r * ldx + i, n - i, NEG_INF));
        }
        top[r] = a[r].hmax();
    }
}

float k_max(const float * x, size_t n) {
    float top;
    row_tops<1>(x, 0, n, &top);
    return top;
}

constexpr float NOTHING = -100.0f;  // its exponential, cut off at e^-87, is lost in any sum that counts

// exp by 2^n * e^r with |r| <= ln 2 / 2 and e^r = 1 + r + r^2 q(r). q is the cubic with the least relative error, 1.1e-7. With rounding the
// error stays below 3e-7 for x <= 0.
inline V v_exp(V x) {
    x          = V::max(x, V::set1(-87.0f));
    const V n  = V::round(V::mul(x, V::set1(1.44269504f)));
    V       r  = V::fma(n, V::set1(-0.693359375f), x);
    r          = V::fma(n, V::set1(2.12194440e-4f), r);
    V       p  = V::set1(0.008312520571053028f);
    p          = V::fma(p, r, V::set1(0.04189015552401543f));
    p          = V::fma(p, r, V::set1(0.16667114198207855f));
    p          = V::fma(p, r, V::set1(0.499992311000824f));
    p          = V::fma(p, r, V::set1(1.0f));
    p          = V::fma(p, r, V::set1(1.0f));
    return V::scale2(p, n);
}

// x = exp(x - shift) in R rows; sum [R]: their sums, each rounded like the sum of a single row.
template <int R> inline void row_exps(float * x, size_t ldx, size_t n, const float * shift, float * sum) {
    V      sh[R], sums[R];
    size_t i = 0;
    KVEDGE_UNROLL
    for (int r = 0; r < R; r++) {
        sh[r]   = V::set1(-shift[r]);
        sums[r] = V::zero();
    }
    for (; i + V::W <= n; i += V::W) {
        KVEDGE_UNROLL
        for (int r = 0; r < R; r++) {
            float * at = x + r * ldx + i;
            const V e  = v_exp(V::add(V::load(at), sh[r]));
            e.store(at);
            sums[r] = V::add(sums[r], e);
        }
    }
    KVEDGE_UNROLL
    for (int r = 0; r < R; r++) {
        if (i < n) {
            float * at = x + r * ldx + i;
            const V e  = v_exp(V::add(V::load_first(at, n - i, shift[r] + NOTHING), sh[r]));
            e.store_first(at, n - i);
            sums[r] = V::add(sums[r], e);
        }
        sum[r] = sums[r].hsum();
    }
}

float k_exp_sum(float * x, size_t n, float shift) {
    float sum;
    row_exps<1>(x, 0, n, &shift, &sum);
    return sum;
}

// Raises a row's largest logit to `here`, if that is larger; earlier sums then shrink.
inline void raise_top(const SoftmaxRows & to, int32_t r, float here) {
    if (!(here > to.top[r])) {
        return;
    }
    const V shrink = v_exp(V::set1(to.top[r] - here));
    float * o      = to.o + (size_t) r * to.ldo;
    for (size_t i = 0; i < to.ldo; i += V::W) {
        V::mul(V::load(o + i), shrink).store(o + i);
    }
    float lanes[V::W];
    shrink.store(lanes);
    to.sum[r] *= lanes[0];
    to.top[r] = here;
}

template <int R> inline void softmax_rows(float * s, size_t lds, int32_t r, size_t n, const SoftmaxRows & to) {
    float here[R], sum[R];
    row_tops<R>(s, lds, n, here);
    for (int j = 0; j < R; j++) {
        raise_top(to, r + j, here[j]);
    }
    row_exps<R>(s, lds, n, to.top + r, sum);
    for (int j = 0; j < R; j++) {
        to.sum[r + j] += sum[j];
    }
}

// Two rows at a time: a single row would wait for its own sums.
void k_softmax_step(float * s, size_t lds, int32_t m, int32_t n, const SoftmaxRows & to) {
    int32_t r = 0;
    for (; r + 2 <= m && n > 0; r += 2) {
        softmax_rows<2>(s + (size_t) r * lds, lds, r, (size_t) n, to);
    }
    if (r < m && n > 0) {
        softmax_rows<1>(s + (size_t) r * lds, lds, r, (size_t) n, to);
    }
}

float k_exp_dot(float * x, size_t n, float shift, float * dot) {
    const V sh  = V::set1(-shift);
    V       sum = V::zero(), weighted = V::zero();
    size_t  i   = 0;
    for (; i + V::W <= n; i += V::W) {
        const V s = V::add(V::load(x + i), sh);
        const V e = v_exp(s);
        e.store(x + i);
        sum      = V::add(sum, e);
        weighted = V::fma(e, s, weighted);
    }
    if (i < n) {
        const V s = V::add(V::load_first(x + i, n - i, shift + NOTHING), sh);
        const V e = v_exp(s);
        e.store_first(x + i, n - i);
        sum      = V::add(sum, e);
        weighted = V::fma(e, s, weighted);
    }
    *dot = weighted.hsum();
    return sum.hsum();
}

void k_softcap(float * x, size_t n, float cap) {
    for (size_t i = 0; i < n; i++) {
        x[i] = cap * __builtin_tanhf(x[i] / cap);
    }
}

void k_axpy(float a, const float * x, float * y, size_t n) {
    const V va = V::set1(a);
    size_t  i  = 0;
    for (; i + V::W <= n; i += V::W) {
        V::fma(va, V::load(x + i), V::load(y + i)).store(y + i);
    }
    for (; i < n; i++) {
        y[i] += a * x[i];
    }
}

void k_add_moments(float a, const float * x, float * y, float * y2, size_t n) {
    const V va = V::set1(a);
    size_t  i  = 0;
    for (; i + V::W <= n; i += V::W) {
        const V v = V::mul(va, V::load(x + i));
        V::add(V::load(y + i), v).store(y + i);
        V::fma(v, v, V::load(y2 + i)).store(y2 + i);
    }
    for (; i < n; i++) {
        const float v = a * x[i];
        y[i] += v;
        y2[i] += v * v;
    }
}

float k_dot(const float * x, const float * y, size_t n) {
    V      acc = V::zero();
    size_t i   = 0;
    for (; i + V::W <= n; i += V::W) {
        acc = V::fma(V::load(x + i), V::load(y + i), acc);
    }
    float sum = acc.hsum();
    for (; i < n; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

}  // namespace
}  // namespace kvedge
