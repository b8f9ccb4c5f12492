// Sliding window (StreamingLLM sec. 3.2): the size stays as it was after the prompt; the row after the sinks is dropped.

#include "plan/stages.h"

namespace kvedge {

static int32_t evict(const DecodeInput & in) { return in.length > in.kept ? in.sinks : -1; }

extern const DecodePolicy decode_sliding = { { "sliding", nullptr }, false, evict };

}  // namespace kvedge
