// Whole rows behind compressed ones: in memory or in a file, until a later message is read over them.

#pragma once

#include "glue/devices.h"
#include "glue/sequences.h"
#include "system/spill.h"

#include <memory>
#include <string>

namespace kvedge {

class Keeping {
  public:
    Keeping(const Context & context, const Layers & layers, Sequences & sequences, Devices & devices)
        : context_(context), layers_(layers), sequences_(sequences), devices_(devices) {}

    // For compressions from now on. folder: of files, where `place` says so. most: bytes of all whole rows together; 0: no limit. type:
    // KVEDGE_TYPE_F16 for rows as they are, or KVEDGE_TYPE_Q8_0. Errors: those of check_folder and check_storage.
    kvedge_status set(kvedge_keep_place place, const char * folder, uint64_t most, kvedge_type type, kvedge_error * err);

    bool on() const { return place_ != KVEDGE_KEEP_NOT; }
    // Whether saved and packed sequences have their whole rows with them.
    bool saved() const { return saved_; }
    void set_saved(bool on) { saved_ = on; }
    // Whether the compression of the sequence is to leave its rows whole. Where that cannot be done, state.whole says why.
    bool wanted(SequenceState & state) const;
    // The sequence was compressed to one of its own, which takes its place. What goes beyond the limit is given up: the oldest first.
    void put_aside(SequenceState & state, std::unique_ptr<Sequence> compressed);
    // Whole rows came with a sequence that was loaded, or turned to other positions, and are kept as those of a compression.
    void take_in(SequenceState & state) noexcept;
    // Tokens of a later message come: the whole rows take the place of the compressed ones, behind them those of tokens since.
    // Where that cannot be done they are given up, and state.whole says why. Throws std::bad_alloc, and nothing has changed.
    void recall(SequenceState & state);
    // A copy of the sequence has its whole rows, in the same memory. Throws std::bad_alloc.
    void share(SequenceState & from, SequenceState & copy) const;
    // What has been written of all sequences lies in the file from now on.
    void settle();
    // Tokens with a position in [p0, p1) leave the sequence, and a verification is over. False: no memory for rows that stay of it.
    // Throws std::bad_alloc.
    bool remove(SequenceState & state, int32_t p0, int32_t p1);

  private:
    void settle(SequenceState & state);
    void remove_whole(SequenceState & state, int32_t p0, int32_t p1);
    uint64_t held() const;  // bytes of all whole rows, those that sequences share once. Throws std::bad_alloc
    void give_up(SequenceState & state, const std::string & why);
    void keep_within(SequenceState & state);
    void write(SequenceState & state);
    void settle_down(SequenceState & state);

    const Context &        context_;
    const Layers &         layers_;
    Sequences &            sequences_;
    Devices &              devices_;
    kvedge_keep_place      place_ = KVEDGE_KEEP_NOT;
    Storage                storage_;  // where it is not quantised, rows stay as they are
    uint64_t               most_  = 0;
    uint64_t               turn_  = 0;  // of compressions
    bool                   saved_ = false;
    std::unique_ptr<Spill, EndSpill> spill_;  // writes files
};

}  // namespace kvedge
