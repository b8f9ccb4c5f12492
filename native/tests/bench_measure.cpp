// Measures the time to measure pending rows on a device, for the WantedMeasures (plan/device_rows.h) of some methods.
//
//   bench_measure DEVICE HEADS KV_HEADS HEAD_SIZE TOKENS LAYERS ROUNDS
//
// DEVICE: a name, or HOST:PORT of an RPC server. Rows are f16, the window has 32 queries.
// stdout: a line per method and measurement: operations per layer, bytes to the host per row and KV head, KiB per layer to the device,
// and the best milliseconds of ROUNDS with upload and download. First by ggml operations, then with kvedge's (device/own.h).

#include "kernels/kernels.h"
#include "store/store.h"
#include "device/graph_rows.h"
#include "sequence/sequence.h"
#include "system/threads.h"
#include "device.h"

#include <algorithm>
#include <cstdlib>
#include <random>

using namespace kvedge;

namespace {

using V = WantedMeasures::Votes;
using A = WantedMeasures::Anchor;

const struct {
    const char *   name;
    WantedMeasures wanted;
} METHODS[] = {
    { "snapkv", { V::mean, 0.0, false, false, A::none, -1.0, false } },
    { "norms", { V::none, 0.0, true, true, A::none, -1.0, false } },
    { "keydiff", { V::none, 0.0, false, false, A::unit, -1.0, false } },
    { "mixkv", { V::mean, 0.0, false, true, A::unit, -1.0, false } },
    { "flashcache", { V::none, 0.0, false, false, A::none, 0.2, false } },
    { "kvedge", { V::faded, 0.15, false, true, A::unit, 0.2, true } },
};

// Fills the rows of n tokens with a few random numbers that repeat, from another offset for each row.
void fill(Sequence & seq, int32_t n) {
    std::mt19937                    rng(1);
    std::normal_distribution<float> normal;
    const LayerShape &              s = seq.rows.shapes()[0];
    std::vector<float>              some((size_t) (997 + std::max(s.d_k, s.d_v)));
    std::generate(some.begin(), some.end(), [&] { return normal(rng); });
    for (int32_t t = 0; t < n; t++) {
        const auto at = seq.rows.place_from_end(t, n);
        for (const LayerShape & shape : seq.rows.shapes()) {
            for (int32_t h = 0; h < shape.n_heads_kv; h++) {
                const float * row = some.data() + (t * 31 + h * 7 + shape.il) % 997;
                kernels().from_f32(Type::f16, row, k_row(at, shape.il, h), (size_t) shape.d_k);
                kernels().from_f32(Type::f16, row, v_row(at, shape.il, h), (size_t) shape.d_v);
            }
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 8) {
        std::fprintf(stderr, "bench_measure DEVICE HEADS KV_HEADS HEAD_SIZE TOKENS LAYERS ROUNDS\n");
        return 2;
    }
    const auto    device = device_named(argv[1]);
    const int32_t H = std::atoi(argv[2]), Hkv = std::atoi(argv[3]), d = std::atoi(argv[4]), n = std::atoi(argv[5]), W = 32;
    const auto    layers = (size_t) std::atoi(argv[6]);
    if (!device) {
        return 1;
    }
    std::vector<LayerShape> shapes;
    for (size_t l = 0; l < layers; l++) {
        shapes.push_back({ (int32_t) l, H, Hkv, d, d });
    }
    Sequence             seq(shapes, Storage{});
    std::vector<int32_t> pos((size_t) n);
    if (!seq.rows.append(n, pos.data(), false)) {
        return 1;
    }
    fill(seq, n);
    uint64_t  stamps = 0;
    GraphRows rows(shapes, std::vector<ggml_backend_dev_t>(layers, device), { Storage{}, false }, stamps);
    if (!rows.load(seq.rows, available_threads())) {
        return 1;
    }
    std::vector<uint8_t> kind((size_t) n, 1);
    std::fill_n(kind.begin(), n / 16, (uint8_t) 0);
    for (size_t i = 0; i < 2 * std::size(METHODS); i++) {
        const auto & method = METHODS[i / 2];
        rows.own = i % 2 == 1;
        MeasureJob job{};
        job.wanted   = method.wanted;
        job.n_tokens = n;
        job.n_window = W;
        job.kind     = kind.data();
        job.queries.assign(layers, Bulk<float>((size_t) (W * H * d), 0.01f));
        double best = 1e300;
        for (int round = 0; round < std::atoi(argv[7]); round++) {
            std::vector<Measures> out;
            rows.work = {};
            if (rows.measure(job, out) != DeviceRows::Outcome::done) {
                std::fprintf(stderr, "%s\n", rows.problem().text());
                return 1;
            }
            best = std::min(best, 1e-3 * (double) rows.work.measure_us);
        }
        const DeviceWork & work = rows.work;
        const auto         each = [layers](auto x) { return (double) x / (double) layers; };
        std::printf("%-11s %-5s %6.1f operations, %6.2f bytes, %8.1f KiB, %9.2f ms\n", method.name, rows.own ? "own" : "ggml", each(work.operations),
                    each(work.to_host) / ((double) n * Hkv), each(work.to_device) / 1024.0, best);
    }
    return 0;
}
