#include "glue/sequences.h"

#include <algorithm>
#include <utility>

namespace kvedge {

void SequenceState::note_compression(Answer && next_answer, const Compression & outcome, int32_t n_tokens) noexcept {
    has_uncompressed_prompt = false;
    replayed                = 0;
    bound_answer(std::move(next_answer), n_tokens);
    n_compressions += 1;
    before_bytes = outcome.before_bytes;
    after_bytes  = outcome.after_bytes;
    compress_us  = outcome.us;
    n_unfitted   = outcome.n_unfitted;
    n_scant      = outcome.n_scant;
    peak_bytes   = std::max(peak_bytes, outcome.peak_bytes);
}

uint64_t SequenceState::device_bytes() const {
    const GraphRows * const rows = verified && verified->device ? verified->device.get() : device.get();
    return rows ? rows->bytes() : 0;
}

void SequenceState::swap_whole() {
    std::swap(seq, whole.seq);
    std::swap(device, verified->device);
}

void SequenceState::note_peak() {
    const uint64_t kept = whole.bytes() - whole.file_bytes();
    peak_bytes = std::max(peak_bytes, row_bytes() + index_bytes(seq->rows) + score_bytes() + kept);
}

void SequenceState::drop_bounded() {
    if (bounded) {
        bounded->abandon();
        bounded.reset();
    }
}

SequenceState & Sequences::open(int32_t id) {
    SequenceState & state = all[id];
    state.id              = id;
    if (!state.seq) {
        state.seq = std::make_unique<Sequence>(layers_->shapes, storage);
    }
    state.seq->observed.set_rotations(layers_->rotations);
    state.seq->projections = layers_->projections;
    return state;
}

SequenceState * Sequences::find(int32_t id) {
    const auto it = all.find(id);
    return it == all.end() || !it->second.seq ? nullptr : &it->second;
}

const kvedge_plan & Sequences::plan_of(int32_t id) const {
    const auto own = own_plans_.find(id);
    return own == own_plans_.end() ? plan : own->second;
}

void Sequences::set_plan(int32_t id, const kvedge_plan * to) {
    if (to) {
        kvedge_plan copy = *to;
        std::swap(own_plans_[id], copy);
    } else {
        own_plans_.erase(id);
    }
}

}  // namespace kvedge
