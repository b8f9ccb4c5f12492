#include "primitives/norm.h"

#include "backend/cpu/kernels/kernels.h"

#include <cmath>

namespace kvedge {

void score_norms(const ScoreInput & in, bool of_values, float sign, float * out) {
    const Kernels &    kn = kernels();
    const auto         d  = (size_t) (of_values ? in.shape.d_v : in.shape.d_k);
    std::vector<float> row(d);
    for (int32_t h = 0; h < in.shape.n_heads_kv; h++) {
        const HeadView view = in.view->head(in.layer, h);
        for (const Segment & seg : view.pending) {
            const Rows & rows = of_values ? seg.v : seg.k;
            for (int32_t r = 0; r < seg.n; r++) {
                kn.widen(rows.from(r), 1, (int32_t) d, row.data(), d);
                *out++ = sign * std::sqrt(kn.dot(row.data(), row.data(), d));
            }
        }
    }
}

}  // namespace kvedge
