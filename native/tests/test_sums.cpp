// Compares OWN_SUMS with a reference in double precision, on the device that the argument names, or on the CPU.

#include "device.h"
#include "check.h"
#include "device/seen.h"

#include "ggml-alloc.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

using namespace kvedge;

namespace {

struct Case {
    int       d, heads_kv, share, n, shown;
    ggml_type type;
    int       from = 0, window = 0;  // window: keys that a query sees, its own included; 0: all keys up to its own
    float     softcap = 0.0f;
    bool      sunk = false, columns = true, squares = true, entropy = true;
    float     size = 1.0f;  // magnitude of queries
};

struct Sums {
    std::vector<double> columns, squares, entropy;
};

struct Numbers {
    std::vector<float>       q, k, sinks;  // [n][H][d], [Hkv][shown][d], [H]
    std::vector<ggml_fp16_t> mask;         // [n][shown]
};

constexpr float START = 0.25f;  // value of the sums before the operation adds to them

float rounded(ggml_type type, float x) {
    return type == GGML_TYPE_F16    ? ggml_fp16_to_fp32(ggml_fp32_to_fp16(x))
           : type == GGML_TYPE_BF16 ? ggml_bf16_to_fp32(ggml_fp32_to_bf16(x))
                                    : x;
}

// Makes inputs: the queries are the last tokens, followed by padding. One query sees nothing; some keys are hidden or have biases.
Numbers numbers_of(const Case & of, uint32_t seed) {
    std::mt19937                    random(seed);
    std::normal_distribution<float> normal;
    Numbers                         x;
    const auto                      fill = [&](std::vector<float> & to, int64_t n, float by) {
        to.resize((size_t) n);
        std::generate(to.begin(), to.end(), [&] { return by * normal(random); });
    };
    const int heads = of.heads_kv * of.share, padding = of.shown > 40 ? 7 : 0;
    fill(x.q, (int64_t) of.n * heads * of.d, 1.5f * of.size);
    fill(x.k, (int64_t) of.heads_kv * of.shown * of.d, 1.0f);
    fill(x.sinks, heads, 2.0f);
    for (float & k : x.k) {
        k = rounded(of.type, k);
    }
    for (int t = 0; t < of.n; t++) {
        const int at = of.shown - padding - of.n + t;
        for (int i = 0; i < of.shown; i++) {
            const bool hidden = i > at || (of.window > 0 && i <= at - of.window) || (of.window > 0 && (t == 1 || i % 97 == 5));
            const bool biased = of.window > 0 && i % 31 == 3;
            x.mask.push_back(ggml_fp32_to_fp16(hidden ? -INFINITY : biased ? 0.75f : 0.0f));
        }
    }
    return x;
}

Sums expected(const Case & of, const Numbers & x) {
    const auto rows = (size_t) (of.shown - of.from), kv = (size_t) of.heads_kv;
    Sums       out  = { std::vector<double>(kv * rows, START), std::vector<double>(kv * rows, START), std::vector<double>(kv, START) };
    for (int h = 0; h < of.heads_kv; h++) {
        for (int t = 0; t < of.n; t++) {
            std::vector<double> both((size_t) of.shown, 0.0);
            for (int g = 0; g < of.share; g++) {
                const int           head = h * of.share + g;
                std::vector<double> w((size_t) of.shown);
                double              most = -INFINITY, all = 0.0;
                for (int i = 0; i < of.shown; i++) {
                    double x_i = 0.0;
                    for (int j = 0; j < of.d; j++) {
                        x_i += (double) x.q[((size_t) t * kv * (size_t) of.share + (size_t) head) * (size_t) of.d + (size_t) j] *
                               (double) x.k[((size_t) h * (size_t) of.shown + (size_t) i) * (size_t) of.d + (size_t) j];
                    }
                    x_i /= std::sqrt((double) of.d);
                    x_i = of.softcap == 0.0f ? x_i : (double) of.softcap * std::tanh(x_i / (double) of.softcap);
                    w[(size_t) i] = x_i + (double) ggml_fp16_to_fp32(x.mask[(size_t) t * (size_t) of.shown + (size_t) i]);
                    most          = std::max(most, w[(size_t) i]);
                }
                if (most == -INFINITY) {
                    continue;
                }
                for (double & one : w) {
                    one = std::exp(one - most);
                    all += one;
                }
                all += of.sunk ? std::exp((double) x.sinks[(size_t) head] - most) : 0.0;
                for (size_t i = 0; i < w.size(); i++) {
                    both[i] += w[i] / all;
                    out.entropy[(size_t) h] += w[i] > 0.0 ? w[i] / all * std::log(w[i] / all) : 0.0;
                }
            }
            for (size_t i = 0; i < rows; i++) {
                out.columns[(size_t) h * rows + i] += both[i + (size_t) of.from];
                out.squares[(size_t) h * rows + i] += both[i + (size_t) of.from] * both[i + (size_t) of.from];
            }
        }
    }
    return out;
}

void send_keys(ggml_tensor * cache, const Case & of, const std::vector<float> & k) {
    const int64_t        many = (int64_t) of.shown * of.d;
    std::vector<uint8_t> rows(ggml_row_size(of.type, many));
    for (int h = 0; h < of.heads_kv; h++) {
        const float * from = k.data() + h * many;
        if (of.type == GGML_TYPE_F16) {
            ggml_fp32_to_fp16_row(from, (ggml_fp16_t *) rows.data(), many);
        } else if (of.type == GGML_TYPE_BF16) {
            ggml_fp32_to_bf16_row(from, (ggml_bf16_t *) rows.data(), many);
        } else {
            std::copy_n((const uint8_t *) from, rows.size(), rows.data());
        }
        ggml_backend_tensor_set(cache, rows.data(), (size_t) h * cache->nb[2], rows.size());
    }
}

// Returns the largest difference between x and `right`, relative to the number or to `small`. unused: x must be unchanged.
double distance(ggml_tensor * x, const std::vector<double> & right, bool unused, double small) {
    std::vector<float> got((size_t) ggml_nelements(x));
    ggml_backend_tensor_get(x, got.data(), 0, ggml_nbytes(x));
    const size_t heads = (size_t) x->ne[1], rows = right.size() / heads;
    double       most = 0.0;
    for (size_t i = 0; i < got.size(); i++) {
        const size_t row = i % (size_t) x->ne[0], head = i / (size_t) x->ne[0];
        const double want = unused || row >= rows ? (double) START : right[head * rows + row];
        const double far  = std::fabs((double) got[i] - want) / (std::fabs(want - (double) START) + small);
        most              = far > most || std::isnan(far) ? far : most;
    }
    return most;
}

void check(ggml_backend_t backend, const Case & of, uint32_t seed) {
    const Numbers    x     = numbers_of(of, seed);
    const Sums       right = expected(of, x);
    const int        heads = of.heads_kv * of.share;
    ggml_context_ptr context(ggml_init({ 16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    ggml_context *   c = context.get();
    // the key tensor and the sums have room for more rows than are used
    ggml_tensor * q     = ggml_new_tensor_3d(c, GGML_TYPE_F32, of.d, heads, of.n);
    ggml_tensor * cache = ggml_new_tensor_3d(c, of.type, of.d, of.shown + 3, of.heads_kv);
    ggml_tensor * mask  = ggml_new_tensor_2d(c, GGML_TYPE_F16, of.shown, of.n);
    ggml_tensor * sinks = of.sunk ? ggml_new_tensor_1d(c, GGML_TYPE_F32, heads) : nullptr;
    ggml_tensor * sums[3];
    for (int i = 0; i < 3; i++) {
        sums[i] = ggml_new_tensor_2d(c, GGML_TYPE_F32, i < 2 ? of.shown - of.from + 5 : 1, of.heads_kv);
    }
    ggml_tensor *    k     = ggml_view_3d(c, cache, of.d, of.shown, of.heads_kv, cache->nb[1], cache->nb[2], 0);
    const GraphLayer layer = { c, q, nullptr, nullptr, sinks, 1.0f / std::sqrt((float) of.d), of.softcap };
    ggml_tensor *    out   = attention_sums(layer, k, mask, { of.columns ? sums[0] : nullptr, of.squares ? sums[1] : nullptr, sums[2], of.from, of.entropy });
    ggml_cgraph *    graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph, out);
    if (!ggml_backend_supports_op(backend, out)) {
        CHECK(of.type == GGML_TYPE_F32);
        return;
    }
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(c, backend));
    ggml_backend_buffer_clear(buffer.get(), 0xff);  // NaN in all unwritten places
    ggml_backend_tensor_set(q, x.q.data(), 0, ggml_nbytes(q));
    ggml_backend_tensor_set(mask, x.mask.data(), 0, ggml_nbytes(mask));
    send_keys(cache, of, x.k);
    if (sinks) {
        ggml_backend_tensor_set(sinks, x.sinks.data(), 0, ggml_nbytes(sinks));
    }
    for (ggml_tensor * one : sums) {
        const std::vector<float> start((size_t) ggml_nelements(one), START);
        ggml_backend_tensor_set(one, start.data(), 0, ggml_nbytes(one));
    }
    CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS);
    // a GPU rounds queries to the type of keys: with magnitude 1 a logit changes by about 1e-3, in bf16 by 1e-2
    const bool   exact = of.type == GGML_TYPE_F32 || ggml_backend_dev_type(ggml_backend_get_device(backend)) == GGML_BACKEND_DEVICE_TYPE_CPU;
    const double close = exact ? 2e-4 : (double) of.size * (of.type == GGML_TYPE_F16 ? 6e-3 : 5e-2), small = exact ? 1e-2 : 0.02;
    const double far[3] = { distance(sums[0], right.columns, !of.columns, small), distance(sums[1], right.squares, !of.squares, small),
                            distance(sums[2], right.entropy, !of.entropy, 1.0) };
    if (!(far[0] < close && far[1] < 2 * close && far[2] < close)) {
        std::fprintf(stderr, "d %d, %d KV heads x %d, %d queries, %d keys from %d, window %d, %s, softcap %g, sinks %d, size %g: %g %g %g\n", of.d, of.heads_kv,
                     of.share, of.n, of.shown, of.from, of.window, ggml_type_name(of.type), (double) of.softcap, of.sunk, (double) of.size, far[0], far[1], far[2]);
        failures()++;
    }
}

}  // namespace

int main(int argc, char ** argv) {
    ggml_backend_dev_t device = device_named(argc > 1 ? argv[1] : "CPU");
    if (!device) {
        return 1;
    }
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    uint32_t         seed = 1;
    for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32 }) {
        for (const int d : { 64, 80, 96, 128, 256 }) {
            check(backend.get(), { d, 2, 1, 200, 330, type }, seed++);
            check(backend.get(), { d, 2, 3, 70, 140, type, 37, 33, 20.0f, true }, seed++);
        }
        check(backend.get(), { 128, 1, 6, 65, 65, type }, seed++);
        check(backend.get(), { 128, 3, 2, 1, 700, type, 650 }, seed++);
        check(backend.get(), { 64, 1, 16, 33, 290, type, 0, 100, 0.0f, false, false, true, false }, seed++);
        check(backend.get(), { 128, 2, 2, 130, 515, type, 64, 0, 0.0f, false, true, false, false }, seed++);
        check(backend.get(), { 128, 2, 1, 64, 1000, type, 0, 0, 0.0f, true, true, true, true, 6.0f }, seed++);  // some logits above 30
        check(backend.get(), { 64, 1, 1, 1, 1, type }, seed++);
    }
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
