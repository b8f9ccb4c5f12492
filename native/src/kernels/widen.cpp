#include "kernels/widen.h"

#include "kernels/kernels.h"

namespace kvedge {

size_t widen_rows(const std::vector<Segment> & segments, const LayerShape & shape, float * k, float * v) {
    const auto dk = (size_t) shape.d_k, dv = (size_t) shape.d_v;
    size_t     n  = 0;
    for (const Segment & s : segments) {
        kernels().widen(s.k, s.n, shape.d_k, k + n * dk, dk);
        kernels().widen(s.v, s.n, shape.d_v, v + n * dv, dv);
        n += (size_t) s.n;
    }
    return n;
}

}  // namespace kvedge
