// The layers whose keys and values kvedge stores, as the first graph showed them: shapes, devices, rotations, sinks, and the operations
// that replace the layers' attention in graphs.

#pragma once

#include "compress/projection.h"
#include "llama-attn-provider.h"
#include "observe/rotation.h"
#include "rows/rows.h"

#include "ggml-backend.h"

#include <memory>
#include <vector>

struct kvedge_cache;

namespace kvedge {

// User data of the operations of one layer.
struct LayerOp {
    kvedge_cache * kv;
    int32_t        layer;  // index into Layers::shapes
    float          scale;
    int32_t        reader = -1;  // model number of a layer without rows, which reads the rows of `layer`; -1: `layer` itself
};

struct Layers {
    int32_t                                       n_model = 0;  // layers of the model, stored or not
    std::vector<LayerShape>                       shapes;
    std::vector<std::unique_ptr<LayerOp>>         ops;      // one for each of shapes; graphs keep their addresses
    std::vector<std::unique_ptr<LayerOp>>         readers;  // of layers that read another layer's rows; graphs keep their addresses
    std::vector<ggml_backend_dev_t>               devices;  // for each of shapes: the device of its rows; NULL: the host
    std::shared_ptr<Rotations>                    rotations = std::make_shared<Rotations>();  // for each of shapes
    std::shared_ptr<Projections>                  projections;                                // for each of shapes
    std::vector<std::vector<float>>               sinks;  // for each of shapes: logits of attention sinks, if the layer lies on a device
    const char *                                  unread = nullptr;  // why a layer cannot read the rows that it shares; NULL: it can
    bool                                          declined = false;  // a full-attention layer stayed with llama.cpp

    // Returns the layer with number il of the model; NULL: not stored.
    LayerOp * find(int32_t il) const;
    // Adds a layer. Throws std::bad_alloc, and then nothing was added.
    LayerOp * add(const llama_attn_provider_layer & layer, ggml_backend_dev_t place, kvedge_cache * kv);

    bool    all_of_model() const { return (int32_t) shapes.size() == n_model; }
    bool    has_sinks() const;       // whether a layer on a device has attention sinks
    int32_t on_devices() const;      // number of layers on devices
    int32_t most_kv_heads() const;
    int32_t widest_key() const;

    bool holds(int32_t i) const { return i >= 0 && (size_t) i < shapes.size(); }
    bool holds(int32_t i, int32_t head) const { return holds(i) && head >= 0 && head < shapes[(size_t) i].n_heads_kv; }
};

}  // namespace kvedge
