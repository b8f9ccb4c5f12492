// Compares OWN_RAGGED, attention over KV heads of different lengths, with a reference in double precision: on the CPU, or on the first
// device of a ggml backend whose file is the argument.

#include "check.h"
#include "device/own.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

namespace {

struct Case {
    int       d_k, d_v, heads_kv, share;
    ggml_type type;
    int       longest;
    bool      biased = false, sunk = false;
    float     softcap = 0.0f;
    int       kernel  = 0;  // op_params[OWN_KIND + 1] (cuda/ragged.cu)

    bool writes() const { return share != 2; }  // whether the operation writes the last row of each head
};

struct Values {
    std::vector<float>       q, sinks;        // [H][d_k], [H]
    std::vector<float>       k, v;            // [slots][d], rounded to the type
    std::vector<ggml_fp16_t> biases;          // [slots]
    std::vector<int32_t>     first, n;        // [Hkv]
    int                      slots = 0;
};

// Returns the bytes of values in a type, and rounds values to the type.
std::vector<uint8_t> stored(ggml_type type, std::vector<float> & values) {
    std::vector<uint8_t> out(ggml_row_size(type, (int64_t) values.size()));
    const auto           n = (int64_t) values.size();
    if (type == GGML_TYPE_F16) {
        ggml_fp32_to_fp16_row(values.data(), (ggml_fp16_t *) out.data(), n);
        ggml_fp16_to_fp32_row((const ggml_fp16_t *) out.data(), values.data(), n);
    } else if (type == GGML_TYPE_BF16) {
        ggml_fp32_to_bf16_row(values.data(), (ggml_bf16_t *) out.data(), n);
        ggml_bf16_to_fp32_row((const ggml_bf16_t *) out.data(), values.data(), n);
    } else {
        std::copy_n((const uint8_t *) values.data(), out.size(), out.data());
    }
    return out;
}

Values values_of(const Case & of, uint32_t seed) {
    std::mt19937                    random(seed);
    std::normal_distribution<float> normal;
    static const auto               pool = [&] {  // a prime number of values, so that rows do not repeat
        std::vector<float> x(1048573);
        std::generate(x.begin(), x.end(), [&] { return normal(random); });
        return x;
    }();
    Values out;
    for (int h = 0; h < of.heads_kv; h++) {
        out.slots += (int) (random() % 40);
        out.first.push_back(out.slots);
        out.n.push_back(h == 1 ? 1 : h == 2 ? of.longest : 1 + (int) (random() % (uint32_t) of.longest));
        out.slots += out.n.back() + (int) (random() % 40);
    }
    const auto fill = [&](std::vector<float> & x, size_t n, float by) {
        size_t at = random();
        x.resize(n);
        std::generate(x.begin(), x.end(), [&] { return by * pool[at++ % pool.size()]; });
    };
    const auto heads = (size_t) (of.heads_kv * of.share), slots = (size_t) out.slots;
    fill(out.q, heads * (size_t) of.d_k, 1.5f);
    fill(out.k, slots * (size_t) of.d_k, 1.0f);
    fill(out.v, slots * (size_t) of.d_v, 1.0f);
    fill(out.sinks, heads, 2.0f);
    for (size_t i = 0; i < slots; i++) {
        out.biases.push_back(ggml_fp32_to_fp16(i % 11 == 3 ? -INFINITY : normal(random)));
    }
    for (int h = 0; h < of.heads_kv; h++) {  // at least the first row of each head is visible
        out.biases[(size_t) out.first[(size_t) h]] = ggml_fp32_to_fp16(0.5f);
    }
    return out;
}

std::vector<int32_t> spans_of(const Case & of, const Values & x) {
    std::vector<int32_t> out;
    for (size_t h = 0; h < x.n.size(); h++) {
        out.push_back(x.first[h]);
        out.push_back(x.n[h]);
        out.insert(out.end(), (size_t) of.share, 0);
    }
    return out;
}

std::vector<double> expected(const Case & of, const Values & x) {
    std::vector<double> out;
    const double        scale = 1.0 / std::sqrt((double) of.d_k);
    for (int head = 0; head < of.heads_kv * of.share; head++) {
        const auto          h = (size_t) (head / of.share);
        std::vector<double> logits, sum((size_t) of.d_v, 0.0);
        for (int row = x.first[h]; row < x.first[h] + x.n[h]; row++) {
            double logit = 0.0;
            for (int i = 0; i < of.d_k; i++) {
                logit += (double) x.q[(size_t) (head * of.d_k + i)] * (double) x.k[(size_t) row * (size_t) of.d_k + (size_t) i];
            }
            logit *= scale;
            logit = of.softcap == 0.0f ? logit : (double) of.softcap * std::tanh(logit / (double) of.softcap);
            logits.push_back(logit + (of.biased ? (double) ggml_fp16_to_fp32(x.biases[(size_t) row]) : 0.0));
        }
        const double most   = *std::max_element(logits.begin(), logits.end());
        double       weight = of.sunk ? std::exp((double) x.sinks[(size_t) head] - most) : 0.0;
        for (size_t row = 0; row < logits.size(); row++) {
            const double w = std::exp(logits[row] - most);
            weight += w;
            for (size_t i = 0; i < sum.size(); i++) {
                sum[i] += w * (double) x.v[((size_t) x.first[h] + row) * sum.size() + i];
            }
        }
        std::transform(sum.begin(), sum.end(), std::back_inserter(out), [&](double s) { return s / weight; });
    }
    return out;
}

struct Graph {
    ggml_context_ptr        context;
    ggml_backend_buffer_ptr buffer;
    ggml_cgraph *           graph = nullptr;
    ggml_tensor *           spans = nullptr, *out = nullptr, *k = nullptr, *v = nullptr;
    ggml_tensor *           fresh[3] = {};  // keys, values, slots
};

Graph graph_of(ggml_backend_t backend, const Case & of, Values & x) {
    Graph graph;
    graph.context.reset(ggml_init({ 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    ggml_context * c     = graph.context.get();
    const int64_t  heads = of.heads_kv * of.share;
    ggml_tensor *  q     = ggml_new_tensor_3d(c, GGML_TYPE_F32, of.d_k, 1, heads);
    ggml_tensor *  k     = ggml_new_tensor_2d(c, of.type, of.d_k, x.slots);
    ggml_tensor *  v     = ggml_new_tensor_2d(c, of.type, of.d_v, x.slots);
    ggml_tensor *  bias  = of.biased ? ggml_new_tensor_1d(c, GGML_TYPE_F16, x.slots) : nullptr;
    ggml_tensor *  sinks = of.sunk ? ggml_new_tensor_1d(c, GGML_TYPE_F32, heads) : nullptr;
    graph.spans          = ggml_new_tensor_2d(c, GGML_TYPE_I32, 2 + of.share, of.heads_kv);
    graph.out            = ggml_flash_attn_ext(c, q, k, v, bias, 1.0f / std::sqrt((float) of.d_k), 0.0f, of.softcap);
    graph.out->src[5]    = graph.spans;
    graph.out->op_params[OWN_KIND + 1] = of.kernel;
    if (sinks) {
        ggml_flash_attn_ext_add_sinks(graph.out, sinks);
    }
    graph.k = k, graph.v = v;
    for (int i = 0; i < 3 && of.writes(); i++) {
        graph.fresh[i] = i == 2 ? ggml_new_tensor_1d(c, GGML_TYPE_I64, of.heads_kv) : ggml_new_tensor_2d(c, GGML_TYPE_F32, i == 0 ? of.d_k : of.d_v, of.heads_kv);
        graph.out->src[6 + i] = graph.fresh[i];
    }
    graph.graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph.graph, graph.out);
    graph.buffer.reset(ggml_backend_alloc_ctx_tensors(c, backend));
    const auto keys = stored(of.type, x.k), values = stored(of.type, x.v);
    ggml_backend_tensor_set(q, x.q.data(), 0, ggml_nbytes(q));
    ggml_backend_tensor_set(k, keys.data(), 0, keys.size());
    ggml_backend_tensor_set(v, values.data(), 0, values.size());
    if (bias) {
        ggml_backend_tensor_set(bias, x.biases.data(), 0, ggml_nbytes(bias));
    }
    if (sinks) {
        ggml_backend_tensor_set(sinks, x.sinks.data(), 0, ggml_nbytes(sinks));
    }
    return graph;
}

double distance(const std::vector<float> & a, const std::vector<double> & b) {
    double most = 0.0;
    for (size_t i = 0; i < a.size(); i++) {
        const double far = std::fabs((double) a[i] - b[i]);
        most             = far > most || std::isnan(far) ? far : most;
    }
    return most;
}

// Puts new numbers for the last row of each head into the inputs that the operation copies from, and NaN into the slots it writes to.
void renew(const Case & of, const Graph & graph, Values & x) {
    std::vector<int64_t> slots;
    for (size_t h = 0; h < x.n.size(); h++) {
        slots.push_back(x.first[h] + x.n[h] - 1);
    }
    const auto send = [&](ggml_tensor * to, ggml_tensor * from, std::vector<float> & rows, size_t d) {
        std::vector<float> fresh;
        for (const int64_t slot : slots) {
            const auto row = rows.begin() + (std::ptrdiff_t) ((size_t) slot * d);
            std::reverse(row, row + (std::ptrdiff_t) d);
            fresh.insert(fresh.end(), row, row + (std::ptrdiff_t) d);
            std::vector<float> none(d, NAN);
            const auto         bytes = stored(of.type, none);
            ggml_backend_tensor_set(to, bytes.data(), (size_t) slot * to->nb[1], bytes.size());
        }
        ggml_backend_tensor_set(from, fresh.data(), 0, ggml_nbytes(from));
    };
    send(graph.k, graph.fresh[0], x.k, (size_t) of.d_k);
    send(graph.v, graph.fresh[1], x.v, (size_t) of.d_v);
    ggml_backend_tensor_set(graph.fresh[2], slots.data(), 0, ggml_nbytes(graph.fresh[2]));
}

// Runs a graph twice with the same spans, then with other lengths, because one graph serves many tokens.
void attend(ggml_backend_t backend, const Case & of, uint32_t seed) {
    constexpr double CLOSE = 2e-5;  // sums of numbers of order 1 in f32
    Values           x     = values_of(of, seed);
    const Graph      graph = graph_of(backend, of, x);
    CHECK(ggml_backend_supports_op(backend, graph.out));
    for (const int shorter : { 0, 1 }) {
        for (int32_t & n : x.n) {
            n -= n > 1 ? shorter : 0;
        }
        if (of.writes()) {
            renew(of, graph, x);
        }
        const auto spans = spans_of(of, x);
        const auto right = expected(of, x);
        ggml_backend_tensor_set(graph.spans, spans.data(), 0, ggml_nbytes(graph.spans));
        for (int again = 0; again < 3; again++) {
            std::vector<float> out(right.size(), NAN);
            CHECK(ggml_backend_graph_compute(backend, graph.graph) == GGML_STATUS_SUCCESS);
            ggml_backend_tensor_get(graph.out, out.data(), 0, out.size() * sizeof(float));
            const double far = distance(out, right);
            if (!(far < CLOSE)) {
                std::fprintf(stderr, "d %d/%d, %d KV heads x %d, %s, up to %d rows, bias %d, sinks %d, softcap %g, time %d: %g\n", of.d_k, of.d_v,
                             of.heads_kv, of.share, ggml_type_name(of.type), of.longest, of.biased, of.sunk, (double) of.softcap, again, far);
                failures()++;
            }
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    ggml_backend_reg_t reg    = argc > 1 ? ggml_backend_load(argv[1]) : nullptr;
    ggml_backend_dev_t device = reg ? ggml_backend_reg_dev_get(reg, 0) : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!device || (argc > 1 && !reg)) {
        std::fprintf(stderr, "no device\n");
        return 1;
    }
    CHECK(ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "kvedge_ragged_attention") != nullptr);
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    uint32_t         seed = 1;
    for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32 }) {
        for (const int d : { 64, 80, 128, 256 }) {
            for (const int share : { 1, 2, 3, 4, 6, 7, 12 }) {
                attend(backend.get(), { d, d, 4, share, type, 1000 }, seed++);
                attend(backend.get(), { d, d, 3, share, type, 90, true, true, 20.0f }, seed++);
            }
        }
        attend(backend.get(), { 96, 64, 40, 1, type, 300, true }, seed++);
        attend(backend.get(), { 128, 128, 2, 6, type, 9000, true, true, 30.0f }, seed++);
        attend(backend.get(), { 64, 64, 9, 16, type, 400 }, seed++);
        for (const int share : { 1, 2, 4 }) {
            for (const int kernel : { -32, 64, 8192 }) {
                attend(backend.get(), { 128, 128, 5, share, type, 3000, true, true, 0.0f, kernel }, seed++);
            }
        }
        attend(backend.get(), { 112, 112, 1, 8, type, 5000, false, true }, seed++);
        attend(backend.get(), { 128, 128, 16, 1, type, 7000, false, false, 50.0f }, seed++);
        attend(backend.get(), { 48, 48, 3, 2, type, 3 }, seed++);
    }
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
