// Measures the time in which a device finds the nearest kept key of each evicted key of a layer.
//
//   bench_nearest [DEVICE]      DEVICE: name of a ggml device
//
// own: OWN_NEAREST. products: ggml operations: products of some evicted rows with all kept rows, and the largest product of each row.

#include "device.h"
#include "nearest.h"

#include <chrono>
#include <cstdio>

namespace {

double seconds(ggml_backend_t backend, ggml_cgraph * graph) {
    double best = 1e30;
    for (int i = 0; i < 4; i++) {
        const auto begin = std::chrono::steady_clock::now();
        ggml_backend_graph_compute(backend, graph);
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return best;
}

constexpr int D = 128;

using T      = ggml_tensor *;
using Counts = std::vector<std::pair<int32_t, int32_t>>;

void report(const char * how, const char * name, const Counts & counts, double s) {
    double work = 0.0;
    for (const auto & [n, m] : counts) {
        work += 2.0 * D * n * m;
    }
    std::printf("%-10s %-30s %9.1f us a layer, %6.1f TFLOPS\n", how, name, 1e6 * s, work / s / 1e12);
    std::fflush(stdout);
}

// Measures ggml operations for heads with equal numbers of rows. A chunk of evicted rows has 64 MiB of products.
void measure_products(ggml_backend_t backend, const char * name, const Counts & counts) {
    const int64_t    n = counts[0].first, m = counts[0].second, heads = (int64_t) counts.size();
    const int64_t    chunk = std::min(m, ((int64_t) 64 << 20) / (4 * n * heads) / 64 * 64);
    ggml_context_ptr context(ggml_init({ 4096 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    ggml_context *   c     = context.get();
    const T          keys  = ggml_new_tensor_2d(c, GGML_TYPE_F16, D, heads * (n + m)), kept = ggml_new_tensor_1d(c, GGML_TYPE_I32, n * heads);
    const T          some  = ggml_new_tensor_1d(c, GGML_TYPE_I32, m * heads), values = ggml_new_tensor_3d(c, GGML_TYPE_F32, D, n, heads);
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(c, backend));
    ggml_backend_buffer_clear(buffer.get(), 0);
    ggml_cgraph * graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph, ggml_cpy(c, ggml_get_rows(c, keys, kept), ggml_reshape_2d(c, values, D, n * heads)));
    for (int64_t first = 0; first < m; first += chunk) {
        const int64_t now = std::min(chunk, m - first);
        const T rows = ggml_get_rows(c, keys, ggml_view_1d(c, some, now * heads, (size_t) (first * heads) * sizeof(int32_t)));
        const T s    = ggml_mul_mat(c, values, ggml_reshape_3d(c, rows, D, now, heads));
        ggml_build_forward_expand(graph, ggml_argmax(c, ggml_reshape_2d(c, s, n, now * heads)));
    }
    ggml_gallocr_ptr memory(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)));
    ggml_gallocr_alloc_graph(memory.get(), graph);
    report("products", name, counts, seconds(backend, graph));
}

void measure(ggml_backend_t backend, const char * name, const Counts & counts) {
    constexpr int TIMES = 24;
    std::mt19937          random(5);
    const Heads           heads(counts, random);
    const NearestGraph    graph(backend, heads, { D, GGML_TYPE_F16, 1.0f, GGML_TYPE_I16, false }, TIMES);
    std::vector<uint16_t> keys((size_t) (heads.slots * D));
    std::generate(keys.begin(), keys.end(), [&] { return (uint16_t) (0x3000 | (random() & 0x8bff)); });
    ggml_backend_tensor_set(graph.keys, keys.data(), 0, ggml_nbytes(graph.keys));
    report("own", name, counts, seconds(backend, graph.graph) / TIMES);
}

}  // namespace

int main(int argc, char ** argv) {
    ggml_backend_dev_t device = argc > 1 ? device_named(argv[1]) : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!device) {
        return 1;
    }
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    const bool       cpu = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    Counts           uneven;
    for (int32_t h = 0; h < 16; h++) {
        const int32_t n = 820 + 328 * h;  // the mean is 3,277
        uneven.emplace_back(n, 16384 - n);
    }
    const std::vector<std::pair<const char *, Counts>> shapes = { { "2,048 tokens, 2 heads", Counts(2, { 410, 1638 }) },
                                                                  { "2,048 tokens, 16 heads", Counts(16, { 410, 1638 }) },
                                                                  { "16,384 tokens, 2 heads", Counts(2, { 3277, 13107 }) },
                                                                  { "16,384 tokens, 16 heads", Counts(16, { 3277, 13107 }) } };
    for (const auto & [name, counts] : shapes) {
        if (cpu && counts.size() * (size_t) counts[0].first > 1000) {
            continue;  // would take minutes
        }
        measure_products(backend.get(), name, counts);
        measure(backend.get(), name, counts);
    }
    if (!cpu) {
        measure(backend.get(), "16,384 tokens, 16 uneven heads", uneven);
    }
    return 0;
}
