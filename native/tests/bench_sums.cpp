// Compares the time to add up a batch's attention by OWN_SUMS with flash attention of the batch and with ggml operations.
//
//   bench_sums [DEVICE] [tiny]
//
// stdout: milliseconds of 24 layers for the last batch of a prompt with a number of keys; own: each block size of the kernel.

#include "device.h"
#include "device/own.h"
#include "device/seen.h"

#include "ggml-alloc.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

using namespace kvedge;

namespace {

using T = ggml_tensor *;

struct Shape {
    int64_t d, heads, heads_kv;
};

constexpr int LAYERS = 24, COPIES = 4;  // COPIES: layers with different keys

struct Batch {
    ggml_backend_t          backend;
    ggml_context_ptr        context;
    ggml_backend_buffer_ptr buffer;
    T                       q, mask, columns, squares, entropy;
    std::vector<T>          k, v;

    Batch(ggml_backend_t with, const Shape & shape, int64_t n, int64_t shown) : backend(with) {
        context.reset(ggml_init({ 64 * ggml_tensor_overhead(), nullptr, true }));
        ggml_context * c = context.get();
        q       = ggml_new_tensor_3d(c, GGML_TYPE_F32, shape.d, shape.heads, n);
        mask    = ggml_new_tensor_2d(c, GGML_TYPE_F16, shown, n);
        columns = ggml_new_tensor_2d(c, GGML_TYPE_F32, shown, shape.heads_kv);
        squares = ggml_new_tensor_2d(c, GGML_TYPE_F32, shown, shape.heads_kv);
        entropy = ggml_new_tensor_2d(c, GGML_TYPE_F32, 1, shape.heads_kv);
        for (int l = 0; l < COPIES; l++) {
            k.push_back(ggml_new_tensor_3d(c, GGML_TYPE_F16, shape.d, shown, shape.heads_kv));
            v.push_back(ggml_new_tensor_3d(c, GGML_TYPE_F16, shape.d, shown, shape.heads_kv));
        }
        buffer.reset(ggml_backend_alloc_ctx_tensors(c, backend));
        ggml_backend_buffer_clear(buffer.get(), 0);
        std::vector<ggml_fp16_t> rows((size_t) ggml_nelements(k[0])), seen((size_t) (shown * n));
        std::vector<float>       queries((size_t) ggml_nelements(q));
        uint32_t                 random = 1;
        const auto               number = [&] { return (float) ((random = random * 1664525u + 1013904223u) >> 16) / 32768.0f - 1.0f; };
        std::generate(rows.begin(), rows.end(), [&] { return ggml_fp32_to_fp16(2.0f * number()); });
        std::generate(queries.begin(), queries.end(), [&] { return 2.0f * number(); });
        for (int64_t i = 0; i < shown * n; i++) {
            seen[(size_t) i] = ggml_fp32_to_fp16(i % shown <= shown - n + i / shown ? 0.0f : -INFINITY);
        }
        ggml_backend_tensor_set(mask, seen.data(), 0, ggml_nbytes(mask));
        ggml_backend_tensor_set(q, queries.data(), 0, ggml_nbytes(q));
        for (int l = 0; l < COPIES; l++) {
            ggml_backend_tensor_set(k[(size_t) l], rows.data(), 0, ggml_nbytes(k[(size_t) l]));
            ggml_backend_tensor_set(v[(size_t) l], rows.data(), 0, ggml_nbytes(v[(size_t) l]));
        }
    }

    // Returns the milliseconds of a graph of LAYERS layers. layer(context, graph, i) builds a layer over keys and values i.
    double milliseconds(const std::function<void(ggml_context *, ggml_cgraph *, size_t)> & layer, int times) const {
        constexpr size_t NODES = 16384;
        ggml_context_ptr nodes(ggml_init({ NODES * ggml_tensor_overhead() + ggml_graph_overhead_custom(NODES, false), nullptr, true }));
        ggml_cgraph *    graph = ggml_new_graph_custom(nodes.get(), NODES, false);
        for (int l = 0; l < LAYERS; l++) {
            layer(nodes.get(), graph, (size_t) (l % COPIES));
        }
        ggml_gallocr_ptr memory(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)));
        ggml_gallocr_alloc_graph(memory.get(), graph);
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            if (!ggml_backend_supports_op(backend, ggml_graph_node(graph, i))) {
                return NAN;
            }
        }
        double best = 1e30;
        for (int i = 0; i <= times; i++) {
            const auto begin = std::chrono::steady_clock::now();
            ggml_backend_graph_compute(backend, graph);
            const double took = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
            best              = i > 0 || times == 0 ? std::min(best, took) : best;
        }
        return best;
    }
};

// Adds up columns by ggml operations, some KV heads at a time, as device/sums.cpp does without OWN_SUMS.
void by_operations(ggml_context * c, ggml_cgraph * graph, const Batch & x, size_t l, float scale) {
    const int64_t n_kv = x.k[l]->ne[2], share = x.q->ne[1] / n_kv, shown = x.mask->ne[0], n = x.q->ne[2];
    const int64_t heads = std::max<int64_t>(1, n_kv / 8);
    for (int64_t h = 0; h < n_kv; h += heads) {
        T q = ggml_view_3d(c, x.q, x.q->ne[0], heads * share, n, x.q->nb[1], x.q->nb[2], (size_t) (h * share) * x.q->nb[1]);
        T k = ggml_view_3d(c, x.k[l], x.q->ne[0], shown, heads, x.k[l]->nb[1], x.k[l]->nb[2], (size_t) h * x.k[l]->nb[2]);
        T w = attention_weights(c, ggml_permute(c, q, 0, 2, 1, 3), k, x.mask, scale, 0.0f);
        T rows = ggml_view_3d(c, w, shown, n * share, heads, w->nb[1], (size_t) share * w->nb[2], 0);
        T sum  = ggml_reshape_3d(c, ggml_sum_rows(c, ggml_cont(c, ggml_transpose(c, rows))), shown, 1, heads);
        T to   = ggml_view_3d(c, x.columns, shown, 1, heads, x.columns->nb[1], x.columns->nb[1], (size_t) h * x.columns->nb[1]);
        ggml_build_forward_expand(graph, ggml_add_inplace(c, to, sum));
    }
}

void measure(ggml_backend_t backend, const Shape & shape, int64_t n, int64_t shown, int times) {
    const Batch  x(backend, shape, n, shown);
    const float  scale = 1.0f / std::sqrt((float) shape.d);
    const double pairs = (double) n * (double) (shown - n) + (double) n * (double) (n + 1) / 2;
    const double work  = 4e-9 * (double) (LAYERS * shape.d * shape.heads) * pairs;  // two products of each pair, GFLOP
    const auto   own   = [&](int setting, bool columns, bool squares, bool entropy) {
        return x.milliseconds([&](ggml_context * c, ggml_cgraph * graph, size_t l) {
            const GraphLayer layer = { c, x.q, nullptr, nullptr, nullptr, scale, 0.0f };
            T out = attention_sums(layer, x.k[l], x.mask, { columns ? x.columns : nullptr, squares ? x.squares : nullptr, x.entropy, 0, entropy });
            out->op_params[OWN_KIND + 3] = setting;
            ggml_build_forward_expand(graph, out);
        }, times);
    };
    const double flash = x.milliseconds([&](ggml_context * c, ggml_cgraph * graph, size_t l) {
        T out = ggml_flash_attn_ext(c, ggml_permute(c, x.q, 0, 2, 1, 3), x.k[l], x.v[l], x.mask, scale, 0.0f, 0.0f);
        ggml_prec_set_acc(out, GGML_PREC_F32);
        ggml_build_forward_expand(graph, out);
    }, times);
    const double operations = x.milliseconds([&](ggml_context * c, ggml_cgraph * graph, size_t l) { by_operations(c, graph, x, l, scale); }, std::min(times, 2));
    std::printf("%2lld/%-2lld %5lld %6lld  flash %8.2f  operations %8.2f  squares %8.2f  entropy %8.2f  pass 1 %8.2f\n    own", (long long) shape.heads,
                (long long) shape.heads_kv, (long long) n, (long long) shown, flash, operations, own(0, true, true, false), own(0, true, false, true),
                own(0, false, false, false));
    for (int setting = 0; setting < 5; setting++) {
        const double took = own(setting, true, false, false);
        std::printf("  %d: %.2f (%.0f TFLOPS)", setting, took, work / took);
    }
    std::printf("\n");
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char ** argv) {
    ggml_backend_dev_t device = device_named(argc > 1 ? argv[1] : "CPU");
    if (!device) {
        return 1;
    }
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    const bool       tiny = argc > 2;
    std::printf("%s\nheads   n   keys, ms of %d layers\n", ggml_backend_dev_description(device), LAYERS);
    for (const Shape & shape : { Shape{ 128, 16, 16 }, Shape{ 128, 12, 2 } }) {
        for (const int64_t n : tiny ? std::vector<int64_t>{ 16 } : std::vector<int64_t>{ 512, 2048 }) {
            for (const int64_t shown : tiny ? std::vector<int64_t>{ 128 } : std::vector<int64_t>{ 2048, 8192, 16384 }) {
                measure(backend.get(), shape, n, shown, tiny ? 0 : 3);
            }
        }
    }
    return 0;
}
