// Storage options (kvedge_options): the types of keys and values, their checks, and rotation.

#pragma once

#include "kvedge.h"
#include "rows/rows.h"

#include <vector>

namespace kvedge {

constexpr kvedge_options DEFAULT_OPTIONS = { sizeof(kvedge_options), KVEDGE_TYPE_F16, 0, true, KVEDGE_TYPE_SAME, KVEDGE_TYPE_SAME, 0,
                                             KVEDGE_DEVICES_AUTO, KVEDGE_ROTATE_AUTO };

// Copies `given` over the defaults in `o`, and replaces KVEDGE_TYPE_SAME by the type. NULL: keeps the defaults. False: invalid options.
bool read_options(const kvedge_options * given, kvedge_options & o);

// Makes a storage of the types with numbers k and v. False: an unknown type.
bool make_storage(int32_t k, int32_t v, Storage & out);

// Checks that the storage types can hold heads of d_k and d_v numbers. Errors: KVEDGE_E_UNSUPPORTED.
kvedge_status check_storage(const Storage & storage, int32_t d_k, int32_t d_v, kvedge_error * err);

// Returns whether rows of a type can be rotated: only quantised types without a scale per channel.
inline bool can_rotate(Type t) { return is_quantised(t) && !format(t).residual; }

// Changes the types of keys and values to rotated types, if `how` (kvedge_rotate) and the head sizes of the layers allow it.
// Errors: KVEDGE_E_UNSUPPORTED (KVEDGE_ROTATE_ON with a type or head size that cannot be rotated).
kvedge_status rotate_storage(Storage & storage, kvedge_rotate how, const std::vector<LayerShape> & shapes, kvedge_error * err);

}  // namespace kvedge
