// The rows that stay after a compression, gathered and merged where they lie.

#include "backend/graph/rows.h"

namespace kvedge {

AwayRows::Outcome GraphRows::take(const TakeJob &) { return Outcome::lacking; }

}  // namespace kvedge
