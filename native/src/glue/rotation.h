// How a model rotates the queries of a layer by position, as its graph shows.

#pragma once

#include "llama-attn-provider.h"
#include "observe/rotation.h"

namespace kvedge {

// Finds the rotation in the operations between the projection and the attention. `unknown` of the result names an operation that is not
// supported; `unlike` says how keys differ. Throws std::bad_alloc.
Rotation rotation_of(const llama_attn_provider_layer & layer);

}  // namespace kvedge
