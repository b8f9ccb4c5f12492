// The compression of a sequence in a context: on the host or where its rows lie, of a prompt, a stream, or layer by layer.

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

    // What is pending of the sequence. Errors: those of compress_pending, and KVEDGE_E_STATE where a bounded prompt failed or a
    // second pass was begun.
    kvedge_status compress(SequenceState & state, kvedge_error * err);
    // What a sequence keeps is chosen again from its whole rows, under the limits of now; tokens since then stay.
    // Errors: KVEDGE_E_STATE (there are no whole rows, or a verification was begun), KVEDGE_E_UNSUPPORTED (the decode policy dropped
    // rows), and those of compress_pending. What it kept before is there still.
    kvedge_status choose_again(SequenceState & state, kvedge_error * err);
    // What is pending of a stream, which stays pending.
    kvedge_status compress_stream(SequenceState & state, kvedge_error * err);
    // All of llama.cpp's own cells of a stream but the newest, by which it sees where the next batch goes on.
    void release_cells(SequenceState & state);
    // A layer of the sequence's bounded prompt was attended to. Runs on a thread of ggml.
    void finish_layer(SequenceState & state, int32_t layer) noexcept;
    // The sequence's bounded prompt is over, as the next tokens come. False: it failed, which is reported.
    bool end_bounded(SequenceState & state);

    // Whether the sequence can be compressed now. Errors: KVEDGE_E_STATE; a bounded prompt that failed is gone then.
    kvedge_status check(SequenceState & state, kvedge_error * err);

  private:
    AwayRows *    device_of(SequenceState & state, const kvedge_plan & plan, bool keeps) const;
    kvedge_status compress_rows(SequenceState & state, Compression & outcome, kvedge_error * err);
    void          release_memory();

    Context &      context_;
    const Layers & layers_;
    Sequences &    sequences_;
    Devices &      devices_;
    Keeping &      keeping_;
    Working &      working_;
};

kvedge_status fail_replaying(kvedge_error * err);  // a chunk of a second pass was begun and not ended
kvedge_status fail_verifying(kvedge_error * err);  // a verification was begun and not ended

}  // namespace kvedge
