// Fuzzes kvedge_compress_arrays and kvedge_stream_arrays: all members and settings, and arrays with NaN and infinity.

#include "fuzz/plans.h"

using namespace kvedge::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    Input  in(data, size);
    Arrays arrays;
    draw_arrays(in, arrays);
    const PlanHandle plan = new_plan();
    draw_plan(in, plan.get(), arrays.of.n_layers, arrays.of.n_heads, arrays.of.n_heads_kv);
    give_projection(plan.get(), arrays.of);
    (void) compress(in, plan.get(), arrays);
    return 0;
}
