// Storage types as kvedge.h numbers them.

#pragma once

#include "kvedge.h"
#include "backend/rows.h"

namespace kvedge {

// False: a type that does not exist.
bool make_storage(int32_t k, int32_t v, Storage & out);

// Errors: KVEDGE_E_UNSUPPORTED (a head size that the types cannot hold).
kvedge_status check_storage(const Storage & storage, int32_t d_k, int32_t d_v, kvedge_error * err);

}  // namespace kvedge
