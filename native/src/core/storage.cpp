#include "core/storage.h"

#include "core/error.h"

using namespace kvedge;

bool kvedge::make_storage(int32_t k, int32_t v, Storage & out) {
    if (!kvedge_type_name(k) || !kvedge_type_name(v)) {
        return false;
    }
    out = { of_keys((Type) k), (Type) v };
    return true;
}

kvedge_status kvedge::check_storage(const Storage & storage, int32_t d_k, int32_t d_v, kvedge_error * err) {
    const bool k = is_quantised(storage.k) && d_k % GROUP != 0;
    if (k || (is_quantised(storage.v) && d_v % GROUP != 0)) {
        return fail(err, KVEDGE_E_UNSUPPORTED,
                    "the model's %s have %d numbers a head, and this storage type takes a multiple of %d; use f16, bf16 or f32",
                    k ? "keys" : "values", k ? d_k : d_v, GROUP);
    }
    return KVEDGE_OK;
}

extern "C" const char * kvedge_type_name(int32_t type) try {
    return type >= 0 && type < MOST_TYPES ? FORMATS.of[type].name : nullptr;
} catch (...) {
    return nullptr;
}

extern "C" int32_t kvedge_type_bytes(int32_t type) try {
    return kvedge_type_name(type) ? (int32_t) row_bytes((Type) type, GROUP) : 0;
} catch (...) {
    return 0;
}
