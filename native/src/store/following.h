#pragma once

#include "store/store.h"

namespace kvedge {

// Returns whether the last n rows of every head belong to the last n tokens.
bool holds_last(const Store & store, int32_t n);

// Appends the last n tokens of `from` and their rows to `to`, which must hold all tokens before them. Rows are rounded to the plain
// types of `to`; equal types are copied exactly. Layers on a device (Store::release_to_device) get tokens, but no rows.
// False: a head of `from` lacks one of the rows, or no memory; nothing changed. Throws std::bad_alloc; then nothing changed.
bool append_last(Store & to, const Store & from, int32_t n);

}  // namespace kvedge
