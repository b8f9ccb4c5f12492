// The pending tokens (tokens that wait for a compression), as scorers and allocators see them.

#pragma once

#include "rows/rows.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// Shows the rows of a head and the kept queries of a layer. A view is valid until a row is written or dropped.
// Several threads may call it at once. Throws std::bad_alloc.
class PendingView {
  public:
    virtual ~PendingView() = default;
    virtual HeadView               head(int32_t layer, int32_t head) const = 0;
    virtual std::vector<QuerySpan> queries(int32_t layer) const            = 0;  // in token order
};

}  // namespace kvedge
