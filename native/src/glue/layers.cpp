#include "glue/layers.h"

#include "glue/rotation.h"

#include <algorithm>

namespace kvedge {

LayerOp * Layers::find(int32_t il) const {
    const auto op = std::find_if(ops.begin(), ops.end(), [&](const auto & o) { return shapes[(size_t) o->layer].il == il; });
    return op == ops.end() ? nullptr : op->get();
}

LayerOp * Layers::add(const llama_attn_provider_layer & layer, ggml_backend_dev_t place, kvedge_cache * kv) {
    const size_t n     = shapes.size() + 1;
    auto         op    = std::make_unique<LayerOp>(LayerOp{ kv, (int32_t) shapes.size(), layer.scale });
    auto         turns = rotation_of(layer);
    shapes.reserve(n);
    devices.reserve(n);
    sinks.reserve(n);
    rotations->reserve(n);
    ops.reserve(n);
    shapes.push_back({ layer.il, (int32_t) layer.q->ne[1], (int32_t) layer.k->ne[1], (int32_t) layer.k->ne[0],
                       (int32_t) layer.v->ne[0], layer.softcap });
    devices.push_back(place);
    sinks.emplace_back();
    rotations->push_back(std::move(turns));
    ops.push_back(std::move(op));
    return ops.back().get();
}

bool Layers::has_sinks() const {
    return std::any_of(sinks.begin(), sinks.end(), [](const auto & s) { return !s.empty(); });
}

int32_t Layers::on_devices() const {
    return (int32_t) std::count_if(devices.begin(), devices.end(), [](auto * place) { return place != nullptr; });
}

int32_t Layers::most_kv_heads() const {
    int32_t most = 1;
    for (const LayerShape & s : shapes) {
        most = std::max(most, s.n_heads_kv);
    }
    return most;
}

int32_t Layers::widest_key() const {
    int32_t widest = 0;
    for (const LayerShape & s : shapes) {
        widest = std::max(widest, s.d_k);
    }
    return widest;
}

}  // namespace kvedge
