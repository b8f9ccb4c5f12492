#include "primitives/buckets.h"

#include "backend/cpu/kernels/kernels.h"

#include <algorithm>

namespace kvedge {

namespace {

// One matrix of rows, [T][d] to [n_kept][d].
void average(const ReduceInput & in, const float * rows, size_t d, int32_t first, int32_t last, float * out) {
    for (int32_t j = 0; j < in.n_kept; j++) {
        std::copy_n(rows + (size_t) in.kept[j] * d, d, out + (size_t) j * d);
    }
    int32_t anchor = first, kept = 0;
    float * counts = in.scratch;
    std::fill(counts, counts + in.n_kept, 1.0f);
    for (int32_t t = 0; t < in.n_tokens && first < last; t++) {
        if (kept < in.n_kept && in.kept[kept] == t) {
            kept++;
            continue;
        }
        // the next anchor is the nearer one only if it is strictly nearer
        while (anchor + 1 < last && in.kept[anchor + 1] - t < t - in.kept[anchor]) {
            anchor++;
        }
        kernels().axpy(1.0f, rows + (size_t) t * d, out + (size_t) anchor * d, d);
        counts[anchor] += 1.0f;
    }
    for (int32_t j = first; j < last; j++) {
        for (size_t i = 0; i < d; i++) {
            out[(size_t) j * d + i] /= counts[j];
        }
    }
}

}  // namespace

void merge_buckets(const ReduceInput & in, int32_t first, int32_t last, float * k, float * v) {
    average(in, in.k, (size_t) in.d_k, first, last, k);
    average(in, in.v, (size_t) in.d_v, first, last, v);
}

}  // namespace kvedge
