// The output projections of a model, read from the model's memory.

#pragma once

#include "compress/projection.h"

struct llama_model;

namespace kvedge {

// Returns a reader of the output projections of the stored layers `shapes`. The weights are read later, when they are asked for.
// Throws std::bad_alloc.
std::shared_ptr<const OutputWeights> model_weights(const llama_model * model, const std::vector<LayerShape> & shapes);

}  // namespace kvedge
