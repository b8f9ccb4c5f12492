// One sequence: the store of its keys and values, and the quantities observed from the attention of its pending tokens.

#pragma once

#include "observe/observed.h"
#include "store/store.h"

#include <memory>

namespace kvedge {

class Projections;

struct Sequence {
    Store    rows;
    Observed observed;
    std::shared_ptr<Projections> projections;  // output projections of the layers; NULL: not known

    Sequence(const std::vector<LayerShape> & shapes, const Storage & storage) : Sequence(Store(shapes, storage)) {}
    explicit Sequence(Store store) : rows(std::move(store)), observed(rows.shapes()) {}

    // Returns a deep copy; NULL if there is no memory.
    std::unique_ptr<Sequence> clone() const;

    // Returns [pending tokens] 1 for an image token, if queries are kept; else an empty list.
    std::vector<uint8_t> modality() const;

    // Notes that the last n tokens, which are already in the store, attend now.
    void observe(int32_t n, bool causal);

    // Removes the tokens with a position in [p0, p1). Changes nothing if no such token exists.
    void remove(int32_t p0, int32_t p1);
    // Removes a prompt of n tokens, and drops the observations of all pending tokens.
    void take_back(int32_t n);
    // Ends the pending state of all tokens and drops their observations.
    void close_pending();
    // Makes the column sums the scores of the pending rows. Throws std::bad_alloc.
    void sums_to_scores();
    // Makes all rows pending, as a stream needs. False: heads hold different numbers of rows; nothing changed. Throws std::bad_alloc.
    bool open_stream(int32_t n_sinks);

    uint64_t score_bytes() const { return kvedge::score_bytes(rows) + observed.bytes(); }
};

// Makes room to observe the wanted quantities for all pending tokens and the next n tokens. False: no memory.
bool make_room(Sequence & seq, const Observation & wanted, int32_t n);

}  // namespace kvedge
