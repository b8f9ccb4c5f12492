// Measures what scorers look at in pending rows, where the store holds the rows. plan/device_rows.h defines each measure.

#pragma once

#include "plan/device_rows.h"
#include "plan/stages.h"

namespace kvedge {

// Measures the layer in.layer. The heads of a stream hold different tokens: then `in.heads` has each head's kinds, else `in.image`. With
// wanted.by_kind, all tokens count if no token is an image's. Throws std::bad_alloc.
Measures measure_rows(const ScoreInput & in, const WantedMeasures & wanted);

// Returns [T] 1 for the tokens that anchor and deviation cover: image tokens, or all tokens if none is an image's.
std::vector<uint8_t> kind_of(const uint8_t * image, int32_t n_tokens);

}  // namespace kvedge
