// The output projections of a model, as it has them in memory.

#pragma once

#include "compress/projection.h"

struct llama_model;

namespace kvedge {

// shapes: of the stored layers, which are read as they are when they are asked for. Nothing is read here.
// Throws std::bad_alloc.
std::shared_ptr<const OutputWeights> model_weights(const llama_model * model, const std::vector<LayerShape> & shapes);

}  // namespace kvedge
