// How a model turns the queries of a layer, as its graph says.

#pragma once

#include "llama-attn-provider.h"
#include "observe/rotation.h"

namespace kvedge {

// Read off the operations between the projection and the attention; what is not one of those known says so in `unknown`.
// Throws std::bad_alloc.
Rotation rotation_of(const llama_attn_provider_layer & layer);

}  // namespace kvedge
