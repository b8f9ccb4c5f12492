// Observes an image encoder of libmtmd. llama.cpp's scheduler asks for every result whether it is wanted, and computes up to the next
// wanted result.

#include "system/error.h"
#include "ggml.h"
#include "glue/intermediate.h"
#include "kvedge.h"

#include <cstdlib>
#include <cstring>
#include <new>

using namespace kvedge;

struct kvedge_encoder {
    Intermediate        results;
    kvedge_encoder_look look      = nullptr;
    void *              user_data = nullptr;
};

// Returns the layer whose output a result is, from the name that libmtmd gives the result; -1: another result.
static int32_t layer_of(const ggml_tensor & result) {
    static constexpr char   NAME[] = "layer_out-";
    static constexpr size_t LENGTH = sizeof(NAME) - 1;
    if (strncmp(result.name, NAME, LENGTH) != 0) {
        return -1;
    }
    char *     end   = nullptr;
    const long layer = strtol(result.name + LENGTH, &end, 10);
    return end != result.name + LENGTH && *end == '\0' && layer >= 0 && layer < (1 << 20) ? (int32_t) layer : -1;
}

extern "C" kvedge_status kvedge_encoder_create(kvedge_encoder ** out, kvedge_error * err) try {
    if (!out) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_encoder_create: out is NULL");
    }
    *out = new (std::nothrow) kvedge_encoder();
    return *out ? ok(err) : fail(err, KVEDGE_E_MEMORY, "no memory for an encoder");
} catch (...) {
    return caught(err, "watch an encoder");
}

extern "C" void kvedge_encoder_free(kvedge_encoder * encoder) try {
    delete encoder;
} catch (...) {
}

extern "C" void kvedge_encoder_set_look(kvedge_encoder * encoder, kvedge_encoder_look look, void * user_data) try {
    if (encoder) {
        encoder->look      = look;
        encoder->user_data = user_data;
    }
} catch (...) {
}

extern "C" bool kvedge_encoder_eval(ggml_tensor * tensor, bool ask, void * encoder) try {
    auto * e = (kvedge_encoder *) encoder;
    if (!e || !tensor) {
        return !ask;  // ask: the result is not wanted; else: go on
    }
    if (ask) {
        e->results.note(tensor);
        return e->look && layer_of(*tensor) >= 0;
    }
    return !e->look || e->look(layer_of(*tensor), e->user_data);
} catch (...) {
    return false;
}

extern "C" uint64_t kvedge_encoder_release(kvedge_encoder * encoder) try {
    return encoder ? encoder->results.release() : 0;
} catch (...) {
    return 0;
}
