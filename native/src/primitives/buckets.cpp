#include "primitives/buckets.h"

#include "kernels/kernels.h"
#include "primitives/merge.h"

#include <algorithm>

namespace kvedge {

namespace {

// Averages one matrix of rows, [T][d] to [n_kept][d]. in.scratch becomes the mass of each bucket.
void average(const ReduceInput & in, const float * rows, size_t d, const Anchors & anchors, float * out) {
    float * mass = in.scratch;
    for (int32_t j = 0; j < in.n_kept; j++) {
        mass[j] = mass_of(in, anchors.mass, in.kept[j]);
        std::transform(rows + (size_t) in.kept[j] * d, rows + (size_t) (in.kept[j] + 1) * d, out + (size_t) j * d,
                       [m = mass[j]](float x) { return m * x; });
    }
    int32_t anchor = anchors.first, kept = 0;
    for (int32_t t = 0; t < in.n_tokens && anchors.first < anchors.last; t++) {
        if (kept < in.n_kept && in.kept[kept] == t) {
            kept++;
            continue;
        }
        // the next anchor is the nearer one only if it is strictly nearer
        while (anchor + 1 < anchors.last && in.kept[anchor + 1] - t < t - in.kept[anchor]) {
            anchor++;
        }
        const float m = mass_of(in, anchors.mass, t);
        kernels().axpy(m, rows + (size_t) t * d, out + (size_t) anchor * d, d);
        mass[anchor] += m;
    }
    for (int32_t j = 0; j < in.n_kept; j++) {
        if (mass[j] == mass_of(in, anchors.mass, in.kept[j])) {
            std::copy_n(rows + (size_t) in.kept[j] * d, d, out + (size_t) j * d);  // a row that nothing joined is not rounded
            continue;
        }
        for (size_t i = 0; i < d; i++) {
            out[(size_t) j * d + i] /= mass[j];
        }
    }
}

}  // namespace

void merge_buckets(const ReduceInput & in, const Anchors & anchors, const ReducedRows & out) {
    average(in, in.k, (size_t) in.d_k, anchors, out.k);
    average(in, in.v, (size_t) in.d_v, anchors, out.v);
    for (int32_t j = 0; anchors.mass && j < in.n_kept; j++) {
        if (in.scratch[j] > mass_of(in, true, in.kept[j])) {
            out.bias[j] = bias_of(in.scratch[j]);
        }
    }
}

}  // namespace kvedge
