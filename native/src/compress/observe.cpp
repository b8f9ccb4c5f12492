#include "compress/observe.h"

namespace kvedge {

Observation plan_observes(const kvedge_plan & plan) {
    const uint32_t wants = plan.allocator->wants ? plan.allocator->wants(plan.params[KVEDGE_STAGE_ALLOCATOR]) : 0;
    Observation    out{};
    out.sums    = plan_sums(plan);
    out.squares = plan.scorer->needs_squares;
    out.entropy = (wants & WANTS_ENTROPY) != 0;
    out.queries = (wants & WANTS_QUERIES) != 0 || plan.reducer->queries;
    out.window  = plan_window(plan);
    out.moments = plan_moments(plan);
    out.peaks   = (plan_peaks(plan) & (WANTS_PEAKS | WANTS_REPLAY)) == WANTS_PEAKS;
    out.apart   = (plan_peaks(plan) & WANTS_LENGTHS) != 0;
    return out;
}

uint64_t observed_bytes(const Observation & wanted, const LayerShape & layer, int32_t n_tokens) {
    const auto T = (uint64_t) n_tokens, heads = (uint64_t) layer.n_heads, heads_kv = (uint64_t) layer.n_heads_kv;
    uint64_t   n = 0;
    n += wanted.sums ? heads_kv * T * sizeof(double) : 0;
    n += wanted.squares ? heads_kv * T * sizeof(double) : 0;
    n += wanted.entropy ? heads_kv * sizeof(double) : 0;
    n += wanted.peaks ? (wanted.apart ? heads : heads_kv) * T * sizeof(float) : 0;
    n += wanted.moments >= 0 ? QueryMoments::bytes(layer.n_heads, layer.d_k) : 0;
    n += wanted.queries ? heads * T * (row_k(layer, Type::f16) + SEEN_BYTES) : 0;
    return n + (uint64_t) wanted.window * heads * (uint64_t) layer.d_k * sizeof(float);
}

bool make_room(Sequence & seq, const Observation & wanted, int32_t n) {
    bool fits = true;
    for (size_t l = 0; l < seq.rows.shapes().size() && fits; l++) {
        fits = make_layer_room(seq, wanted, l, n);
    }
    return fits && (!wanted.entropy || seq.observed.ensure_entropies()) &&
           (!wanted.queries || seq.observed.ensure_queries(seq.rows.n_tokens(), n));
}

bool make_layer_room(Sequence & seq, const Observation & wanted, size_t layer, int32_t n) {
    Observed & seen = seq.observed;
    return (!wanted.sums || seen.ensure_sums(layer, seq.rows.pending_length() + n, wanted.squares)) &&
           (wanted.window == 0 || seen.ensure_window(layer, seq.rows.n_tokens(), wanted.window)) &&
           (wanted.moments < 0 || seen.ensure_moments(layer)) &&
           (!wanted.peaks || seen.ensure_peaks(layer, seq.rows.pending_length() + n, wanted.apart));
}

void gather(AttendJob & job, Observed & to, const Observation & wanted, SpinLock * locks) {
    const auto l = (size_t) job.layer;
    job.locks    = locks;
    if (wanted.sums) {
        ColumnSums & cs   = to.sums(l);
        job.sums          = cs.sums.data();
        job.squares       = cs.squares.empty() ? nullptr : cs.squares.data();
        job.sums_capacity = cs.capacity;
    }
    if (wanted.entropy) {
        job.entropy = to.entropies(l);
    }
    if (wanted.queries) {
        job.queries = &to;
    }
    if (wanted.peaks) {
        job.peaks          = to.peaks(l).highest.data();
        job.peaks_capacity = to.peaks(l).capacity;
        job.peaks_apart    = to.peaks(l).each > 1;
    }
}

}  // namespace kvedge
