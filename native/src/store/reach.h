// The way from a store to rows in the host's memory, for what computes on them where they lie.

#pragma once

#include "store/cpu_rows.h"
#include "store/store.h"

namespace kvedge {

inline CpuRows & cpu_rows(const BlockLayer & layer) { return *static_cast<CpuRows *>(layer.rows.get()); }

// A row of a uniform block.
inline uint8_t * k_row(const Store::Place & at, int32_t layer, int32_t head) {
    return cpu_rows(at.block->layers[(size_t) layer]).k_row(head, at.row);
}
inline uint8_t * v_row(const Store::Place & at, int32_t layer, int32_t head) {
    return cpu_rows(at.block->layers[(size_t) layer]).v_row(head, at.row);
}

// Segments of one head in token order.
template <class F> void each_segment(const Store & store, int32_t layer, int32_t head, const F & visit) {
    for (const Block & block : store.contents().blocks) {
        const BlockLayer & of   = block.layers[(size_t) layer];
        const float *      bias = of.biases(head);
        cpu_rows(of).each_segment(head, [&](Segment segment) {
            segment.bias = bias;
            bias         = bias ? bias + segment.n : nullptr;
            visit(segment);
        });
    }
}

}  // namespace kvedge
