// Makes plans and arrays from a fuzzer's bytes, and compresses the arrays.

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

// Returns a plan that keeps everything.
PlanHandle new_plan();

// Sets stages, their settings, the budget and the protected tokens of a plan, and maybe a profile for these shapes.
void draw_plan(Input & in, kvedge_plan * plan, int32_t n_layers, int32_t n_heads, int32_t n_heads_kv);

// Gives a plan an output projection for the shape of the arrays. Reads no bytes of the input.
void give_projection(kvedge_plan * plan, const kvedge_arrays & of);

struct Arrays {
    kvedge_arrays        of{};
    std::vector<float>   q, k, v;
    std::vector<uint8_t> mask;
};

// Makes arrays with at most 2 layers, 6 query heads, 80 tokens. Most numbers are pseudo-random, some are from the input.
void draw_arrays(Input & in, Arrays & out);

// Compresses the arrays, at once or as a stream, and checks the whole result. False: kvedge refused the plan or the arrays.
bool compress(Input & in, const kvedge_plan * plan, const Arrays & arrays);

}  // namespace kvedge::fuzz
