#include "primitives/fit.h"

#include "kernels/kernels.h"
#include "primitives/cholesky.h"
#include "store/block.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

namespace kvedge {

namespace {

constexpr int32_t TILE     = 60;   // queries whose logits over all rows are in memory at a time
constexpr int32_t BATCH    = 128;  // queries that a product of matrices sums at a time
constexpr int32_t BLOCK    = 128;  // rows at a time
constexpr int32_t COLUMNS  = CHOLESKY_BLOCK;  // columns of a Gram matrix at a time
constexpr int32_t STRIP    = 16;   // rows that are transposed at a time
constexpr int32_t SWEEPS   = 20;
constexpr float   STILL    = 1e-3f;  // part of a weight; a smaller move ends the descent
constexpr float   LEAST    = 0.0497870684f, MOST = 20.0855369f;  // e^-3, e^3
constexpr int32_t TURNS    = 300;    // most turns of the power iteration
constexpr float   SETTLED  = 1e-4f;
constexpr float   TINY     = 1e-30f;
constexpr float   LARGEST  = 6e4f;   // number that half precision holds, with room for rounding
constexpr size_t  WIDEST_PANEL = 64;

size_t up16(size_t n) { return (n + 15) / 16 * 16; }

// Returns the first place for a double at or after `at`, which is aligned for floats.
double * doubles(float * at) { return (double *) (((uintptr_t) at + alignof(double) - 1) / alignof(double) * alignof(double)); }

}  // namespace

// Rows of the matrices are as long as the kernels write them: a product of some columns writes up to a whole block.
Fit::Space Fit::lay_out(float * base, const ReduceSize & size) {
    const auto T = (size_t) size.n_tokens, t = (size_t) size.n_kept, n = (size_t) size.n_queries;
    Space      x{};
    x.row            = up16(T) + WIDEST_PANEL;
    x.kept_row       = (t + (size_t) COLUMNS - 1) / (size_t) COLUMNS * (size_t) COLUMNS;
    x.value_row      = (size_t) pad16(size.d_v);
    const auto take  = [&](size_t count) {
        float * at = base ? base + x.floats : nullptr;
        x.floats += up16(count);
        return at;
    };
    x.packed  = take((T + WIDEST_PANEL) * (size_t) size.d_k);
    x.values  = take(T * x.value_row);
    x.logits  = take((size_t) TILE * x.row);
    x.outputs = take(n * x.value_row);
    x.kept    = take(n * x.kept_row);
    x.top     = take(n);
    x.mass    = take(n);
    x.sought  = take(n);
    x.tile    = take((size_t) BATCH * x.kept_row);
    x.turned  = take((size_t) BATCH * t);
    x.gram    = take(t * x.kept_row);
    x.right   = take(t * x.value_row);
    x.weights = take(x.kept_row);
    x.work    = take(x.kept_row);
    x.slope   = take(x.kept_row);
    x.right_sums = doubles(take(2 * t + 1));
    x.row_sums   = doubles(take(2 * t + 1));
    x.factors = take(cholesky_floats(size.n_kept, x.value_row));
    return x;
}

size_t Fit::floats(const ReduceSize & size) { return size.n_queries < 1 ? 0 : lay_out(nullptr, size).floats; }

Fit::Fit(const FitProblem & problem, float * scratch)
    : p_(problem), x_(lay_out(scratch, { problem.n_rows, problem.n_kept, problem.d_k, problem.d_v, problem.n_queries, 1 })) {
    std::fill(x_.weights, x_.weights + p_.n_kept, 1.0f);
}

// ---------------------------------------------------------------------------------------------------------
// What the queries get of all rows

void Fit::attend() {
    const auto dk = (size_t) p_.d_k, dv = (size_t) p_.d_v;
    kernels().pack({ (const uint8_t *) p_.k, dk * sizeof(float), Type::f32 }, p_.n_rows, p_.d_k, x_.packed);
    for (size_t r = 0; r < (size_t) p_.n_rows; r++) {
        std::copy_n(p_.v + r * dv, dv, x_.values + r * x_.value_row);
        std::fill(x_.values + r * x_.value_row + dv, x_.values + (r + 1) * x_.value_row, 0.0f);
    }
    for (int32_t first = 0; first < p_.n_queries; first += TILE) {
        attend_tile(first, std::min(TILE, p_.n_queries - first));
    }
}

void Fit::attend_tile(int32_t first, int32_t n) {
    const Kernels & kn = kernels();
    const auto      T  = (size_t) p_.n_rows;
    kn.gemm_qk({ p_.q + (size_t) first * (size_t) p_.d_k, (size_t) p_.d_k }, n, x_.packed, p_.n_rows, p_.d_k, { x_.logits, x_.row });
    for (int32_t r = 0; r < n; r++) {
        const auto i    = (size_t) (first + r);
        float *    s    = x_.logits + (size_t) r * x_.row;
        float *    kept = x_.kept + i * x_.kept_row;
        if (p_.softcap != 0.0f) {
            kn.softcap(s, T, p_.softcap);
        }
        if (p_.bias) {
            kn.axpy(1.0f, p_.bias, s, T);
        }
        for (int32_t j = 0; j < p_.n_kept; j++) {
            kept[j] = s[p_.kept[j] - p_.first];
        }
        x_.top[i]  = kn.max(s, T);
        x_.mass[i] = kn.exp_sum(s, T, x_.top[i]);
    }
    float * out = x_.outputs + (size_t) first * x_.value_row;
    std::fill(out, out + (size_t) n * x_.value_row, 0.0f);
    for (int32_t row = 0; row < p_.n_rows; row += BLOCK) {
        const int32_t some = std::min(BLOCK, p_.n_rows - row);
        kn.gemm_pv({ x_.logits + row, x_.row }, n, some, { x_.values + (size_t) row * x_.value_row, x_.value_row }, p_.d_v, out);
    }
    for (int32_t r = 0; r < n; r++) {
        const float share = 1.0f / x_.mass[first + r];
        for (size_t c = 0; c < x_.value_row; c++) {
            *out++ *= share;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Biases

void Fit::clear_gram() { std::fill(x_.gram, x_.gram + (size_t) p_.n_kept * x_.kept_row, 0.0f); }

// gram += tile' tile for n rows of the tile, in the lower blocks. With `values`: right += tile' outputs, from query `first` on.
void Fit::add_gram(int32_t n, bool values, int32_t first) {
    const Kernels & kn = kernels();
    const auto      t  = (size_t) p_.n_kept;
    for (size_t r = 0; r < (size_t) n; r++) {
        std::fill(x_.tile + r * x_.kept_row + t, x_.tile + (r + 1) * x_.kept_row, 0.0f);
    }
    for (size_t from = 0; from < (size_t) n; from += STRIP) {
        const size_t to = std::min((size_t) n, from + STRIP);
        for (size_t j = 0; j < t; j++) {
            for (size_t r = from; r < to; r++) {
                x_.turned[j * (size_t) BATCH + r] = x_.tile[r * x_.kept_row + j];
            }
        }
    }
    for (int32_t from = 0; from < p_.n_kept; from += COLUMNS) {
        const FloatIn left{ x_.turned + (size_t) from * (size_t) BATCH, (size_t) BATCH };
        float * const to = x_.gram + (size_t) from * x_.kept_row + from;
        kn.gemm_pv(left, p_.n_kept - from, n, { x_.tile + from, x_.kept_row }, std::min(COLUMNS, p_.n_kept - from), to);
    }
    if (values) {
        kn.gemm_pv({ x_.turned, (size_t) BATCH }, p_.n_kept, n, { x_.outputs + (size_t) first * x_.value_row, x_.value_row }, p_.d_v, x_.right);
    }
}

void Fit::mirror_gram() {
    const auto t = (size_t) p_.n_kept;
    for (size_t from = 0; from < t; from += STRIP) {
        const size_t to = std::min(t, from + STRIP);
        for (size_t j = 0; j < to; j++) {
            for (size_t i = std::max(from, j + 1); i < to; i++) {
                x_.gram[j * x_.kept_row + i] = x_.gram[i * x_.kept_row + j];
            }
        }
    }
}

void Fit::weigh_rows(bool relative) {
    const Kernels & kn = kernels();
    const auto      t  = (size_t) p_.n_kept;
    clear_gram();
    std::fill(x_.right_sums, x_.right_sums + t, 0.0);
    for (int32_t first = 0; first < p_.n_queries; first += BATCH) {
        const int32_t n = std::min(BATCH, p_.n_queries - first);
        for (int32_t r = 0; r < n; r++) {
            const auto i   = (size_t) (first + r);
            float *    row = x_.tile + (size_t) r * x_.kept_row;
            std::copy_n(x_.kept + i * x_.kept_row, t, row);
            kn.exp_sum(row, t, x_.top[i]);
            for (size_t j = 0; j < t && relative; j++) {
                row[j] /= x_.mass[i];
            }
            const double sought = relative ? 1.0 : (double) x_.mass[i];
            for (size_t j = 0; j < t; j++) {
                x_.right_sums[j] += sought * (double) row[j];
            }
        }
        add_gram(n, false, 0);
    }
    mirror_gram();
    descend();
}

// Starts the descent with the one weight that is best for all rows.
void Fit::start_descent() {
    const auto t      = (size_t) p_.n_kept;
    double     across = 0.0, sought = 0.0;
    for (size_t j = 0; j < t; j++) {
        const float * row = x_.gram + j * x_.kept_row;
        x_.row_sums[j]    = std::accumulate(row, row + t, 0.0);
        across += x_.row_sums[j];
        sought += x_.right_sums[j];
    }
    const float same = across > 0.0 ? (float) std::clamp(sought / across, (double) LEAST, (double) MOST) : 1.0f;
    std::fill(x_.weights, x_.weights + t, same);
    for (size_t j = 0; j < t; j++) {
        x_.slope[j] = (float) ((double) same * x_.row_sums[j] - x_.right_sums[j]);
    }
}

void Fit::descend() {
    const auto t = (size_t) p_.n_kept;
    start_descent();
    for (int32_t sweep = 0; sweep < SWEEPS; sweep++) {
        float moved = 0.0f;
        for (size_t j = 0; j < t; j++) {
            const float * row = x_.gram + j * x_.kept_row;
            const float   own = row[j], was = x_.weights[j];
            // a row that no query looks at gets the smallest weight
            x_.weights[j]    = own > 0.0f ? std::clamp(was - x_.slope[j] / own, LEAST, MOST) : LEAST;
            const float step = x_.weights[j] - was;
            if (step != 0.0f) {
                kernels().axpy(step, row, x_.slope, t);
            }
            moved = std::max(moved, std::fabs(step) / x_.weights[j]);
        }
        if (moved <= STILL) {
            return;
        }
    }
}

void Fit::weigh_all() {
    const auto t = (size_t) p_.n_kept, n = (size_t) p_.n_queries;
    for (size_t i = 0; i < n; i++) {
        std::copy_n(x_.kept + i * x_.kept_row, t, x_.tile);
        x_.sought[i] = x_.mass[i] / std::max(TINY, kernels().exp_sum(x_.tile, t, x_.top[i]));
    }
    float * const middle = x_.sought + n / 2;
    std::nth_element(x_.sought, middle, x_.sought + n);
    const float above = *middle;
    const float below = n % 2 == 1 ? above : *std::max_element(x_.sought, middle);
    std::fill(x_.weights, x_.weights + t, std::clamp(0.5f * below + 0.5f * above, LEAST, MOST));
}

void Fit::add_biases(float * biases) const {
    for (int32_t j = 0; j < p_.n_kept; j++) {
        biases[j] = std::clamp(biases[j] + std::log(x_.weights[j]), -MOST_BIAS, MOST_BIAS);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Values

// Returns the largest eigenvalue of the Gram matrix. Its entries are not negative, so that ones are the best start.
float Fit::norm() {
    const auto t    = (size_t) p_.n_kept;
    float *    next = x_.tile;  // not needed any more
    float      size = 0.0f;
    std::fill(x_.work, x_.work + t, 1.0f / std::sqrt((float) t));
    for (int32_t turn = 0; turn < TURNS; turn++) {
        for (size_t j = 0; j < t; j++) {
            next[j] = kernels().dot(x_.gram + j * x_.kept_row, x_.work, t);
        }
        const float grown = std::sqrt(kernels().dot(next, next, t));
        if (!(grown > 0.0f)) {
            return grown;
        }
        for (size_t j = 0; j < t; j++) {
            x_.work[j] = next[j] / grown;
        }
        const bool still = std::fabs(grown - size) <= SETTLED * grown;
        size             = grown;
        if (still) {
            break;
        }
    }
    return size;
}

bool Fit::solve(float ridge, float * values) {
    const Kernels & kn = kernels();
    const auto      t = (size_t) p_.n_kept, n_values = t * (size_t) p_.d_v;
    clear_gram();
    std::fill(x_.right, x_.right + t * x_.value_row, 0.0f);
    std::transform(x_.weights, x_.weights + t, x_.work, [](float w) { return std::log(w); });
    for (int32_t first = 0; first < p_.n_queries; first += BATCH) {
        const int32_t n = std::min(BATCH, p_.n_queries - first);
        for (int32_t r = 0; r < n; r++) {
            float * row = x_.tile + (size_t) r * x_.kept_row;
            std::copy_n(x_.kept + (size_t) (first + r) * x_.kept_row, t, row);
            kn.axpy(1.0f, x_.work, row, t);
            const float share = 1.0f / kn.exp_sum(row, t, kn.max(row, t));
            for (size_t j = 0; j < t; j++) {
                row[j] *= share;
            }
        }
        add_gram(n, true, first);
    }
    mirror_gram();
    const float penalty = ridge * norm();
    for (size_t j = 0; j < t; j++) {
        kn.axpy(penalty, p_.v + (size_t) (p_.kept[j] - p_.first) * (size_t) p_.d_v, x_.right + j * x_.value_row, (size_t) p_.d_v);
    }
    cholesky_solve({ x_.gram, x_.kept_row, p_.n_kept }, penalty, x_.right, x_.value_row, x_.factors);
    for (size_t j = 0; j < t; j++) {
        std::copy_n(x_.right + j * x_.value_row, p_.d_v, values + j * (size_t) p_.d_v);
    }
    return std::all_of(values, values + n_values, [](float x) { return std::fabs(x) <= LARGEST; });
}

}  // namespace kvedge
