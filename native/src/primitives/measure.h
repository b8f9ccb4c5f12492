// What scorers look at of pending rows, measured where the store holds them. plan/away.h says what each measure is.

#pragma once

#include "plan/away.h"
#include "plan/stages.h"

namespace kvedge {

// Of the layer that `in` is about. A stream's heads hold different tokens: then `in.heads` says each head's kinds, else `in.image`.
// Where looks.by_kind and no token is an image's, all tokens count. Throws std::bad_alloc.
Measures measure_rows(const ScoreInput & in, const Looks & looks);

// [T] 1 for the tokens of the kind that anchor and deviation are of: the image's, or all where there is none.
std::vector<uint8_t> kind_of(const uint8_t * image, int32_t n_tokens);

}  // namespace kvedge
