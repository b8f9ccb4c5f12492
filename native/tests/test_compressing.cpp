// Compares a compression on a device with the host's compression: the attention over the kept rows, and the rows themselves. Covers even
// and uneven heads, rows of earlier compressions, biases and quantised rows.
//
//   test_compressing [DEVICE]      DEVICE: name of a ggml device, or HOST:PORT of an RPC server; default: ggml's CPU backend

#include "device/graph_rows.h"
#include "check.h"
#include "compress/job.h"
#include "device.h"
#include "ggml-backend.h"
#include "primitives/merge.h"
#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

using namespace kvedge;

namespace {

using Kept   = std::vector<std::vector<std::vector<int32_t>>>;
using Biases = std::vector<std::vector<std::vector<float>>>;  // [layer][head][row]

struct Case {
    std::string        name;
    int32_t            heads, n_kv, d_k, d_v;
    Storage            storage;
    bool               even;
    std::string        reducer;
    std::string        bias;  // setting of the reducer, or empty
    int32_t            n_tokens = 90;
    bool               dropping = false;
    bool               nan      = false;  // an evicted key of the prompt is NaN
    bool               all      = false;  // every row is kept
};

constexpr int32_t NAN_TOKEN = 60;
constexpr size_t  LAYERS    = 4;  // the second layer stays on the host

ggml_backend_dev_t device = nullptr;

bool on_cpu() { return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU; }

ggml_backend_dev_t processor() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

std::vector<ggml_backend_dev_t> devices() { return { device, nullptr, device, processor() }; }

// Returns rows of n tokens [n][Hkv][d] near a few random points, so that merges find similar rows. zeros: two tokens have zero keys, and
// not more, because several kept zero keys would be equally near to an evicted key.
std::vector<float> clustered(size_t n, size_t heads, size_t d, bool zeros) {
    static const std::vector<float> centres = random_floats(16 * 512);
    std::vector<float>              x       = random_floats(n * heads * d);
    for (size_t row = 0; row < n * heads; row++) {
        const size_t at = 512 * (rng() % 16);
        for (size_t i = 0; i < d; i++) {
            x[row * d + i] = zeros && (row / heads == 3 || row / heads == 47) ? 0.0f : 0.2f * x[row * d + i] + centres[at + i];
        }
    }
    return x;
}

// A sequence on the host, and its copy on the device.
struct Pair {
    const Case &               of;
    std::vector<LayerShape>    shapes;
    Sequence                   host;
    uint64_t                   stamps = 0;
    std::unique_ptr<GraphRows> there;
    std::vector<float>         k, v;  // rows of the last added tokens, the same for every layer

    explicit Pair(const Case & x) : of(x), shapes(LAYERS, { 0, x.heads, x.n_kv, x.d_k, x.d_v }), host(shapes, x.storage) {
        add_host(x.n_tokens);
        there = loaded(host.rows.storage().plain());
    }

    void add_host(int32_t n) {
        std::vector<int32_t> pos((size_t) n);
        std::iota(pos.begin(), pos.end(), host.rows.n_tokens());
        k = clustered((size_t) n, (size_t) of.n_kv, (size_t) of.d_k, true);
        v = clustered((size_t) n, (size_t) of.n_kv, (size_t) of.d_v, false);
        for (size_t i = 0; i < (of.nan && n > NAN_TOKEN ? (size_t) (of.n_kv * of.d_k) : 0); i++) {
            k[(size_t) (NAN_TOKEN * of.n_kv * of.d_k) + i] = NAN;
        }
        CHECK(host.rows.append(n, pos.data(), false));
        const Storage plain = of.storage.plain();
        for (int32_t t = 0; t < n; t++) {
            const auto at = host.rows.place_from_end(t, n);
            for (int32_t l = 0; l < (int32_t) LAYERS; l++) {
                for (int32_t h = 0; h < of.n_kv; h++) {
                    const auto row = (size_t) (t * of.n_kv + h);
                    kernels().from_f32(plain.k, k.data() + row * (size_t) of.d_k, k_row(at, l, h), (size_t) of.d_k);
                    kernels().from_f32(plain.v, v.data() + row * (size_t) of.d_v, v_row(at, l, h), (size_t) of.d_v);
                }
            }
        }
    }

    // Returns a copy of the host's rows on the device.
    std::unique_ptr<GraphRows> loaded(const Storage & as) {
        const auto copy = host.clone();
        auto       rows = std::make_unique<GraphRows>(shapes, devices(), GraphRows::Form{ as, of.dropping }, stamps);
        CHECK(rows->load(copy->rows, 2));
        return rows;
    }

    // Returns the attention of a token with rows k and v, which the graph writes.
    std::vector<float> attend(GraphRows & rows, const std::vector<float> & query) {
        CHECK(rows.reserve({ 1, 1, 0, {}, 0, 1 }, 2));
        rows.enter(1, true);
        std::vector<float> out;
        for (size_t l = 0; l < LAYERS; l++) {
            if (!rows.holds(l)) {
                continue;
            }
            ggml_context * c = ggml_init({ 256 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
            ggml_tensor *  q = ggml_new_tensor_3d(c, GGML_TYPE_F32, of.d_k, of.heads, 1);
            ggml_tensor *  a = ggml_new_tensor_3d(c, GGML_TYPE_F32, of.d_k, of.n_kv, 1);
            ggml_tensor *  b = ggml_new_tensor_3d(c, GGML_TYPE_F32, of.d_v, of.n_kv, 1);
            for (ggml_tensor * x : { q, a, b }) {
                ggml_set_input(x);
            }
            ggml_tensor * result = rows.attend({ c, q, a, b, nullptr, 1.0f / std::sqrt((float) of.d_k), 0.0f }, l);
            ggml_set_output(result);
            ggml_cgraph * graph = ggml_new_graph(c);
            ggml_build_forward_expand(graph, result);
            ggml_backend_t backend = ggml_backend_dev_init(devices()[l], nullptr);
            one_thread(backend, devices()[l]);
            ggml_gallocr_t memory  = ggml_gallocr_new(ggml_backend_dev_buffer_type(devices()[l]));
            CHECK(ggml_gallocr_alloc_graph(memory, graph));
            ggml_backend_tensor_set(q, query.data(), 0, ggml_nbytes(q));
            ggml_backend_tensor_set(a, k.data(), 0, ggml_nbytes(a));
            ggml_backend_tensor_set(b, v.data(), 0, ggml_nbytes(b));
            CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS);
            const size_t at = out.size();
            out.resize(at + (size_t) (of.heads * of.d_v));
            ggml_backend_tensor_get(result, out.data() + at, 0, ggml_nbytes(result));
            ggml_gallocr_free(memory);
            ggml_backend_free(backend);
            ggml_free(c);
        }
        return out;
    }

    Kept choose() const {
        const int32_t n    = host.rows.pending_length();
        Kept          kept(LAYERS);
        for (auto & layer : kept) {
            for (int32_t h = 0; h < of.n_kv; h++) {
                std::vector<int32_t> rows((size_t) n);
                std::iota(rows.begin(), rows.end(), 0);
                std::shuffle(rows.begin(), rows.end(), rng);
                rows.erase(std::remove(rows.begin(), rows.end(), of.nan ? NAN_TOKEN : -1), rows.end());
                rows.resize(of.all ? rows.size() : of.even ? (size_t) (n / 5) : h == 0 ? 1 : h == 1 ? rows.size() : 1 + rng() % rows.size());
                std::sort(rows.begin(), rows.end());
                layer.push_back(std::move(rows));
            }
        }
        return kept;
    }

    Biases pending_biases() const;
    void   compress();
};

// Checks that a and b differ by at most `close` of the largest number. One of `but` numbers may differ more, because with many merged
// rows two kept keys can be nearly equally near.
void same(const std::string & name, const char * what, const std::vector<float> & a, const std::vector<float> & b, float close,
          size_t but = 0) {
    float  most = 0.0f, largest = 0.0f;
    size_t n    = 0;
    CHECK(a.size() == b.size() && !a.empty());
    for (const float x : a) {
        largest = std::max(largest, std::fabs(x));
    }
    for (size_t i = 0; i < a.size(); i++) {
        const float gap = std::isnan(a[i]) || std::isnan(b[i]) ? INFINITY : std::fabs(a[i] - b[i]);
        most            = std::max(most, gap);
        n += gap <= close * largest ? 0 : 1;
    }
    if (n * (but == 0 ? a.size() + 1 : but) > a.size()) {
        std::fprintf(stderr, "%s: %zu of %zu %s differ, by %g of %g\n", name.c_str(), n, a.size(), what, (double) most,
                     (double) largest);
        failures()++;
    }
}

// Returns the biases of the host's pending rows; empty for a head whose biases are all 0.
Biases Pair::pending_biases() const {
    Biases out(LAYERS);
    for (size_t l = 0; l < LAYERS; l++) {
        for (int32_t h = 0; h < of.n_kv; h++) {
            std::vector<float> all((size_t) host.rows.head_length((int32_t) l, h));
            read_biases(host.rows, (int32_t) l, h, all.data());
            all.erase(all.begin(), all.end() - host.rows.pending_length());
            const bool any = std::any_of(all.begin(), all.end(), [](float b) { return b != 0.0f; });
            out[l].push_back(any ? all : std::vector<float>());
        }
    }
    return out;
}

// Compresses the pending rows on the device and on the host, with the same kept rows.
void Pair::compress() {
    kvedge_plan * plan = nullptr;
    CHECK(kvedge_plan_create(&plan, nullptr) == KVEDGE_OK);
    CHECK(kvedge_plan_set(plan, "scorer", "knorm", nullptr) == KVEDGE_OK);
    CHECK(kvedge_plan_set(plan, "reducer", of.reducer.c_str(), nullptr) == KVEDGE_OK);
    if (!of.bias.empty()) {
        CHECK(kvedge_plan_set(plan, "reducer.bias", of.bias.c_str(), nullptr) == KVEDGE_OK);
    }
    const Kept kept = choose();

    std::unique_ptr<MergeRule> rule;
    if (plan->reducer->merges) {
        rule = std::make_unique<MergeRule>(plan->reducer->merges(plan->params[KVEDGE_STAGE_REDUCER]));
    }
    const Biases biases = pending_biases();
    Biases       out;
    CompressJob  request{ kept, host.rows.pending_length() };
    request.rule      = rule.get();
    request.storage   = of.storage;
    request.dropping  = of.dropping;
    request.biases    = &biases;
    request.out       = &out;
    CompressJob other = request;
    other.storage     = { Type::q8_0, Type::q4_0 };
    CHECK(there->compress(other) == DeviceRows::Outcome::lacking);
    CHECK(std::strstr(there->problem().text(), ggml_backend_dev_name(device)));
    CHECK(there->compress(request) == DeviceRows::Outcome::done);

    Job job  = make_job(host, *plan, 2, false);
    job.kept = kept;
    for (size_t l = 0; l < LAYERS; l++) {
        for (size_t h = 0; h < kept[l].size(); h++) {
            job.counts[l][h] = (int32_t) kept[l][h].size();
        }
    }
    Compression outcome;
    const bool  reduces = plan->reducer->reduce != nullptr;
    CHECK(open_layers(job, reduces));
    fill_layers(job, reduces, outcome);
    host.close_pending();
    CHECK((rule && rule->mass) == !out.empty());
    for (size_t l = 0; l < out.size(); l++) {
        for (size_t h = 0; h < out[l].size(); h++) {
            std::vector<float> all((size_t) host.rows.head_length((int32_t) l, (int32_t) h));
            read_biases(host.rows, (int32_t) l, (int32_t) h, all.data());
            all.erase(all.begin(), all.end() - (std::ptrdiff_t) kept[l][h].size());
            all.push_back(1.0f);  // same() compares relative to the largest number
            out[l][h].push_back(1.0f);
            same(of.name, "biases", all, out[l][h], 1e-5f);
        }
    }
    kvedge_plan_free(plan);
}

// Returns the allowed difference of rows, relative to the largest number.
float closeness(const Case & x) {
    // devices multiply keys in half precision, and similarities become factors of rows
    const bool f16 = x.storage.k == Type::f16 || (!on_cpu() && x.reducer == "weighted");
    return x.storage.quantised() ? (x.storage.k == Type::q4_0 ? 0.15f : 0.02f) : x.reducer == "evict" ? 0.0f : f16 ? 2e-3f : 1e-5f;
}

// Returns `but` for same(). Devices round keys before they compare keys, so that more targets differ than on the CPU.
size_t others(const Case & x) {
    return x.reducer == "evict" ? 0 : !on_cpu() ? 10 : x.storage.quantised() ? 25 : x.n_tokens > 1000 ? 100 : 0;
}

void try_case(const Case & x) {
    Pair pair(x);
    for (int32_t round = 0; round < 2; round++) {
        const float    close = closeness(x);
        const uint64_t bytes = pair.there->bytes();
        pair.compress();
        CHECK(round == 0 || x.dropping || x.storage.quantised() || pair.there->bytes() == bytes);  // few evicted rows: same buffers
        CHECK(pair.there->even() == (!x.dropping && holds_even(pair.host.rows, devices())));
        for (int32_t i = 0; x.dropping && i < (int32_t) LAYERS * x.n_kv; i++) {  // drops a row of each head with two or more
            const int32_t l = i / x.n_kv, h = i % x.n_kv, n = pair.host.rows.head_length(l, h);
            if (n > 1) {
                loosen_row(pair.host.rows, l, h, n / 2);
                drop_row(pair.host.rows, l, h, n / 2);
                pair.there->drop((size_t) l, h, n / 2);
            }
        }
        for (int32_t t = 0; t < 20; t++) {
            const auto query = random_floats((size_t) (x.heads * x.d_k));
            std::unique_ptr<GraphRows> fresh = t == 0 ? pair.loaded(x.storage) : nullptr;
            pair.add_host(1);
            const auto got = pair.attend(*pair.there, query);
            if (fresh) {
                same(x.name, round == 0 ? "attention" : "attention after the second compression", pair.attend(*fresh, query), got,
                    others(x) > 0 ? 0.1f : std::max(5.0f * close, 1e-5f));
            }
        }
    }
    if (x.even && x.bias == "mass") {
        CHECK(pair.host.open_stream(0));  // makes the kept rows pending again, with their biases
    }
    pair.compress();
    const auto copy = pair.host.clone();
    for (size_t l = 0; l < LAYERS; l++) {
        if (pair.there->holds(l)) {
            copy->rows.release_to_device(l);
        }
    }
    CHECK(pair.there->fetch(copy->rows, 2));
    const float close = closeness(x);
    for (int32_t l = 0; l < (int32_t) LAYERS; l++) {
        for (int32_t h = 0; h < x.n_kv; h++) {
            std::vector<float> rows[2][2];
            for (int32_t i = 0; i < 2; i++) {
                each_segment(i == 0 ? pair.host.rows : copy->rows, l, h, [&](const Segment & s) {
                    const size_t n = rows[i][0].size(), m = rows[i][1].size();
                    rows[i][0].resize(n + (size_t) (s.n * x.d_k));
                    rows[i][1].resize(m + (size_t) (s.n * x.d_v));
                    kernels().widen(s.k, s.n, x.d_k, rows[i][0].data() + n, (size_t) x.d_k);
                    kernels().widen(s.v, s.n, x.d_v, rows[i][1].data() + m, (size_t) x.d_v);
                });
            }
            same(x.name, "keys", rows[0][0], rows[1][0], close, others(x));
            same(x.name, "values", rows[0][1], rows[1][1], close, others(x));
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    device = argc > 1 ? device_named(argv[1]) : processor();
    constexpr Storage F16{ Type::f16, Type::f16 }, F32{ Type::f32, Type::f32 }, BF16{ Type::bf16, Type::bf16 };
    constexpr Storage Q8{ Type::q8_0, Type::q8_0 }, Q4{ Type::q4_0, Type::q4_0 };
    for (const bool even : { true, false }) {
        const std::string how = even ? ", even" : ", uneven";
        try_case({ "evict" + how, 4, 4, 32, 32, F32, even, "evict", "" });
        try_case({ "evict, f16" + how, 8, 4, 64, 32, F16, even, "evict", "" });
        try_case({ "evict, bf16" + how, 4, 2, 64, 64, BF16, even, "evict", "" });
        try_case({ "evict, dropping" + how, 8, 4, 32, 32, F32, even, "evict", "", 90, true });
        try_case({ "nearest, dropping" + how, 8, 4, 32, 64, F32, even, "nearest", "mass", 90, true });
        try_case({ "evict, q8_0" + how, 8, 4, 64, 64, Q8, even, "evict", "" });
        try_case({ "evict, q4_0" + how, 8, 8, 64, 64, Q4, even, "evict", "" });
        try_case({ "nearest" + how, 4, 4, 32, 64, F32, even, "nearest", "mass" });
        try_case({ "nearest without mass" + how, 8, 4, 64, 64, F16, even, "nearest", "none" });
        try_case({ "nearest, q8_0" + how, 8, 4, 64, 64, Q8, even, "nearest", "none" });
        try_case({ "averaged" + how, 8, 4, 64, 32, F32, even, "averaged", "none" });
        try_case({ "pivotal" + how, 8, 4, 64, 64, F16, even, "pivotal", "mass" });
        try_case({ "weighted" + how, 8, 2, 32, 32, F32, even, "weighted", "none" });
        try_case({ "weighted, mass" + how, 8, 2, 32, 32, F32, even, "weighted", "mass" });
    }
    try_case({ "not a number", 4, 4, 32, 64, F32, true, "nearest", "none", 90, false, true });
    try_case({ "not a number, by angle", 4, 4, 32, 64, F32, false, "averaged", "none", 90, false, true });
    try_case({ "nothing to merge", 4, 4, 32, 32, F32, true, "averaged", "mass", 90, false, false, true });
    try_case({ "several chunks and pieces", 8, 8, 128, 128, F32, true, "nearest", "none", 2048 });
    return failures() == 0 ? 0 : 1;
}
