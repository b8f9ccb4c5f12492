#include "plan/storage.h"

#include "system/error.h"
#include "system/structs.h"

using namespace kvedge;

bool kvedge::read_options(const kvedge_options * given, kvedge_options & o) {
    if (given && !read_struct(given, o)) {
        return false;
    }
    o.type_k = o.type_k == KVEDGE_TYPE_SAME ? o.type : o.type_k;
    o.type_v = o.type_v == KVEDGE_TYPE_SAME ? o.type : o.type_v;
    return o.n_threads >= 0 && o.devices >= KVEDGE_DEVICES_AUTO && o.devices <= KVEDGE_DEVICES_ALL && o.rotate >= KVEDGE_ROTATE_AUTO &&
           o.rotate <= KVEDGE_ROTATE_ON;
}

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
                    "the model's %s have %d numbers per head, but this storage type needs a multiple of %d; use f16, bf16 or f32",
                    k ? "keys" : "values", k ? d_k : d_v, GROUP);
    }
    return KVEDGE_OK;
}

kvedge_status kvedge::rotate_storage(Storage & storage, kvedge_rotate how, const std::vector<LayerShape> & shapes, kvedge_error * err) {
    if (how == KVEDGE_ROTATE_ON && !can_rotate(storage.k) && !can_rotate(storage.v)) {
        return fail(err, KVEDGE_E_UNSUPPORTED, "rows of %s:%s cannot be rotated; use q8_0, q4_0 or tq3, or no rotation",
                    format(storage.k).name, format(storage.v).name);
    }
    const struct {
        Type *  type;
        Type    turned;
        int32_t LayerShape::*size;
    } sides[] = { { &storage.k, rotated_keys(storage.k), &LayerShape::d_k }, { &storage.v, rotated_values(storage.v), &LayerShape::d_v } };
    for (const auto & side : sides) {
        bool fits = can_rotate(*side.type), same = true;
        for (const LayerShape & s : shapes) {
            same = same && s.*side.size == shapes[0].*side.size;
            if (fits && s.*side.size % ROTATION != 0) {
                if (how == KVEDGE_ROTATE_ON) {
                    return fail(err, KVEDGE_E_UNSUPPORTED, "heads of %d numbers cannot be rotated, because the size is not a multiple of "
                                "%d; use no rotation", s.*side.size, ROTATION);
                }
                fits = false;
            }
        }
        if (fits && (how == KVEDGE_ROTATE_ON || (how == KVEDGE_ROTATE_AUTO && same))) {
            *side.type = side.turned;
        }
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
