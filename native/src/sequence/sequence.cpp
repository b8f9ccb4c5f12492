#include "sequence/sequence.h"

#include <new>

namespace kvedge {

std::unique_ptr<Sequence> Sequence::clone() const try {
    return std::make_unique<Sequence>(*this);
} catch (const std::bad_alloc &) {
    return nullptr;
}

std::vector<uint8_t> Sequence::modality() const {
    std::vector<uint8_t> out;
    if (observed.have().queries) {
        for (int32_t token : pending_tokens(rows)) {
            out.push_back(rows.contents().image[(size_t) token]);
        }
    }
    return out;
}

void Sequence::observe(int32_t n, bool causal) { observed.count(rows.pending_length(), n, causal, modality()); }

void Sequence::remove(int32_t p0, int32_t p1) {
    if (!holds(rows, p0, p1)) {
        return;
    }
    const int32_t        n_pending = rows.pending_length();
    std::vector<int32_t> staying;  // remaining pending tokens; filled before the first row is removed, because it may throw
    if (observed.have().queries) {
        for (int32_t token : pending_tokens(rows)) {
            const int32_t pos = rows.contents().pos[(size_t) token];
            if (pos < p0 || pos >= p1) {
                staying.push_back(token);
            }
        }
    }
    for (const Removed & gone : remove_rows(rows, p0, p1)) {
        if (gone.layer < 0) {
            observed.remove_rows(gone.first, gone.n, gone.keep);
        } else {
            observed.remove_head_rows((size_t) gone.layer, (size_t) gone.head, gone.first, gone.n, gone.keep);
        }
    }
    forget_last(rows, p0, p1);
    if (observed.extent.first >= rows.n_tokens()) {
        observed.drop();  // every query that was observed is removed
    }
    if (rows.pending_length() == 0) {
        observed.missing = {};
    }
    if (observed.have().queries) {
        observed.queries.forget(staying, rows.n_tokens());
    }
    if (rows.pending_length() != n_pending) {
        observed.skip_windows(rows.n_tokens());  // the windows hold queries of removed rows
    }
}

void Sequence::take_back(int32_t n) {
    rows.take_back(n);
    observed.drop();  // all layers, because a bounded prefill has already dropped some
    observed.missing.count(rows.pending_length());
}

void Sequence::close_pending() {
    rows.close_pending();
    observed.missing = {};
    observed.drop();
}

void Sequence::sums_to_scores() {
    score_pending(rows, [&](size_t layer, size_t head) {
        const Columns & columns = observed.layer(layer).columns;
        return columns.sums().data() + head * (size_t) columns.capacity;
    });
}

bool Sequence::open_stream(int32_t n_sinks) {
    const int32_t old = even_rows(rows);
    if (old < 0) {
        return false;
    }
    observed.shift_rows((size_t) old);
    kvedge::open_stream(rows, n_sinks);
    return true;
}

bool make_room(Sequence & seq, const Observation & wanted, int32_t n) {
    const int32_t next = seq.rows.n_tokens(), n_rows = seq.rows.pending_length() + n;
    bool          fits = true;
    for (size_t l = 0; l < seq.rows.shapes().size() && fits; l++) {
        fits = seq.observed.make_room(wanted, l, next, n_rows);
    }
    return fits && (!wanted.queries || seq.observed.make_query_room(next, n));
}

}  // namespace kvedge
