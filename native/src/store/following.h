// Tokens that follow in one store as they do in another.

#pragma once

#include "store/store.h"

namespace kvedge {

// Whether the last n rows of every head are those of the last n tokens.
bool holds_last(const Store & store, int32_t n);

// Enters the last n tokens of `from` into `to`, which holds all tokens before them, with their rows: as they are where both store
// the same plain type, else rounded to `to`'s; none of a layer that is away (Store::send_away). False: a head of `from` does not hold all
// of them, or there is no memory; nothing changed. Throws std::bad_alloc, and nothing has changed.
bool append_last(Store & to, const Store & from, int32_t n);

}  // namespace kvedge
