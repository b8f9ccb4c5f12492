// Streams: video, and images without end. The kept rows of a compression stay pending, and the next compression chooses among
// them and the new rows. The number of rows never exceeds the bound by more than one step.

#pragma once

#include "compress/compress.h"

namespace kvedge {

// Checks that the plan can compress a stream. Errors: KVEDGE_E_UNSUPPORTED, with the setting that prevents it.
kvedge_status check_stream(const kvedge_plan & plan, kvedge_error * err);

// Makes all rows of the sequence pending, compressed rows too. A failure changes nothing.
// Errors: KVEDGE_E_UNSUPPORTED (rows are quantised, or heads hold different numbers of rows), KVEDGE_E_MEMORY.
kvedge_status open_stream(Sequence & seq, const kvedge_plan & plan, kvedge_error * err);

// Compresses the pending rows of a stream to the plan's budget (KV pairs per head). The kept rows stay pending. A quantity
// that was not observed for a token, because the plan was set later, counts as 0. A failure changes no row.
// Errors: those of check_stream, KVEDGE_E_STATE (nothing was observed), KVEDGE_E_MEMORY, KVEDGE_E_STAGE.
kvedge_status compress_stream(Sequence & seq, const kvedge_plan & plan, int32_t n_threads, Compression & outcome, kvedge_error * err);

}  // namespace kvedge
