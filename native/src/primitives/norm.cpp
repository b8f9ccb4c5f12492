#include "primitives/norm.h"

#include <cmath>

namespace kvedge {

void score_norms(const ScoreInput & in, bool of_values, float sign, float * out) {
    const LayerShape & shape = in.seq->shapes()[(size_t) in.layer];
    const Kernels &    kn    = kernels();
    const auto         d     = (size_t) (of_values ? shape.d_v : shape.d_k);
    std::vector<float> row(d);
    for (int32_t h = 0; h < shape.n_heads_kv; h++) {
        in.seq->each_segment(in.layer, h, true, [&](const Segment & seg) {
            const Rows & rows = of_values ? seg.v : seg.k;
            for (int32_t r = 0; r < seg.n; r++) {
                kn.widen(rows.from(r), 1, (int32_t) d, row.data(), d);
                *out++ = sign * std::sqrt(kn.dot(row.data(), row.data(), d));
            }
        });
    }
}

}  // namespace kvedge
