// Quantised rows as plain ones, where they lie: before a later message, which is read in plain f16 as every prompt is.

#include "device/graph_rows.h"

namespace kvedge {

using T = ggml_tensor *;

namespace {

// From k and v [d, slots, lists] to those of a group. One list at a time, so that the f32 in between stays small.
bool convert(Worker & worker, ggml_backend_dev_t device, const T (&from)[2], const T (&to)[2], int32_t n_threads) {
    constexpr size_t EACH  = 5;  // tensors of a list
    const int64_t    lists = from[0]->ne[2];
    Sketch           sketch(EACH * 2 * (size_t) lists);
    ggml_context *   c    = sketch.context.get();
    const auto       list = [&](T x, int64_t i) { return ggml_view_2d(c, x, x->ne[0], x->ne[1], x->nb[1], (size_t) i * x->nb[2]); };
    for (int64_t i = 0; i < 2 * lists; i++) {
        sketch.add(ggml_cpy(c, ggml_cast(c, list(from[i / lists], i % lists), GGML_TYPE_F32), list(to[i / lists], i % lists)));
    }
    return !lacking(device, sketch.graph) && worker.make_room(device, sketch.graph, n_threads) && worker.compute(sketch.graph);
}

}  // namespace

bool GraphRows::make_plain(int32_t n_threads) {
    form_.storage = form_.storage.plain();
    for (size_t l = 0; l < layers_.size(); l++) {
        for (Group & group : layers_[l].groups) {
            const Room quantised = group;
            if (!quantised.k) {
                continue;
            }
            group.k = group.v = nullptr;
            if (!make_group(l, group, group.slots) || !convert(inputs_[layers_[l].inputs].worker, layers_[l].device,
                                                               { quantised.k, quantised.v }, { group.k, group.v }, n_threads)) {
                static_cast<Room &>(group) = quantised;
                return false;
            }
        }
    }
    return true;
}

}  // namespace kvedge
