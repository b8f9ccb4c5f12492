#include "observe/moments.h"

#include "kernels/kernels.h"

#include <algorithm>

namespace kvedge {

static size_t triangle(int32_t d) { return (size_t) d * (size_t) (d + 1) / 2; }

QueryMoments::QueryMoments(int32_t n_heads, int32_t d)
    : d_(d), n_((size_t) n_heads, 0), origin_((size_t) n_heads * (size_t) d), sum_((size_t) n_heads * (size_t) d),
      outer_((size_t) n_heads * triangle(d)) {}

void QueryMoments::add(int32_t head, float * x, size_t ld, int32_t n, float * across, float * tile) {
    const auto d = (size_t) d_;
    float *    origin = origin_.data() + (size_t) head * d;
    double *   sum    = sum_.data() + (size_t) head * d;
    double *   outer  = outer_.data() + (size_t) head * triangle(d_);
    if (n_[(size_t) head] == 0) {
        std::copy_n(x, d, origin);
    }
    n_[(size_t) head] += n;
    for (size_t i = 0; i < d; i++) {
        float part = 0.0f;
        for (size_t t = 0; t < (size_t) n; t++) {
            x[t * ld + i] -= origin[i];
            across[i * (size_t) n + t] = x[t * ld + i];
            part += x[t * ld + i];
        }
        sum[i] += (double) part;
    }
    for (size_t i0 = 0; i0 < d; i0 += TILE) {
        const auto rows = (int32_t) std::min(d - i0, (size_t) TILE);
        std::fill_n(tile, (size_t) rows * ld, 0.0f);
        kernels().gemm_pv({ across + i0 * (size_t) n, (size_t) n }, rows, n, { x + i0, ld }, (int32_t) (d - i0), tile);
        for (size_t i = i0; i < i0 + (size_t) rows; i++) {
            double *      to   = outer + row(i);
            const float * from = tile + (i - i0) * ld - i0;
            for (size_t j = i; j < d; j++) {
                *to++ += (double) from[j];
            }
        }
    }
}

void QueryMoments::read(int32_t head, std::vector<double> & mean, std::vector<double> & covariance) const {
    const auto     d = (size_t) d_;
    const double   n = (double) n_[(size_t) head];
    const double * sum   = sum_.data() + (size_t) head * d;
    const double * outer = outer_.data() + (size_t) head * triangle(d_);
    mean.resize(d);
    covariance.resize(d * d);
    for (size_t i = 0; i < d; i++) {
        mean[i] = (double) origin_[(size_t) head * d + i] + sum[i] / n;
        for (size_t j = i; j < d; j++) {
            covariance[i * d + j] = covariance[j * d + i] = *outer++ / n - sum[i] / n * sum[j] / n;
        }
    }
}

uint64_t QueryMoments::bytes() const {
    return n_.capacity() * sizeof(int32_t) + origin_.capacity() * sizeof(float) + (sum_.capacity() + outer_.capacity()) * sizeof(double);
}

uint64_t QueryMoments::bytes(int32_t n_heads, int32_t d) {
    return (uint64_t) n_heads *
           (sizeof(int32_t) + (uint64_t) d * (sizeof(float) + sizeof(double)) + triangle(d) * sizeof(double));
}

bool MomentsScratch::reserve(int32_t d) {
    ld = (size_t) pad16(d);
    const size_t n_x = (size_t) (BLOCK + 1) * ld, n_across = (size_t) BLOCK * (size_t) d;  // a tile's columns may end in the next row
    const size_t n_tile = (size_t) QueryMoments::TILE * ld, n_turns = (size_t) BLOCK * (size_t) (d / 2);
    const size_t need   = (n_x + n_across + n_tile + 2 * n_turns) * sizeof(float);
    if (memory_.size() < need) {
        memory_ = Pages();
        memory_ = Pages::take(need);
        if (!memory_) {
            return false;
        }
    }
    x      = (float *) memory_.data();
    across = x + n_x;
    tile   = across + n_across;
    cos    = tile + n_tile;
    sin    = cos + n_turns;
    return true;
}

}  // namespace kvedge
