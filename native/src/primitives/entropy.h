// Entropy of the attention between text and images, each looking at all of the other, whatever their order.

#pragma once

#include "rows/rows.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// Queries of one modality, and the keys of the other.
struct CrossAttention {
    std::vector<int32_t> queries;  // token indices, ascending, of queries that were kept
    std::vector<int32_t> unseen;   // per query, the place in keys from which on the keys are later than it
    std::vector<int32_t> keys;     // pending rows, ascending
};

// Sum, over one KV head's query heads and the queries, of the entropy in nats of softmax(q k^T * scale) over the keys.
// What a query saw of them when it attended is known already (QueryRow::seen); only the later keys are looked at here.
// view: of that head.
double attention_entropy(
    const LayerShape & shape, const HeadView & view, const std::vector<QuerySpan> & spans, int32_t head, const CrossAttention & cross);

}  // namespace kvedge
