// What scorers want to know of pending rows, measured where they lie.

#include "backend/graph/rows.h"

namespace kvedge {

AwayRows::Outcome GraphRows::measure(const MeasureJob &, std::vector<Measures> &) { return Outcome::lacking; }

}  // namespace kvedge
