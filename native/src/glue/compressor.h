// The compression of a sequence: a prompt, a stream, or layer by layer; on the host, or on the devices that hold the rows.

#pragma once

#include "glue/context.h"
#include "glue/devices.h"
#include "glue/keeping.h"
#include "glue/layers.h"
#include "glue/sequences.h"
#include "glue/working.h"

namespace kvedge {

class Compressor {
  public:
    Compressor(Context & context, const Layers & layers, Sequences & sequences, Devices & devices, Keeping & keeping, Working & working)
        : context_(context), layers_(layers), sequences_(sequences), devices_(devices), keeping_(keeping), working_(working) {}

    // Compresses the pending tokens of the sequence. Errors: those of compress_pending, KVEDGE_E_STATE (a bounded prompt failed, or a
    // second pass was begun).
    kvedge_status compress(SequenceState & state, kvedge_error * err);
    // Chooses again, from the whole rows and under the current limits, what a sequence keeps; later tokens stay. A failure leaves the kept
    // rows. Errors: KVEDGE_E_STATE (no whole rows, or a verification was begun), KVEDGE_E_UNSUPPORTED (the decode policy dropped rows), and
    // those of compress_pending.
    kvedge_status choose_again(SequenceState & state, kvedge_error * err);
    // Compresses the pending rows of a stream. The kept rows stay pending.
    kvedge_status compress_stream(SequenceState & state, kvedge_error * err);
    // Frees llama.cpp's own cells of a stream, except the newest, which tells llama.cpp where the next batch goes on.
    void release_cells(SequenceState & state);
    // Compresses a layer of the sequence's bounded prompt, after the layer's attention. Runs on a thread of ggml. Reports errors.
    void finish_layer(SequenceState & state, int32_t layer) noexcept;
    // Ends the sequence's bounded prompt, when the next tokens come. False: the prompt failed, which is reported.
    bool end_bounded(SequenceState & state);

    // Checks that the sequence can be compressed now. Removes a bounded prompt that failed. Errors: KVEDGE_E_STATE.
    kvedge_status check(SequenceState & state, kvedge_error * err);

  private:
    DeviceRows *  device_of(SequenceState & state, const kvedge_plan & plan, bool keeps) const;
    kvedge_status compress_rows(SequenceState & state, Compression & outcome, kvedge_error * err);
    void          release_memory();

    Context &      context_;
    const Layers & layers_;
    Sequences &    sequences_;
    Devices &      devices_;
    Keeping &      keeping_;
    Working &      working_;
};

kvedge_status fail_replaying(kvedge_error * err);  // KVEDGE_E_STATE: a chunk of a second pass was begun and not ended
kvedge_status fail_verifying(kvedge_error * err);  // KVEDGE_E_STATE: a verification was begun and not ended

}  // namespace kvedge
