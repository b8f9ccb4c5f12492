// Storage types as kvedge.h names them.

#pragma once

#include "kvedge.h"
#include "backend/rows.h"

namespace kvedge {

// False: a type that does not exist.
bool make_storage(kvedge_type k, kvedge_type v, Storage & out);

// The kvedge_type of a type of either side, and its name; NULL for a type that does not exist.
int32_t      type_number(Type type);
const char * type_name(int32_t number);

// Errors: KVEDGE_E_UNSUPPORTED (a head size that the types cannot hold).
kvedge_status check_storage(const Storage & storage, int32_t d_k, int32_t d_v, kvedge_error * err);

}  // namespace kvedge
