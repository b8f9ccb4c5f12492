// The tokens that wait for a compression, as scorers and allocators see them.

#pragma once

#include "rows/rows.h"

#include <cstdint>
#include <vector>

namespace kvedge {

// Shows what is stored and what was observed of pending tokens, a head or a layer at a time. Views last until a row is
// written or dropped. For any number of threads at once. Throws std::bad_alloc.
class PendingView {
  public:
    virtual ~PendingView() = default;
    virtual HeadView               head(int32_t layer, int32_t head) const = 0;
    virtual std::vector<QuerySpan> queries(int32_t layer) const            = 0;  // in the order of their tokens
};

}  // namespace kvedge
