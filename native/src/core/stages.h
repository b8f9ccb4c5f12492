// What a stage member is to the rest of the library. A member lives in a file of its own, named as it is registered;
// registry.cpp lists them.

#pragma once

#include "kvedge.h"
#include "store/sequence.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// One layer's pending tokens, as a scorer sees them.
struct ScoreInput {
    const LayerShape * shape;
    int32_t            n_tokens;      // T
    const double *     column_sums;   // [Hkv][sums_capacity], averaged over the group; NULL unless asked for
    int32_t            sums_capacity;
};

struct Scorer {
    const char * name;
    bool         needs_column_sums;
    bool         recent_by_default;  // recent = auto protects half of the budget
    void (*score)(const ScoreInput & in, int32_t head, float * out);  // out [T], larger matters more
};

struct AllocateInput {
    const std::vector<LayerShape> * shapes;
    int32_t                         n_tokens;  // T
    int32_t                         budget;    // KV pairs per layer and head on average, 1 <= budget < T
};

struct Allocator {
    const char * name;
    // out[layer][head] KV pairs to keep; their sum is budget * (number of layers and heads), never above.
    void (*allocate)(const AllocateInput & in, std::vector<std::vector<int32_t>> & out);
};

// One head's rows in float32, and which of them stay.
struct ReduceInput {
    int32_t         n_tokens, d_k, d_v;
    const float *   k;     // [T][d_k]
    const float *   v;     // [T][d_v]
    const int32_t * kept;  // [n_kept] ascending
    int32_t         n_kept;
    float *         scratch;  // as many floats as the reducer's scratch() asked for
};

struct Reducer {
    const char * name;
    // k [n_kept][d_k], v [n_kept][d_v]: the rows to store. Allocates nothing: it must not fail half-way. NULL: the kept
    // rows as they are.
    void (*reduce)(const ReduceInput & in, float * k, float * v);
    size_t (*scratch)(int32_t n_tokens, int32_t n_kept, int32_t d_k);
};

struct DecodePolicy {
    const char * name;
};

const Scorer *       find_scorer(const char * name);
const Allocator *    find_allocator(const char * name);
const Reducer *      find_reducer(const char * name);
const DecodePolicy * find_decode(const char * name);


}  // namespace kvedge
