// Compares the time of one token's attention over KV heads of different lengths with ggml's flash attention over equal lengths.
//
//   bench_ragged [MODULE | cpu] [tiny | kernels]
//
// MODULE: a file with a ggml backend, whose first device is used; default: the CPU. tiny: small sizes for a trial. kernels: equal and
// ragged only, more shapes, and every kernel of cuda/ragged.cu.
// Every layer has its own rows; the output of a layer is the query of the next layer. For each shape, mean and spread of lengths:
//
//   whole   equal lengths of 5 times the mean, the state before a compression to a fifth
//   equal   equal lengths of the mean
//   list    all KV heads in one list; each query has its own mask over the list
//   padded  KV heads on dimension 3, all padded to the longest, each with a mask
//   ragged  OWN_RAGGED: regions of one list, and a span for each head; N: fewest rows of a block, negative: no tensor cores
//
// stdout: microseconds of a layer, for the attention alone and with the writes of the token's rows; device bytes of a layer; and
// the largest error of the first layer against a reference in double precision (not for `whole`).

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
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

using T = ggml_tensor *;

struct Shape {
    const char * name;
    int64_t      d, heads_kv, share, layers;

    int64_t heads() const { return heads_kv * share; }
};

enum class Way { whole, equal, list, padded, ragged };

constexpr const char * NAMES[] = { "whole", "equal", "list", "padded", "ragged" };

// Values of op_params[OWN_KIND + 1] (cuda/ragged.cu); 0: the default.
constexpr int KERNELS[] = { 0, -32, -128, -512, -8192, 32, 64, 128, 256 };

int64_t rounded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// The number and the first slot of each KV head's rows.
struct Rows {
    std::vector<int64_t> n, first;  // [Hkv]
    int64_t              slots;     // slots of a list, which holds one head (whole, equal, padded) or all heads
    bool                 shared;    // one list for all heads
};

Rows rows_of(Way way, const std::vector<int64_t> & lengths) {
    const int64_t all = std::accumulate(lengths.begin(), lengths.end(), (int64_t) 0), heads = (int64_t) lengths.size();
    const int64_t mean = all / heads;
    Rows          out{ lengths, {}, 0, way == Way::list || way == Way::ragged };
    if (way == Way::whole || way == Way::equal) {
        out.n.assign(lengths.size(), way == Way::whole ? 5 * mean : mean);
    }
    if (!out.shared) {
        out.slots = rounded(*std::max_element(out.n.begin(), out.n.end()) + 1, 256);
        for (int64_t h = 0; h < heads; h++) {
            out.first.push_back(h * out.slots);
        }
        return out;
    }
    for (int64_t n : lengths) {
        out.first.push_back(out.slots);
        out.slots += n + (way == Way::ragged ? 32 + mean / 32 : 1);
    }
    out.slots = way == Way::list ? rounded(out.slots, 256) : out.slots;
    return out;
}

struct Layer {
    T k, v, mask, spans;
};

struct Bench {
    ggml_backend_t backend;
    Shape          shape;
    Way            way;
    int            kernel;  // one of KERNELS
    Rows           rows;

    ggml_context_ptr        context, nodes, one_nodes;
    ggml_backend_buffer_ptr buffer;
    ggml_gallocr_ptr        memory, one_memory;
    std::vector<Layer>      layers;
    T                       q = nullptr, fresh = nullptr, index = nullptr, zeros = nullptr;

    std::vector<float>       queries;
    std::vector<ggml_fp16_t> numbers;  // numbers that keys repeat; values begin at OTHER

    static constexpr size_t BLOCK = 1 << 20, OTHER = 12345;

    ggml_fp16_t key(size_t i) const { return numbers[i % BLOCK]; }
    ggml_fp16_t value(size_t i) const { return numbers[(i + OTHER) % BLOCK]; }

    void make_tensors();
    void fill();
    void show(const Layer & layer) const;  // writes masks and spans
    T    attend(ggml_context * c, const Layer & layer, T from, bool writes) const;

    ggml_cgraph * graph(ggml_context_ptr & c, size_t n, bool writes, T & out) const;
    double        error();
    double        microseconds(bool writes);
};

void Bench::make_tensors() {
    context.reset(ggml_init({ (4 * (size_t) shape.layers + 8) * ggml_tensor_overhead(), nullptr, true }));
    ggml_context * c = context.get();
    const int64_t  lists = rows.shared ? 1 : shape.heads_kv;
    q     = ggml_new_tensor_1d(c, GGML_TYPE_F32, shape.d * shape.heads());
    fresh = ggml_new_tensor_2d(c, GGML_TYPE_F32, shape.d, shape.heads_kv);
    index = ggml_new_tensor_1d(c, GGML_TYPE_I64, shape.heads_kv);
    zeros = ggml_new_tensor_1d(c, GGML_TYPE_F32, shape.heads());
    for (int64_t l = 0; l < shape.layers; l++) {
        Layer layer{};
        layer.k = ggml_new_tensor_3d(c, GGML_TYPE_F16, shape.d, rows.slots, lists);
        layer.v = ggml_new_tensor_3d(c, GGML_TYPE_F16, shape.d, rows.slots, lists);
        switch (way) {
            case Way::whole:
            case Way::equal: layer.mask = l == 0 ? ggml_new_tensor_1d(c, GGML_TYPE_F16, rows.slots) : layers[0].mask; break;
            case Way::list: layer.mask = ggml_new_tensor_3d(c, GGML_TYPE_F16, rows.slots, shape.share, shape.heads_kv); break;
            case Way::padded: layer.mask = ggml_new_tensor_4d(c, GGML_TYPE_F16, rows.slots, 1, 1, shape.heads_kv); break;
            case Way::ragged: layer.spans = ggml_new_tensor_2d(c, GGML_TYPE_I32, 2 + shape.share, shape.heads_kv);
        }
        layers.push_back(layer);
    }
    buffer.reset(ggml_backend_alloc_ctx_tensors(c, backend));
}

void Bench::fill() {
    std::mt19937                    random(7);
    std::normal_distribution<float> normal;
    numbers.resize(BLOCK);
    std::generate(numbers.begin(), numbers.end(), [&] { return ggml_fp32_to_fp16(normal(random)); });
    queries.resize((size_t) ggml_nelements(q));
    std::generate(queries.begin(), queries.end(), [&] { return 1.5f * normal(random); });
    ggml_backend_tensor_set(q, queries.data(), 0, ggml_nbytes(q));
    ggml_backend_buffer_clear(buffer.get(), 0);
    ggml_backend_tensor_set(q, queries.data(), 0, ggml_nbytes(q));
    const auto send = [&](T to, size_t shift) {
        const auto               n = (size_t) ggml_nelements(to);
        std::vector<ggml_fp16_t> some(std::min<size_t>(n, 16 * BLOCK));
        for (size_t i = 0; i < some.size(); i++) {
            some[i] = numbers[(i + shift) % BLOCK];
        }
        for (size_t at = 0; at < n; at += some.size()) {
            ggml_backend_tensor_set(to, some.data(), at * 2, std::min(some.size(), n - at) * 2);
        }
    };
    // the token's own row is the last row of each head; it already holds the zeros that the token writes
    std::vector<int64_t> own;
    for (size_t h = 0; h < rows.n.size(); h++) {
        own.push_back(rows.first[h] + rows.n[h] - 1 - (rows.shared ? 0 : (int64_t) h * rows.slots));
    }
    ggml_backend_tensor_set(index, own.data(), 0, ggml_nbytes(index));
    for (size_t l = 0; l < layers.size(); l++) {
        const Layer & layer = layers[l];
        if (l == 0) {
            send(layer.k, 0);
            send(layer.v, OTHER);
            for (size_t h = 0; h < rows.n.size(); h++) {
                const std::vector<ggml_fp16_t> zero((size_t) shape.d, ggml_fp32_to_fp16(0.0f));
                for (T x : { layer.k, layer.v }) {
                    ggml_backend_tensor_set(x, zero.data(), (size_t) (rows.first[h] + rows.n[h] - 1) * x->nb[1], zero.size() * 2);
                }
            }
        } else {
            ggml_backend_tensor_copy(layers[0].k, layer.k);
            ggml_backend_tensor_copy(layers[0].v, layer.v);
        }
        show(layer);
    }
}

void Bench::show(const Layer & layer) const {
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY), seen = ggml_fp32_to_fp16(0.0f);
    if (layer.mask) {
        std::vector<ggml_fp16_t> mask((size_t) ggml_nelements(layer.mask), hidden);
        const auto               width = (size_t) rows.slots;
        for (size_t line = 0; line < mask.size() / width; line++) {
            const size_t h = way == Way::list ? line / (size_t) shape.share : line;
            std::fill_n(mask.begin() + (std::ptrdiff_t) (line * width + (size_t) (rows.shared ? rows.first[h] : 0)), rows.n[h], seen);
        }
        ggml_backend_tensor_set(layer.mask, mask.data(), 0, ggml_nbytes(layer.mask));
    }
    if (layer.spans) {
        std::vector<int32_t> spans((size_t) ggml_nelements(layer.spans), 0);
        for (size_t h = 0; h < rows.n.size(); h++) {
            spans[h * (size_t) layer.spans->ne[0]]     = (int32_t) rows.first[h];
            spans[h * (size_t) layer.spans->ne[0] + 1] = (int32_t) rows.n[h];
        }
        ggml_backend_tensor_set(layer.spans, spans.data(), 0, ggml_nbytes(layer.spans));
    }
}

// Builds the attention of a layer: [d * H] of queries `from` [d * H]. writes: write the token's rows first.
T Bench::attend(ggml_context * c, const Layer & layer, T from, bool writes) const {
    T             k = layer.k, v = layer.v, mask = layer.mask;
    const int64_t d = shape.d, kv = shape.heads_kv, slots = rows.slots, share = shape.share, heads = shape.heads();
    if (writes && way == Way::list) {
        k = ggml_set_rows(c, k, fresh, index);
        v = ggml_set_rows(c, v, fresh, index);
    } else if (writes && way == Way::padded) {
        T row = ggml_view_3d(c, index, 1, kv, 1, index->nb[0], index->nb[1], 0);
        k     = ggml_set_rows(c, k, ggml_reshape_3d(c, fresh, d, 1, kv), row);
        v     = ggml_set_rows(c, v, ggml_reshape_3d(c, fresh, d, 1, kv), row);
    } else if (writes && way != Way::ragged) {
        T row = ggml_view_1d(c, index, 1, 0);
        k     = ggml_set_rows(c, k, ggml_reshape_3d(c, fresh, d, 1, kv), row);
        v     = ggml_set_rows(c, v, ggml_reshape_3d(c, fresh, d, 1, kv), row);
    }
    const float scale = 1.0f / std::sqrt((float) d);
    T           out   = nullptr;
    switch (way) {
        case Way::whole:
        case Way::equal: out = ggml_flash_attn_ext(c, ggml_reshape_3d(c, from, d, 1, heads), k, v, mask, scale, 0.0f, 0.0f); break;
        case Way::list:
            if (writes) {
                T column = ggml_view_3d(c, index, 1, 1, kv, index->nb[0], index->nb[0], 0);
                mask = ggml_set_rows(c, ggml_reshape_4d(c, mask, 1, slots, share, kv), ggml_reshape_4d(c, zeros, 1, 1, share, kv), column);
            }
            mask = ggml_reshape_2d(c, mask, slots, heads);
            out  = ggml_flash_attn_ext(c, ggml_reshape_2d(c, from, d, heads), k, v, mask, scale, 0.0f, 0.0f);
            break;
        case Way::padded:
            if (writes) {
                T column = ggml_view_3d(c, index, 1, 1, kv, index->nb[0], index->nb[0], 0);
                T opened = ggml_view_4d(c, zeros, 1, 1, 1, kv, zeros->nb[0], zeros->nb[0], zeros->nb[0], 0);
                mask     = ggml_set_rows(c, ggml_reshape_4d(c, mask, 1, slots, 1, kv), opened, column);
            }
            mask = ggml_reshape_4d(c, mask, slots, 1, 1, kv);
            out  = ggml_flash_attn_ext(c, ggml_reshape_4d(c, from, d, 1, share, kv), ggml_reshape_4d(c, k, d, slots, 1, kv),
                                       ggml_reshape_4d(c, v, d, slots, 1, kv), mask, scale, 0.0f, 0.0f);
            break;
        case Way::ragged:
            out         = ggml_flash_attn_ext(c, ggml_reshape_3d(c, from, d, 1, heads), k, v, nullptr, scale, 0.0f, 0.0f);
            out->src[5] = layer.spans;
            out->op_params[OWN_KIND + 1] = kernel;
            out->src[6] = out->src[7] = writes ? fresh : nullptr;
            out->src[8]               = writes ? index : nullptr;
    }
    ggml_prec_set_acc(out, GGML_PREC_F32);
    return ggml_reshape_1d(c, out, d * heads);
}

ggml_cgraph * Bench::graph(ggml_context_ptr & c, size_t n, bool writes, T & out) const {
    c.reset(ggml_init({ 32 * n * ggml_tensor_overhead() + ggml_graph_overhead_custom(32 * n, false), nullptr, true }));
    ggml_cgraph * graph = ggml_new_graph_custom(c.get(), 32 * n, false);
    out                 = q;
    for (size_t l = 0; l < n; l++) {
        out = attend(c.get(), layers[l], out, writes);
    }
    ggml_set_output(out);
    ggml_build_forward_expand(graph, out);
    return graph;
}

double Bench::error() {
    T             result = nullptr;
    ggml_cgraph * one    = graph(one_nodes, 1, true, result);
    one_memory.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)));
    ggml_gallocr_alloc_graph(one_memory.get(), one);
    for (int i = 0; i < ggml_graph_n_nodes(one); i++) {
        if (!ggml_backend_supports_op(backend, ggml_graph_node(one, i))) {
            return NAN;
        }
    }
    ggml_backend_graph_compute(backend, one);
    std::vector<float> got((size_t) ggml_nelements(result));
    ggml_backend_tensor_get(result, got.data(), 0, ggml_nbytes(result));
    std::vector<double> logits, sum((size_t) shape.d);
    const auto          d = (size_t) shape.d;
    double              most_far = 0.0;
    for (size_t head = 0; head < (size_t) shape.heads(); head++) {
        const size_t h = head / (size_t) shape.share, n = (size_t) rows.n[h];
        logits.assign(n, 0.0);  // the token's own row has logit 0
        for (size_t r = 0; r + 1 < n; r++) {
            for (size_t i = 0; i < d; i++) {
                logits[r] += (double) queries[head * d + i] * (double) ggml_fp16_to_fp32(key(((size_t) rows.first[h] + r) * d + i));
            }
            logits[r] /= std::sqrt((double) d);
        }
        const double most = *std::max_element(logits.begin(), logits.end());
        double       all  = 0.0;
        sum.assign(d, 0.0);
        for (size_t r = 0; r < n; r++) {
            const double w = std::exp(logits[r] - most);
            all += w;
            for (size_t i = 0; i < d && r + 1 < n; i++) {
                sum[i] += w * (double) ggml_fp16_to_fp32(value(((size_t) rows.first[h] + r) * d + i));
            }
        }
        for (size_t i = 0; i < d; i++) {
            const double far = std::fabs((double) got[head * d + i] - sum[i] / all);
            most_far         = far > most_far || std::isnan(far) ? far : most_far;
        }
    }
    return most_far;
}

double Bench::microseconds(bool writes) {
    T             out = nullptr;
    ggml_cgraph * all = graph(nodes, layers.size(), writes, out);
    memory.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)));
    ggml_gallocr_alloc_graph(memory.get(), all);
    for (int i = 0; i < 4; i++) {
        ggml_backend_graph_compute(backend, all);
    }
    double best = 1e30;
    for (int round = 0; round < 5; round++) {
        constexpr int TIMES = 10;
        const auto    begin = std::chrono::steady_clock::now();
        for (int i = 0; i < TIMES; i++) {
            ggml_backend_graph_compute_async(backend, all);
        }
        ggml_backend_synchronize(backend);
        best = std::min(best, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / TIMES);
    }
    return best / (double) layers.size();
}

// Returns lengths with a log-normal distribution, as an allocator by scores makes them. most: longest length divided by the mean.
std::vector<int64_t> lengths_of(int64_t heads, int64_t mean, double most) {
    std::vector<double> z;
    for (int64_t i = 0; i < heads; i++) {  // normal quantiles, approximated by the logistic distribution
        const double p = ((double) i + 0.5) / (double) heads;
        z.push_back(std::log(p / (1.0 - p)) / 1.7);
    }
    most = std::min(most, 0.9 * (double) heads);
    std::vector<double> x;
    double              low = 0.0, high = 5.0, sum = 1.0;
    for (int i = 0; i < 60; i++) {
        const double sigma = (low + high) / 2;
        x.clear();
        std::transform(z.begin(), z.end(), std::back_inserter(x), [&](double at) { return std::exp(sigma * at); });
        sum = std::accumulate(x.begin(), x.end(), 0.0);
        (x.back() * (double) heads / sum > most ? high : low) = sigma;
    }
    std::vector<int64_t> out;
    for (double part : x) {
        out.push_back(std::max<int64_t>(2, std::llround(part / sum * (double) (heads * mean))));
    }
    std::shuffle(out.begin(), out.end(), std::mt19937(3));
    return out;
}

void measure(ggml_backend_t backend, const Shape & shape, int64_t mean, double most, Way way, int kernel = 0) {
    const auto        lengths = lengths_of(shape.heads_kv, mean, most);
    Bench             bench{ backend, shape, way, kernel, rows_of(way, lengths), {}, {}, {}, {}, {}, {}, {}, nullptr, nullptr, nullptr, nullptr, {}, {} };
    const std::string name = kernel == 0 ? NAMES[(int) way] : std::to_string(kernel);
    std::printf("%-10s %6lld %4.1f %-7s ", shape.name, (long long) mean, most, name.c_str());
    bench.make_tensors();
    if (!bench.buffer) {
        std::printf("no memory\n");
        return;
    }
    bench.fill();
    const double far = way == Way::whole || mean > 4096 ? 0.0 : bench.error();
    if (std::isnan(far)) {
        std::printf("not supported, or not a number\n");
        return;
    }
    const double alone = bench.microseconds(false), with = bench.microseconds(true);
    const double bytes = (double) ggml_backend_buffer_get_size(bench.buffer.get()) / (double) shape.layers;
    std::printf("%9.2f %9.2f us %9.2f MiB   error %.1e\n", alone, with, bytes / 1048576, far);
    std::fflush(stdout);
}

void measure_ways(ggml_backend_t backend, const Shape & shape, int64_t mean) {
    measure(backend, shape, mean, 1.0, Way::whole);
    measure(backend, shape, mean, 1.0, Way::equal);
    for (const double most : { 1.5, 3.0 }) {
        for (const Way way : { Way::list, Way::padded, Way::ragged }) {
            measure(backend, shape, mean, most, way);
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    const std::string  module = argc > 1 ? argv[1] : "cpu";
    const std::string  what = argc > 2 ? argv[2] : "";
    const bool         tiny = what == "tiny";
    ggml_backend_reg_t reg    = module != "cpu" ? ggml_backend_load(module.c_str()) : nullptr;
    ggml_backend_dev_t device = reg ? ggml_backend_reg_dev_get(reg, 0) : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!device || (module != "cpu" && !reg)) {
        std::fprintf(stderr, "no device in %s\n", module.c_str());
        return 1;
    }
    if (!ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "kvedge_ragged_attention")) {
        std::fprintf(stderr, "the device has no attention over heads of different lengths\n");
        return 1;
    }
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    const int64_t    layers   = tiny ? 2 : 24;
    const Shape      shapes[] = { { "16x1 d128", 128, 16, 1, layers }, { "2x6 d128", 128, 2, 6, layers } };
    std::printf("%s\nshape        mean  max way          alone with writes\n", ggml_backend_dev_description(device));
    for (const int64_t mean : tiny ? std::vector<int64_t>{ 30, 300 } : std::vector<int64_t>{ 410, 3276, 13107 }) {
        for (const Shape & shape : shapes) {
            if (what != "kernels") {
                measure_ways(backend.get(), shape, mean);
            }
        }
        for (const Shape & shape : { shapes[0], shapes[1], Shape{ "8x4 d128", 128, 8, 4, layers }, Shape{ "8x4 d64", 64, 8, 4, layers } }) {
            if (what == "kernels") {
                measure(backend.get(), shape, mean, 1.0, Way::equal);
            }
            for (const int kernel : what == "kernels" ? std::vector<int>(std::begin(KERNELS), std::end(KERNELS)) : std::vector<int>()) {
                measure(backend.get(), shape, mean, 2.0, Way::ragged, kernel);
            }
        }
    }
    return 0;
}
