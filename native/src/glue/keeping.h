// Whole rows of compressed sequences, kept in memory or in a file until a later message is read over them.

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

    // Sets how compressions from now on keep whole rows. folder: for files (KVEDGE_KEEP_FILE). most: bytes of all whole rows together; 0:
    // no limit. type: KVEDGE_TYPE_F16 for rows as they are, or KVEDGE_TYPE_Q8_0. Errors: those of check_folder and check_storage.
    kvedge_status set(kvedge_keep_place place, const char * folder, uint64_t most, kvedge_type type, kvedge_error * err);

    bool on() const { return place_ != KVEDGE_KEEP_NOT; }
    // Returns whether saved and packed sequences include their whole rows.
    bool saved() const { return saved_; }
    void set_saved(bool on) { saved_ = on; }
    // Returns whether the compression of the sequence keeps its whole rows. If these are missing already, state.whole.problem says why.
    bool wanted(SequenceState & state) const;
    // Puts the compressed sequence in the place of the whole one, which is kept. Beyond the limit the oldest whole rows are given up.
    void put_aside(SequenceState & state, std::unique_ptr<Sequence> compressed) noexcept;
    // Keeps whole rows that were loaded with a sequence, or moved to other positions, as a compression would.
    void take_in(SequenceState & state) noexcept;
    // Puts the whole rows in the place of the compressed ones, for the tokens of a later message, and appends the rows of tokens since. If
    // that fails, gives up the whole rows; state.whole.problem says why. Throws std::bad_alloc, and then nothing has changed.
    void recall(SequenceState & state);
    // Gives a copy of the sequence the same whole rows, in the same memory. Throws std::bad_alloc.
    void share(SequenceState & from, SequenceState & copy) const;
    // Replaces, in all sequences, whole rows that have been written to the file by the rows in the file.
    void adopt_written_rows();
    // Removes tokens with a position in [p0, p1), and ends a verification. False: no memory for the rows that stay. Throws std::bad_alloc.
    bool remove(SequenceState & state, int32_t p0, int32_t p1);

  private:
    void adopt_written_rows(SequenceState & state);
    void remove_whole(SequenceState & state, int32_t p0, int32_t p1);
    uint64_t held() const;  // bytes of all whole rows; rows that sequences share count once. Throws std::bad_alloc
    void give_up(SequenceState & state, const char * why, const char * what = "") noexcept;  // the problem is `why` and `what`
    void keep_within(SequenceState & state);
    void write(SequenceState & state);
    void store_whole_rows(SequenceState & state);

    const Context &        context_;
    const Layers &         layers_;
    Sequences &            sequences_;
    Devices &              devices_;
    kvedge_keep_place      place_ = KVEDGE_KEEP_NOT;
    Storage                storage_;  // types of whole rows; not quantised: rows stay as they are
    uint64_t               most_               = 0;
    uint64_t               compression_number_ = 0;  // counts compressions that kept whole rows
    bool                   saved_              = false;
    std::unique_ptr<Spill, EndSpill> spill_;  // writes files
};

}  // namespace kvedge
