// Compares OWN_JOINS with sums in double precision.
//
//   test_joins [DEVICE [time]]      DEVICE: name of a ggml device; time: also print the time of a layer

#include "check.h"
#include "device.h"
#include "device/own.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

namespace {

using Floats = std::vector<float>;

std::mt19937 rng(5);

Floats random_rows(size_t n) {
    std::normal_distribution<float> normal;
    Floats                          out(n);
    std::generate(out.begin(), out.end(), [&] { return normal(rng); });
    return out;
}

void set(ggml_tensor * t, const Floats & x) {
    std::vector<uint8_t> bytes(ggml_nbytes(t));
    const auto           n = (int64_t) x.size();
    switch (t->type) {
        case GGML_TYPE_F16: ggml_fp32_to_fp16_row(x.data(), (ggml_fp16_t *) bytes.data(), n); break;
        case GGML_TYPE_BF16: ggml_fp32_to_bf16_row(x.data(), (ggml_bf16_t *) bytes.data(), n); break;
        default: std::memcpy(bytes.data(), x.data(), bytes.size());
    }
    ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
}

Floats get(const ggml_tensor * t) {
    std::vector<uint8_t> bytes(ggml_nbytes(t));
    Floats               out((size_t) ggml_nelements(t));
    ggml_backend_tensor_get(t, bytes.data(), 0, bytes.size());
    switch (t->type) {
        case GGML_TYPE_F16: ggml_fp16_to_fp32_row((const ggml_fp16_t *) bytes.data(), out.data(), (int64_t) out.size()); break;
        case GGML_TYPE_BF16: ggml_bf16_to_fp32_row((const ggml_bf16_t *) bytes.data(), out.data(), (int64_t) out.size()); break;
        default: std::memcpy(out.data(), bytes.data(), bytes.size());
    }
    return out;
}

// A graph of OWN_JOINS with a given number of members for each sum, over random rows. Sums go to every second slot.
struct Joining {
    ggml_context_ptr        context;
    ggml_backend_buffer_ptr buffer;
    ggml_cgraph *           graph = nullptr;
    ggml_tensor *           from[2], *to[2], *lists, *out;
    std::vector<int32_t>    all;
    size_t                  n;

    Joining(ggml_backend_t backend, ggml_type type, int64_t d_k, int64_t d_v, int64_t rows, const std::vector<int32_t> & members) : n(members.size()) {
        std::uniform_real_distribution<float> factor(0.1f, 0.9f);
        std::vector<int32_t>                  rest;
        for (size_t i = 0; i < n; i++) {
            all.insert(all.end(), { (int32_t) (2 * i), (int32_t) rest.size() / 2 });
            for (int32_t m = 0; m < members[i]; m++) {
                const float x = factor(rng) / (float) members[i];
                rest.push_back((int32_t) (rng() % (uint32_t) rows));
                rest.push_back(0);
                std::memcpy(&rest.back(), &x, sizeof(x));
            }
        }
        all.insert(all.end(), { 0, (int32_t) rest.size() / 2 });
        all.insert(all.end(), rest.begin(), rest.end());

        context.reset(ggml_init({ 8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
        ggml_context * c = context.get();
        for (size_t i = 0; i < 2; i++) {
            from[i] = ggml_new_tensor_2d(c, type, i == 0 ? d_k : d_v, rows);
            to[i]   = ggml_new_tensor_2d(c, type, i == 0 ? d_k : d_v, (int64_t) (2 * n));
        }
        lists = ggml_new_tensor_2d(c, GGML_TYPE_I32, 2, (int64_t) all.size() / 2);
        out   = ggml_view_2d(c, to[0], d_k, (int64_t) (2 * n), to[0]->nb[1], 0);
        out->op                      = GGML_OP_FLASH_ATTN_EXT;
        out->src[0]                  = from[0];
        out->src[1]                  = from[1];
        out->src[2]                  = to[1];
        out->src[5]                  = lists;
        out->op_params[OWN_KIND]     = OWN_JOINS;
        out->op_params[OWN_KIND + 1] = (int32_t) n;
        graph                        = ggml_new_graph(c);
        ggml_build_forward_expand(graph, out);
        buffer.reset(ggml_backend_alloc_ctx_tensors(c, backend));
        CHECK(buffer && ggml_backend_supports_op(backend, out));
        for (size_t i = 0; i < 2; i++) {
            set(from[i], random_rows((size_t) ggml_nelements(from[i])));
            set(to[i], Floats((size_t) ggml_nelements(to[i]), 7.0f));
        }
        ggml_backend_tensor_set(lists, all.data(), 0, ggml_nbytes(lists));
    }

    void check(const char * what) const {
        for (size_t i = 0; i < 2; i++) {
            const Floats  x = get(from[i]), y = get(to[i]);
            const auto    d     = (size_t) from[i]->ne[0];
            const double  close = from[i]->type == GGML_TYPE_F32 ? 1e-5 : from[i]->type == GGML_TYPE_F16 ? 1e-3 : 8e-3;
            const int32_t * rows = all.data() + 2 * (n + 1);
            double          most = 0.0;
            for (size_t s = 0; s < n; s++) {
                for (size_t c = 0; c < d; c++) {
                    double sum = 0.0;
                    for (int32_t m = all[2 * s + 1]; m < all[2 * s + 3]; m++) {
                        float factor;
                        std::memcpy(&factor, &rows[2 * m + 1], sizeof(factor));
                        sum += (double) factor * (double) x[(size_t) rows[2 * m] * d + c];
                    }
                    const double far = std::fabs(sum - (double) y[2 * s * d + c]);
                    most             = far > most || std::isnan(far) ? far : most;
                    CHECK(y[(2 * s + 1) * d + c] == 7.0f);
                }
            }
            if (!(most <= close)) {
                std::fprintf(stderr, "%s, %s of %zu: %g\n", what, i == 0 ? "keys" : "values", d, most);
                failures()++;
            }
        }
    }
};

// Prints the time of a layer's sums, as in a compression to a fifth: a few kept rows get most of the evicted rows.
void time_layer(ggml_backend_t backend, int64_t heads, int64_t tokens, double crowd) {
    std::vector<int32_t> members((size_t) (heads * tokens / 5));
    int64_t              left = heads * tokens;
    for (size_t i = 0; i < members.size(); i++) {
        members[i] = (int32_t) std::min<double>(2.0 + crowd / (double) (i / (size_t) heads + 1), (double) left / 2.0);
        left -= members[i];
    }
    for (size_t i = 0; left > 0; i = (i + 1) % members.size()) {
        members[i]++;
        left--;
    }
    std::shuffle(members.begin(), members.end(), rng);
    const Joining x(backend, GGML_TYPE_F16, 128, 128, heads * tokens, members);
    double        best = 1e300;
    for (int round = 0; round < 10; round++) {
        const auto begin = std::chrono::steady_clock::now();
        CHECK(ggml_backend_graph_compute(backend, x.graph) == GGML_STATUS_SUCCESS);
        best = std::min(best, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    std::printf("%2lld heads, %6lld tokens, largest sum %6d: %8.1f us, %6.1f GB/s\n", (long long) heads, (long long) tokens,
                *std::max_element(members.begin(), members.end()), best, (double) (heads * tokens) * 520.0 / best * 1e-3);
}

}  // namespace

int main(int argc, char ** argv) {
    const auto device = argc > 1 ? device_named(argv[1]) : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!device) {
        return 1;
    }
    const ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    for (const int64_t heads : { 2, 16 }) {
        for (const int64_t tokens : { 2048, 16384 }) {
            for (const double crowd : { 0.0, 1000.0 }) {
                argc > 2 ? time_layer(backend.get(), heads, tokens, crowd) : (void) 0;
            }
        }
    }
    const std::vector<int32_t> members = { 2, 3, 1, 500, 64, 65, 9, 2, 63, 66, 5, 0, 3000, 2, 17, 8, 33, 2, 129 };
    for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32 }) {
        for (const int64_t d : { 8, 64, 72, 80, 128, 256, 512 }) {
            for (const int64_t d_v : { d, (int64_t) 48 }) {
                const Joining x(backend.get(), type, d, d_v, 700, members);
                CHECK(ggml_backend_graph_compute(backend.get(), x.graph) == GGML_STATUS_SUCCESS);
                x.check(ggml_type_name(type));
            }
        }
    }
    return failures() == 0 ? 0 : 1;
}
