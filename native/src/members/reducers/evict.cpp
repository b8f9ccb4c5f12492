// Evict: rows that are not kept are dropped.

#include "plan/stages.h"

namespace kvedge {

extern const Reducer reducer_evict = { { "evict", nullptr }, nullptr, nullptr };

}  // namespace kvedge
