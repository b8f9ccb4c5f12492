// Measures the fixed costs of compressions on a device: single device calls, and the steps of the compression of a prompt and of later
// messages.
//
//   bench_later DEVICE HEADS KV_HEADS HEAD_SIZE TOKENS LAYERS MESSAGES
//
// DEVICE: a name, or HOST:PORT of an RPC server. Rows are f16, the budget is 0.2, an answer has 64 tokens and a message 32.
// stdout: a line per call or compression, in milliseconds.

#include "kernels/kernels.h"
#include "store/store.h"
#include "device/graph_rows.h"
#include "sequence/sequence.h"
#include "system/threads.h"
#include "primitives/merge.h"
#include "device.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

using namespace kvedge;

namespace {

using V = WantedMeasures::Votes;
using A = WantedMeasures::Anchor;

constexpr int32_t WINDOW = 32, ANSWER = 64, MESSAGE = 32;

const struct {
    const char *   name;
    WantedMeasures wanted;
    bool           even;
    MergeRule      rule;
} METHODS[] = {
    { "snapkv", { V::mean, 0.0, false, false, A::none, -1.0, false }, true, {} },
    { "kvedge", { V::faded, 0.15, false, true, A::unit, -1.0, true }, false,
      { [](float own, float) { return own; }, [](float) { return 1.0f; }, false, true, 0.8f } },
};

double ms(const std::function<void()> & work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return 1e3 * std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Prints the milliseconds of `work`, three times.
void print(const char * what, const std::function<void()> & work) {
    std::printf("%-44s", what);
    for (int i = 0; i < 3; i++) {
        std::printf(" %9.3f", ms(work));
    }
    std::printf("\n");
}

void time_calls(ggml_backend_dev_t device) {
    constexpr int64_t D = 128, N = 512, SMALL = 300;
    Tensors           held(3);
    ggml_tensor *     a = held.add(GGML_TYPE_F32, D, N, 16), *b = held.add(GGML_TYPE_F32, D, N, 16), *large = held.add(GGML_TYPE_F32, 8 << 20);
    if (!held.allocate(device)) {
        return;
    }
    const auto compute = [&](Worker & worker, int64_t n, bool multiplies) {
        GraphBuilder   builder((size_t) (2 * n));
        ggml_context * c = builder.context.get();
        for (int64_t i = 0; i < n; i++) {
            builder.add(multiplies ? product(c, a, b) : ggml_scale(c, ggml_view_1d(c, a, D, 0), 2.0f));
        }
        (void) (worker.make_room(device, builder.graph, 1) && worker.compute(builder.graph));
    };
    Worker kept;
    print("a product, by a new backend", [&] {
        Worker worker;
        compute(worker, 1, true);
    });
    print("a product, by one that stays", [&] { compute(kept, 1, true); });
    print("300 small operations", [&] { compute(kept, SMALL, false); });
    for (const size_t mib : { 1, 16, 64, 256 }) {
        std::unique_ptr<Tensors> some;
        char                     what[64];
        std::snprintf(what, sizeof(what), "%zu MiB: memory of the device", mib);
        print(what, [&] {
            some = std::make_unique<Tensors>(1);
            some->add(GGML_TYPE_F32, (int64_t) (mib << 18));
            (void) some->allocate(device);
        });
        std::snprintf(what, sizeof(what), "%zu MiB: given back", mib);
        std::printf("%-44s %9.3f\n", what, ms([&] { some.reset(); }));
    }
    std::vector<uint8_t> values(32 << 20, 1);
    Staging              staging;
    uint8_t * const      pinned = staging.room(device, 32 << 20);
    std::fill_n(pinned, 32 << 20, (uint8_t) 1);
    for (const size_t size : { 4 << 10, 1 << 20, 32 << 20 }) {
        char what[64];
        std::snprintf(what, sizeof(what), "%zu KiB to the device", size >> 10);
        print(what, [&] { ggml_backend_tensor_set(large, values.data(), 0, size); });
        std::snprintf(what, sizeof(what), "%zu KiB to the device, pinned", size >> 10);
        print(what, [&] { ggml_backend_tensor_set(large, pinned, 0, size); });
        std::snprintf(what, sizeof(what), "%zu KiB from the device", size >> 10);
        print(what, [&] { ggml_backend_tensor_get(large, values.data(), 0, size); });
        std::snprintf(what, sizeof(what), "%zu KiB from the device, pinned", size >> 10);
        print(what, [&] { ggml_backend_tensor_get(large, pinned, 0, size); });
    }
    print("copying a region", [&] { copy_regions(large, large, { 0 }, { 1 }, { 0 }); });
    print("threads that do nothing", [] { parallel_for(available_threads(), 64, [](int32_t, int32_t) {}); });
}

// Appends n tokens. Their rows repeat a few random numbers, from another offset for each row.
void append(Sequence & seq, int32_t n) {
    std::mt19937                    rng(1);
    std::normal_distribution<float> normal;
    const LayerShape &              s = seq.rows.shapes()[0];
    std::vector<float>              some((size_t) (997 + std::max(s.d_k, s.d_v)));
    std::vector<int32_t>            pos((size_t) n);
    std::generate(some.begin(), some.end(), [&] { return normal(rng); });
    (void) seq.rows.append(n, pos.data(), false);
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

using Kept = std::vector<std::vector<std::vector<int32_t>>>;

Kept choose(const std::vector<LayerShape> & shapes, int32_t n, int32_t budget, bool even) {
    std::mt19937 rng(2);
    Kept         kept(shapes.size());
    for (size_t l = 0; l < shapes.size(); l++) {
        for (int32_t h = 0; h < shapes[l].n_heads_kv; h++) {
            std::vector<int32_t> rows((size_t) n);
            std::iota(rows.begin(), rows.end(), 0);
            std::shuffle(rows.begin(), rows.end(), rng);
            rows.resize((size_t) std::min(n, even ? budget : std::max(1, budget * (h % 2 ? 3 : 1) / 2)));
            std::sort(rows.begin(), rows.end());
            kept[l].push_back(std::move(rows));
        }
    }
    return kept;
}

using Devices = std::vector<ggml_backend_dev_t>;

// Measures and compresses the pending rows, and prints the times. False: the device could not.
bool compress(GraphRows & rows, const std::vector<LayerShape> & shapes, size_t method, int32_t pending, int32_t budget, const std::string & what) {
    const auto &               of = METHODS[method];
    const std::vector<uint8_t> kind((size_t) pending, 1);
    MeasureJob                 job{};
    job.wanted   = of.wanted;
    job.n_tokens = pending;
    job.n_window = WINDOW;
    job.kind     = kind.data();
    job.queries.assign(shapes.size(), Bulk<float>((size_t) (WINDOW * shapes[0].n_heads * shapes[0].d_k), 0.01f));
    std::vector<Measures>                        measures;
    std::vector<std::vector<std::vector<float>>> out;
    const Kept                                   kept = choose(shapes, pending, budget, of.even);
    CompressJob                                  request{ kept, pending };
    request.rule = of.even ? nullptr : &of.rule;
    request.out  = &out;
    rows.work    = {};
    bool         done    = false;
    const double measure = ms([&] { done = rows.measure(job, measures) == DeviceRows::Outcome::done; });
    const double took    = ms([&] { done = done && rows.compress(request) == DeviceRows::Outcome::done; });
    if (!done) {
        std::fprintf(stderr, "%s\n", rows.problem().text());
        return false;
    }
    const DeviceWork & w = rows.work;
    std::printf("%s %s, measure %.2f, take %.2f (gather %.2f merge %.2f upload %.2f), %lld operations, %.2f MiB there, %.2f back\n",
                of.name, what.c_str(), measure, took, 1e-3 * (double) w.gather_us, 1e-3 * (double) w.merge_us, 1e-3 * (double) w.upload_us,
                (long long) w.operations, (double) w.to_device / (1 << 20), (double) w.to_host / (1 << 20));
    return true;
}

// Reads and compresses a prompt, then answers and messages. False: the device could not.
bool converse(const std::vector<LayerShape> & shapes, const Devices & devices, const std::shared_ptr<Workers> & workers, size_t method,
              int32_t n, int32_t messages) {
    const int32_t threads = available_threads();
    Sequence      seq(shapes, Storage{});
    append(seq, n);
    uint64_t  stamps = 0;
    GraphRows rows(shapes, devices, { Storage{}, false }, stamps, workers);
    bool      good = rows.load(seq.rows, threads) && compress(rows, shapes, method, n, n / 5, "prompt");
    for (int32_t i = 0; i < messages && good; i++) {
        double answer = 0.0;
        for (int32_t t = 0; t < ANSWER; t++) {
            answer += ms([&] {
                good = good && rows.reserve({ 1, 1, 0, {}, t, 1 }, threads);
                rows.enter(1, true);
            });
        }
        const double read = ms([&] {
            good = good && rows.reserve({ MESSAGE, MESSAGE, 0, {}, ANSWER, 1 }, threads);
            rows.enter(MESSAGE, true);
        });
        char what[64];
        std::snprintf(what, sizeof(what), "message: answer %.2f, read %.2f", answer, read);
        good = good && compress(rows, shapes, method, ANSWER + MESSAGE, MESSAGE, what);
    }
    return good;
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 8) {
        std::fprintf(stderr, "bench_later DEVICE HEADS KV_HEADS HEAD_SIZE TOKENS LAYERS MESSAGES\n");
        return 2;
    }
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    const auto device = device_named(argv[1]);
    if (!device) {
        return 1;
    }
    time_calls(device);
    std::vector<LayerShape> shapes;
    for (int32_t l = 0; l < std::atoi(argv[6]); l++) {
        shapes.push_back({ l, std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[4]) });
    }
    const auto workers = std::make_shared<Workers>();
    const Crew crew;  // the compressor holds a Crew, too
    for (size_t i = 0; i < 2 * std::size(METHODS); i++) {  // each method runs twice: the first run warms up the device
        if (!converse(shapes, Devices(shapes.size(), device), workers, i / 2, std::atoi(argv[5]), std::atoi(argv[7]))) {
            return 1;
        }
    }
    return 0;
}
