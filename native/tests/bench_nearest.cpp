// How long a device takes to find the nearest kept key of each evicted one, for a layer.
//
//   bench_nearest [DEVICE] [SETTINGS]      DEVICE: of ggml, by its name; SETTINGS: of the kernel, the first so many

#include "device.h"
#include "nearest.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

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

void measure(ggml_backend_t backend, const char * name, const std::vector<std::pair<int32_t, int32_t>> & counts, int setting) {
    constexpr int TIMES = 24, D = 128;
    std::mt19937          random(5);
    const Heads           heads(counts, random);
    const NearestGraph    graph(backend, heads, D, GGML_TYPE_F16, 1.0f, TIMES, setting);
    std::vector<uint16_t> keys((size_t) (heads.slots * D));
    std::generate(keys.begin(), keys.end(), [&] { return (uint16_t) (0x3000 | (random() & 0x8bff)); });
    ggml_backend_tensor_set(graph.keys, keys.data(), 0, ggml_nbytes(graph.keys));
    double work = 0.0;
    for (const auto & [n, m] : counts) {
        work += 2.0 * D * n * m;
    }
    const double s = seconds(backend, graph.graph) / TIMES;
    std::printf("setting %d  %-28s %9.1f us a layer, %6.1f TFLOPS\n", setting, name, 1e6 * s, work / s / 1e12);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char ** argv) {
    ggml_backend_dev_t device = argc > 1 ? device_named(argv[1]) : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!device) {
        return 1;
    }
    using Counts = std::vector<std::pair<int32_t, int32_t>>;
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    const bool       cpu = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    Counts           uneven;
    for (int32_t h = 0; h < 16; h++) {
        const int32_t n = 820 + 328 * h;  // the mean is 3,277
        uneven.emplace_back(n, 16384 - n);
    }
    for (int setting = 0; setting < (argc > 2 ? std::atoi(argv[2]) : 1); setting++) {
        measure(backend.get(), "2,048 tokens, 2 heads", Counts(2, { 410, 1638 }), setting);
        if (cpu) {
            continue;  // the others take minutes
        }
        measure(backend.get(), "2,048 tokens, 16 heads", Counts(16, { 410, 1638 }), setting);
        measure(backend.get(), "16,384 tokens, 2 heads", Counts(2, { 3277, 13107 }), setting);
        measure(backend.get(), "16,384 tokens, 16 heads", Counts(16, { 3277, 13107 }), setting);
        measure(backend.get(), "16,384 tokens, 16 uneven heads", uneven, setting);
    }
    return 0;
}
