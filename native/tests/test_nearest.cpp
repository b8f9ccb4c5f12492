// Compares OWN_NEAREST with a search in double precision.
//
//   test_nearest [DEVICE]      DEVICE: name of a ggml device; default: the CPU

#include "check.h"
#include "device.h"
#include "nearest.h"

#include <cmath>
#include <cstdio>

namespace {

struct Case {
    int64_t                                  d;
    ggml_type                                type;
    float                                    reach;
    std::vector<std::pair<int32_t, int32_t>> counts;
    bool                                     odd = false;  // some keys are zero or have infinities or NaN
};

// Returns random keys rounded to the type, and writes their bytes to `out`. Every 40th key is a copy of another key.
std::vector<float> keys_of(const Case & of, int64_t slots, std::mt19937 & random, std::vector<uint16_t> & out) {
    std::normal_distribution<float> normal;
    std::vector<float>              x((size_t) (slots * of.d));
    std::generate(x.begin(), x.end(), [&] { return normal(random); });
    for (int64_t r = 0; r < slots; r++) {
        float * row = &x[(size_t) (r * of.d)];
        if (r % 40 == 27 && r > 20) {
            std::copy_n(row - 20 * of.d, of.d, row);
        } else if (of.odd && r % 17 == 3) {
            std::fill_n(row, of.d, 0.0f);
        } else if (of.odd && r % 29 == 7) {
            row[1] = r % 2 == 0 ? NAN : INFINITY;
        }
    }
    out.resize(x.size());
    if (of.type == GGML_TYPE_F16) {
        ggml_fp32_to_fp16_row(x.data(), out.data(), (int64_t) x.size());
        ggml_fp16_to_fp32_row(out.data(), x.data(), (int64_t) x.size());
    } else {
        ggml_fp32_to_bf16_row(x.data(), (ggml_bf16_t *) out.data(), (int64_t) x.size());
        ggml_bf16_to_fp32_row((const ggml_bf16_t *) out.data(), x.data(), (int64_t) x.size());
    }
    return x;
}

double product(const float * a, const float * b, int64_t d) {
    double sum = 0.0;
    for (int64_t i = 0; i < d; i++) {
        sum += (double) a[i] * (double) b[i];
    }
    return sum;
}

// Returns whether a result is right. A target whose score equals the best score up to rounding is right, too.
bool right(const Case & of, const Heads & heads, const std::vector<float> & x, size_t h, size_t i, int32_t target, float share) {
    const int32_t * about = &heads.about[h * NEAREST_HEAD];
    const float *   key   = &x[(size_t) (heads.evicted[h][i] * of.d)];
    const double    own = product(key, key, of.d), close = 1e-5 * own, reach = (double) of.reach;
    double          best = -INFINITY, its = -INFINITY;
    int32_t         first = -1;  // the first kept row with the best score
    for (int32_t j = 0; j < about[NEAREST_KEPT]; j++) {
        const float * kept  = &x[(size_t) (heads.kept[(size_t) (about[NEAREST_KEPT_AT] + j)] * of.d)];
        const double  dot = product(key, kept, of.d), square = product(kept, kept, of.d);
        const double  score = reach > 0.0 ? dot - 0.5 * square : square > 0.0 ? dot / std::sqrt(square) : -INFINITY;
        first = score > best ? j : first;
        best  = score > best ? score : best;
        its   = j == target ? score : its;
    }
    if (!std::isfinite(own) || first < 0 || (reach <= 0.0 && own == 0.0)) {
        return target == -1;
    }
    const double over = reach > 0.0 ? own - 2.0 * best - reach * reach * own : -INFINITY;  // above 0: out of reach
    if (target == -1) {
        return over >= -close;
    }
    const bool near = target == first || (its < best && its > best - close);  // of equal keys only the first is right
    return near && over <= close && (reach > 0.0 || std::fabs((double) share - its / std::sqrt(own)) < 1e-4);
}

void try_case(ggml_backend_t backend, const Case & of) {
    std::mt19937          random(5);
    const Heads           heads(of.counts, random);
    std::vector<uint16_t> bytes;
    const auto            x = keys_of(of, heads.slots, random, bytes);
    const bool            small = of.type == GGML_TYPE_F16 && of.reach > 0.0f, two = of.reach <= 0.0f;
    const NearestGraph    graph(backend, heads, { of.d, of.type, of.reach, small ? GGML_TYPE_I16 : GGML_TYPE_I32, two });
    ggml_backend_tensor_set(graph.keys, bytes.data(), 0, ggml_nbytes(graph.keys));
    CHECK(ggml_backend_supports_op(backend, graph.out));
    CHECK(ggml_backend_graph_compute(backend, graph.graph) == GGML_STATUS_SUCCESS);
    std::vector<uint8_t> out(ggml_nbytes(graph.out));
    ggml_backend_tensor_get(graph.out, out.data(), 0, out.size());
    const auto * wide   = (const int32_t *) out.data();
    const auto * narrow = (const int16_t *) out.data();
    size_t wrong = 0, joined = 0, all = 0;
    for (size_t h = 0; h < heads.evicted.size(); h++) {
        for (size_t i = 0; i < heads.evicted[h].size(); i++) {
            const size_t at    = (size_t) heads.about[h * NEAREST_HEAD + NEAREST_AT] + i;
            float        share = 1.0f;
            if (two) {
                std::memcpy(&share, wide + at + heads.entries, sizeof(float));
            }
            const int32_t target = small ? narrow[at] : wide[at];
            wrong += right(of, heads, x, h, i, target, share) ? 0 : 1;
            joined += target >= 0 ? 1 : 0;
            all++;
        }
    }
    if (wrong > 0 || joined < all / 4) {
        std::fprintf(stderr, "d %lld, %s, reach %g, odd %d: %zu of %zu are wrong, %zu join\n", (long long) of.d, ggml_type_name(of.type),
                     (double) of.reach, of.odd, wrong, all, joined);
        failures()++;
    }
}

}  // namespace

int main(int argc, char ** argv) {
    ggml_backend_dev_t device = argc > 1 ? device_named(argv[1]) : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!device) {
        return 1;
    }
    ggml_backend_ptr                               backend(ggml_backend_dev_init(device, nullptr));
    const std::vector<std::pair<int32_t, int32_t>> uneven = { { 70, 130 }, { 1, 50 }, { 64, 0 }, { 200, 300 }, { 65, 1 }, { 33, 128 } };
    std::vector<std::pair<int32_t, int32_t>>       many;
    for (int32_t i = 0; i < 40; i++) {
        many.emplace_back(1 + i * 3 % 20, i * 13 % 150);
    }
    for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_BF16 }) {
        for (const float reach : { 1.3f, 0.0f }) {
            for (const int64_t d : { 32, 64, 80, 96, 128, 256 }) {
                try_case(backend.get(), { d, type, reach, uneven, false });
                try_case(backend.get(), { d, type, reach, uneven, true });
            }
            try_case(backend.get(), { 72, type, reach, many });
            try_case(backend.get(), { 128, type, reach, { { 410, 1638 }, { 1, 2047 } } });
        }
    }
    return failures() == 0 ? 0 : 1;
}
