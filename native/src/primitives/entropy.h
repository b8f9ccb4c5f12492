// Entropy of the attention between text and images: each looks at all of the other, in any order of tokens.

#pragma once

#include "rows/rows.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// Queries of one modality, and the keys of the other.
struct CrossAttention {
    std::vector<int32_t> queries;  // token indices, ascending, of kept queries
    std::vector<int32_t> unseen;   // per query, the first place in keys whose key is later than the query
    std::vector<int32_t> keys;     // pending rows, ascending
};

// Returns the sum, over one KV head's query heads and the queries, of the entropy in nats of softmax(q k^T * scale) over the keys.
// QueryRow::seen holds what a query saw when it attended; only later keys are looked at here. view: of that head.
double attention_entropy(
    const LayerShape & shape, const HeadView & view, const std::vector<QuerySpan> & spans, int32_t head, const CrossAttention & cross);

}  // namespace kvedge
