// OWN_NEAREST (device/own.h) over random keys, for test_nearest and bench_nearest.

#pragma once

#include "device/own.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

// KV heads of a layer, each with kept rows and evicted rows.
struct Heads {
    std::vector<int32_t>              kept, about;  // src[3] and src[5] of the operation
    std::vector<std::vector<int32_t>> evicted;      // [head] slots of the evicted rows
    int64_t                           slots = 0, entries = 0;

    // counts [head]: numbers of kept and evicted rows
    Heads(const std::vector<std::pair<int32_t, int32_t>> & counts, std::mt19937 & random) {
        for (const auto & [n, m] : counts) {
            std::vector<int32_t> rows((size_t) (n + m));
            slots += 5;
            about.insert(about.end(), { (int32_t) slots, (int32_t) kept.size(), n, (int32_t) entries, m });
            std::iota(rows.begin(), rows.end(), (int32_t) slots);
            std::shuffle(rows.begin(), rows.end(), random);
            std::sort(rows.begin(), rows.begin() + n);
            std::sort(rows.begin() + n, rows.end());
            kept.insert(kept.end(), rows.begin(), rows.begin() + n);
            evicted.emplace_back(rows.begin() + n, rows.end());
            slots += n + m;
            entries += (m + NEAREST_TILE - 1) / NEAREST_TILE * NEAREST_TILE;
        }
    }
};

struct Nearest {
    int64_t   d;
    ggml_type type;
    float     reach;
    ggml_type result;
    bool      two;  // two rows of results: targets and similarities
};

struct NearestGraph {
    ggml_context_ptr        context;
    ggml_backend_buffer_ptr buffer;
    ggml_cgraph *           graph = nullptr;
    ggml_tensor *           keys  = nullptr, *out = nullptr;

    // times: how often the graph contains the operation, for a benchmark
    NearestGraph(ggml_backend_t backend, const Heads & heads, const Nearest & of, int times = 1) {
        context.reset(ggml_init({ (size_t) (8 + 2 * times) * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
        ggml_context * c     = context.get();
        ggml_tensor *  kept  = ggml_new_tensor_1d(c, GGML_TYPE_I32, (int64_t) heads.kept.size());
        ggml_tensor *  about = ggml_new_tensor_2d(c, GGML_TYPE_I32, NEAREST_HEAD, (int64_t) heads.evicted.size());
        keys                 = ggml_new_tensor_2d(c, of.type, of.d, heads.slots);
        graph                = ggml_new_graph(c);
        for (int i = 0; i < times; i++) {
            out         = ggml_new_tensor_2d(c, of.result, heads.entries, of.two ? 2 : 1);
            out->op     = GGML_OP_FLASH_ATTN_EXT;
            out->src[0] = out->src[1] = out->src[2] = keys;
            out->src[3] = kept;
            out->src[5] = about;
            out->op_params[OWN_KIND] = OWN_NEAREST;
            std::memcpy(out->op_params + OWN_KIND + 1, &of.reach, sizeof(float));
            ggml_build_forward_expand(graph, out);
        }
        buffer.reset(ggml_backend_alloc_ctx_tensors(c, backend));
        ggml_backend_tensor_set(kept, heads.kept.data(), 0, ggml_nbytes(kept));
        ggml_backend_tensor_set(about, heads.about.data(), 0, ggml_nbytes(about));
    }
};
