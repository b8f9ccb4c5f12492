// Tests kvedge_encoder with tensors made by hand, in place of the results that a scheduler passes to kvedge_encoder_eval.

#include "check.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "kvedge.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

constexpr size_t SIZE = 1u << 20;

struct Results {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), SIZE);
    uint8_t *             data   = (uint8_t *) ggml_backend_buffer_get_base(buffer);

    explicit Results(ggml_backend_buffer_usage usage) {
        ggml_backend_buffer_set_usage(buffer, usage);
        std::fill(data, data + SIZE, (uint8_t) 1);
    }
    ~Results() { ggml_backend_buffer_free(buffer); }

    ggml_tensor named(const char * name) const {
        ggml_tensor t{};
        t.buffer = buffer;
        strncpy(t.name, name, sizeof(t.name) - 1);
        return t;
    }
    size_t held() const { return (size_t) std::count(data, data + SIZE, 1); }
};

struct Seen {
    std::vector<int32_t> layers;
    int32_t              stop_at = -1;
};

bool look(int32_t layer, void * user_data) {
    auto & seen = *(Seen *) user_data;
    seen.layers.push_back(layer);
    return layer != seen.stop_at;
}

void test_release() {
    kvedge_encoder * encoder = nullptr;
    CHECK(kvedge_encoder_create(&encoder, nullptr) == KVEDGE_OK);
    CHECK(kvedge_encoder_release(encoder) == 0);
    const Results results(GGML_BACKEND_BUFFER_USAGE_COMPUTE), weights(GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_tensor   t = results.named("norm-0"), w = weights.named("weight"), nowhere{};
    CHECK(!kvedge_encoder_eval(&w, true, encoder) && kvedge_encoder_release(encoder) == 0);
    CHECK(!kvedge_encoder_eval(&t, true, encoder) && !kvedge_encoder_eval(&w, true, encoder));
    CHECK(!kvedge_encoder_eval(&nowhere, true, encoder));
    CHECK(kvedge_encoder_release(encoder) >= SIZE);
    CHECK(weights.held() == SIZE);
#if defined(__linux__)
    CHECK(results.held() < 2 * 4096 * 16);  // pages on the edges of the buffer stay
#endif
    CHECK(kvedge_encoder_release(encoder) == 0);  // frees nothing until the next result
    kvedge_encoder_free(encoder);
}

void test_look() {
    kvedge_encoder * encoder = nullptr;
    CHECK(kvedge_encoder_create(&encoder, nullptr) == KVEDGE_OK);
    const Results results(GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    ggml_tensor   last = results.named("layer_out-12");
    CHECK(!kvedge_encoder_eval(&last, true, encoder));  // no look callback is set
    Seen seen;
    kvedge_encoder_set_look(encoder, look, &seen);
    for (const char * name : { "layer_out", "layer_out-", "layer_out-x", "layer_out-1x", "layer_out--1", "ffn_out-3", "" }) {
        ggml_tensor t = results.named(name);
        CHECK(!kvedge_encoder_eval(&t, true, encoder));
    }
    CHECK(kvedge_encoder_eval(&last, true, encoder) && kvedge_encoder_eval(&last, false, encoder));
    seen.stop_at = 12;
    CHECK(kvedge_encoder_eval(&last, true, encoder) && !kvedge_encoder_eval(&last, false, encoder));
    CHECK((seen.layers == std::vector<int32_t>{ 12, 12 }));
    kvedge_encoder_set_look(encoder, nullptr, nullptr);
    CHECK(!kvedge_encoder_eval(&last, true, encoder) && kvedge_encoder_eval(&last, false, encoder));
    kvedge_encoder_free(encoder);
}

void test_nothing() {
    kvedge_error err{};
    CHECK(kvedge_encoder_create(nullptr, &err) == KVEDGE_E_ARGUMENT && err.message[0]);
    CHECK(!kvedge_encoder_eval(nullptr, true, nullptr) && kvedge_encoder_eval(nullptr, false, nullptr));
    CHECK(kvedge_encoder_release(nullptr) == 0);
    kvedge_encoder_set_look(nullptr, look, nullptr);
    kvedge_encoder_free(nullptr);
}

}  // namespace

int main() {
    test_release();
    test_look();
    test_nothing();
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
