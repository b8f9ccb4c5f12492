#include "core/storage.h"

#include "core/error.h"

namespace kvedge {

bool make_storage(kvedge_type k, kvedge_type v, Storage & out) {
    constexpr Type KEYS[]   = { Type::f16, Type::bf16, Type::f32, Type::q8_0, Type::q4_0, Type::kivi4_k, Type::kivi2_k };
    constexpr Type VALUES[] = { Type::f16, Type::bf16, Type::f32, Type::q8_0, Type::q4_0, Type::kivi4_v, Type::kivi2_v };
    const auto     known    = [](kvedge_type t) { return t >= KVEDGE_TYPE_F16 && t <= KVEDGE_TYPE_KIVI2; };
    if (!known(k) || !known(v)) {
        return false;
    }
    out = { KEYS[k], VALUES[v] };
    return true;
}

int32_t type_number(Type type) {
    switch (type) {
        case Type::f16:     return KVEDGE_TYPE_F16;
        case Type::bf16:    return KVEDGE_TYPE_BF16;
        case Type::f32:     return KVEDGE_TYPE_F32;
        case Type::q8_0:    return KVEDGE_TYPE_Q8_0;
        case Type::q4_0:    return KVEDGE_TYPE_Q4_0;
        case Type::kivi4_k:
        case Type::kivi4_v: return KVEDGE_TYPE_KIVI4;
        case Type::kivi2_k:
        case Type::kivi2_v: return KVEDGE_TYPE_KIVI2;
    }
    return KVEDGE_TYPE_F16;
}

const char * type_name(int32_t number) {
    static const char * const names[] = { "f16", "bf16", "f32", "q8_0", "q4_0", "kivi4", "kivi2" };
    return number >= 0 && number < (int32_t) (sizeof(names) / sizeof(*names)) ? names[number] : nullptr;
}

kvedge_status check_storage(const Storage & storage, int32_t d_k, int32_t d_v, kvedge_error * err) {
    const bool k = is_quantised(storage.k) && d_k % GROUP != 0;
    if (k || (is_quantised(storage.v) && d_v % GROUP != 0)) {
        return fail(err, KVEDGE_E_UNSUPPORTED,
                    "the model's %s have %d numbers a head, and this storage type takes a multiple of %d; use f16, bf16 or f32",
                    k ? "keys" : "values", k ? d_k : d_v, GROUP);
    }
    return KVEDGE_OK;
}

}  // namespace kvedge
