// Streams: video, and images without end. After every compression what is left stays pending, and the next one looks at
// it again together with what came since: the number of rows never exceeds the bound by more than one step.

#pragma once

#include "compress/compress.h"

namespace kvedge {

// Whether a stream can be compressed by the plan. Errors: KVEDGE_E_UNSUPPORTED, with what stands in the way.
kvedge_status check_stream(const kvedge_plan & plan, kvedge_error * err);

// Makes all that the sequence holds, compressed before or not, pending. A failure leaves the sequence as it was.
// Errors: KVEDGE_E_UNSUPPORTED (quantised, or heads hold different numbers of rows), KVEDGE_E_MEMORY.
kvedge_status open_stream(Sequence & seq, const kvedge_plan & plan, kvedge_error * err);

// Compresses the pending tokens of a stream to the plan's budget in KV pairs per head, and leaves them pending. What the
// plan's scorer did not see of a token, as the plan was set after it, counts as nothing.
// Errors: those of check_stream, KVEDGE_E_STATE (nothing at all was observed), KVEDGE_E_MEMORY, KVEDGE_E_STAGE. A failure
// leaves the sequence as it was.
kvedge_status compress_stream(Sequence & seq, const kvedge_plan & plan, int32_t n_threads, Compression & outcome, kvedge_error * err);

}  // namespace kvedge
