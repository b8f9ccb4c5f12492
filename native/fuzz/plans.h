// Plans, arrays and what is compressed of them, drawn from a fuzzer's bytes.

#pragma once

#include "fuzz/input.h"
#include "kvedge.h"

#include <memory>

namespace kvedge::fuzz {

struct Free {
    void operator()(kvedge_plan * plan) const { kvedge_plan_free(plan); }
    void operator()(kvedge_result * result) const { kvedge_result_free(result); }
};
using PlanHandle   = std::unique_ptr<kvedge_plan, Free>;
using ResultHandle = std::unique_ptr<kvedge_result, Free>;

// A plan that keeps everything.
PlanHandle new_plan();

// Sets stages, their settings, the budget and what is protected; a profile where a stage takes one of these shapes.
void draw_plan(Input & in, kvedge_plan * plan, int32_t n_layers, int32_t n_heads, int32_t n_heads_kv);

// Gives a plan the output projection of arrays of that shape. Reads no bytes.
void give_projection(kvedge_plan * plan, const kvedge_arrays & of);

struct Arrays {
    kvedge_arrays        of{};
    std::vector<float>   q, k, v;
    std::vector<uint8_t> mask;
};

// Small ones: at most 2 layers, 6 query heads, 80 tokens. Most numbers are from a short random series, some from the input.
void draw_arrays(Input & in, Arrays & out);

// Compresses the arrays, at once or as a stream, and looks at all of the result. False: it was refused.
bool compress(Input & in, const kvedge_plan * plan, const Arrays & arrays);

}  // namespace kvedge::fuzz
