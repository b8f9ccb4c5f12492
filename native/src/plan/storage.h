// Storage types as kvedge.h numbers them.

#pragma once

#include "kvedge.h"
#include "rows/rows.h"

#include <vector>

namespace kvedge {

constexpr kvedge_options DEFAULT_OPTIONS = { sizeof(kvedge_options), KVEDGE_TYPE_F16, 0, true, KVEDGE_TYPE_SAME, KVEDGE_TYPE_SAME, 0,
                                             KVEDGE_DEVICES_AUTO, KVEDGE_ROTATE_AUTO };

// Options over the defaults, with type_k and type_v said in full. NULL: there are none. False: they cannot be.
bool read_options(const kvedge_options * given, kvedge_options & o);

// False: a type that does not exist.
bool make_storage(int32_t k, int32_t v, Storage & out);

// Errors: KVEDGE_E_UNSUPPORTED (a head size that the types cannot hold).
kvedge_status check_storage(const Storage & storage, int32_t d_k, int32_t d_v, kvedge_error * err);

// Whether rows of a type are ever rotated: quantised ones that share no scale per channel.
inline bool can_rotate(Type t) { return is_quantised(t) && !format(t).residual; }

// Has keys and values rotated, each as far as `how` and the layers say (kvedge_rotate). Errors: KVEDGE_E_UNSUPPORTED
// (KVEDGE_ROTATE_ON for types or head sizes that are not rotated).
kvedge_status rotate_storage(Storage & storage, kvedge_rotate how, const std::vector<LayerShape> & shapes, kvedge_error * err);

}  // namespace kvedge
