// One sequence: the store of its keys and values, and what was observed of the attention of its pending tokens.

#pragma once

#include "observe/observed.h"
#include "store/store.h"

#include <memory>

namespace kvedge {

class Projections;

struct Sequence {
    Store    rows;
    Observed observed;
    std::shared_ptr<Projections> projections;  // of its layers; NULL: they are not known

    Sequence(const std::vector<LayerShape> & shapes, const Storage & storage) : Sequence(Store(shapes, storage)) {}
    explicit Sequence(Store store) : rows(std::move(store)), observed(rows.shapes()) {}

    // A copy with memory of its own; NULL if there is no memory for it.
    std::unique_ptr<Sequence> clone() const;

    // [pending] 1 for an image token, where queries are kept; else empty.
    std::vector<uint8_t> modality() const;

    // The last n tokens, which are entered already, attend now.
    void observe(int32_t n, bool causal);

    // Removes the tokens with a position in [p0, p1). Where there are none, nothing changes.
    void remove(int32_t p0, int32_t p1);
    // Takes a prompt of n tokens back, and what was gathered of all that is pending.
    void take_back(int32_t n);
    // Everything present counts as done: nothing is pending, and nothing observed.
    void close_pending();
    // promote_sealed of the rows. What was gathered of the pending tokens goes: it counts from a row that is pending no longer.
    void promote_sealed();
    // Column sums become scores of the pending rows. Throws std::bad_alloc.
    void sums_to_scores();
    // open_stream of the rows. False: heads hold different numbers of rows, and nothing has changed. Throws std::bad_alloc.
    bool open_stream(int32_t n_sinks);

    uint64_t score_bytes() const { return kvedge::score_bytes(rows) + observed.bytes(); }
};

// Room for what is wanted of all that is pending and of the next n tokens. False: no memory.
bool make_room(Sequence & seq, const Observation & wanted, int32_t n);

}  // namespace kvedge
