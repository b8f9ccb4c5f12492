// Rows of numbers: their sums, maxima and exponentials. Part of kernels_impl.h, under its rules.

#pragma once

#include "kernels.h"

namespace kvedge {
namespace {

constexpr float NEG_INF = -__builtin_huge_valf();

float k_max(const float * x, size_t n) {
    V      a = V::set1(NEG_INF);
    size_t i = 0;
    for (; i + V::W <= n; i += V::W) {
        a = V::max(a, V::load(x + i));
    }
    if (i < n) {
        a = V::max(a, V::load_first(x + i, n - i, NEG_INF));
    }
    return a.hmax();
}

constexpr float NOTHING = -100.0f;  // its exponential, cut off at -87, is lost in any sum that counts

// exp by 2^n * e^r with |r| <= ln 2 / 2 and e^r = 1 + r + r^2 q(r), q the cubic of least relative error, 1.1e-7: what is
// rounded besides leaves it below 3e-7 for x <= 0.
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

float k_exp_sum(float * x, size_t n, float shift) {
    const V sh  = V::set1(-shift);
    V       sum = V::zero();
    size_t  i   = 0;
    for (; i + V::W <= n; i += V::W) {
        const V e = v_exp(V::add(V::load(x + i), sh));
        e.store(x + i);
        sum = V::add(sum, e);
    }
    if (i < n) {
        const V e = v_exp(V::add(V::load_first(x + i, n - i, shift + NOTHING), sh));
        e.store_first(x + i, n - i);
        sum = V::add(sum, e);
    }
    return sum.hsum();
}

// The row's largest logit so far, which the new ones may raise: then what was summed shrinks.
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

void k_softmax_step(float * s, size_t lds, int32_t m, int32_t n, const SoftmaxRows & to) {
    for (int32_t r = 0; r < m && n > 0; r++) {
        float * x = s + (size_t) r * lds;
        raise_top(to, r, k_max(x, (size_t) n));
        to.sum[r] += k_exp_sum(x, (size_t) n, to.top[r]);
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
