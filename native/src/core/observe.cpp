#include "core/observe.h"

namespace kvedge {

Observation plan_observes(const kvedge_plan & plan) {
    const uint32_t wants = plan.allocator->wants ? plan.allocator->wants(plan.params[KVEDGE_STAGE_ALLOCATOR]) : 0;
    Observation    out{};
    out.sums    = plan_sums(plan);
    out.squares = plan.scorer->needs_squares;
    out.entropy = (wants & WANTS_ENTROPY) != 0;
    out.queries = (wants & WANTS_QUERIES) != 0;
    out.window  = plan_window(plan);
    return out;
}

bool make_room(Sequence & seq, const Observation & wanted, int32_t n) {
    return (!wanted.sums || seq.ensure_sums(n, wanted.squares)) && (!wanted.entropy || seq.ensure_entropies()) &&
           (!wanted.queries || seq.ensure_queries(n)) && (wanted.window == 0 || seq.ensure_windows(wanted.window));
}

bool make_layer_room(Sequence & seq, const Observation & wanted, size_t layer, int32_t n) {
    return (!wanted.sums || seq.ensure_layer_sums(layer, n, wanted.squares)) &&
           (wanted.window == 0 || seq.ensure_layer_window(layer, wanted.window));
}

void gather(AttendJob & job, Sequence & seq, const Observation & wanted, SpinLock * locks) {
    const auto l = (size_t) job.layer;
    job.locks    = locks;
    if (wanted.sums) {
        ColumnSums & cs   = seq.sums[l];
        job.sums          = cs.sums.data();
        job.squares       = cs.squares.empty() ? nullptr : cs.squares.data();
        job.sums_capacity = cs.capacity;
    }
    if (wanted.entropy) {
        job.entropy = seq.entropies[l].data();
    }
    if (wanted.queries) {
        job.queries = &seq;
    }
}

}  // namespace kvedge
