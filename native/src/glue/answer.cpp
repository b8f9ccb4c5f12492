// Answers that a decode policy bounds, from the compression of a prompt to the beginning of the next prompt.

#include "glue/sequences.h"

#include <algorithm>

using namespace kvedge;

Answer::Answer(const kvedge_plan & by, const std::vector<LayerShape> & shapes) : plan(by) {
    if (plan_evicts(plan)) {
        for (const LayerShape & s : shapes) {
            kept.emplace_back((size_t) s.n_heads_kv);
        }
    }
}

void ContinuationState::cut(int32_t n_tokens) {
    prompt    = std::min(prompt, n_tokens);
    generated = std::min(generated, n_tokens - prompt + (evicted ? 1 : 0));
    released  = std::min(released, n_tokens);
    limits.erase(std::remove_if(limits.begin(), limits.end(), [&](const TokenLimit & limit) { return limit.first >= n_tokens; }), limits.end());
}

void SequenceState::bound_answer(Answer && next_answer, int32_t n_tokens) noexcept {
    std::swap(answer, next_answer.plan);
    std::swap(kept, next_answer.kept);
    prompt        = seq->rows.n_tokens();
    generated     = 0;
    evicted       = false;
    weights.valid = false;
    if (kept.empty()) {
        return;
    }
    const int32_t unused = answer.budget_ratio > 0.0 ? 0 : std::max(0, answer.budget_pairs - n_tokens);
    for (size_t l = 0; l < kept.size(); l++) {
        for (size_t h = 0; h < kept[l].size(); h++) {
            kept[l][h] = seq->rows.head_length((int32_t) l, (int32_t) h) + unused;
        }
    }
    seq->rows.evict(answer.decode->needs_scores ? Eviction::by_score : Eviction::by_place);
}

// Ends an answer. Closes the pending tokens of a bounded answer: the next prompt's compression does not choose among them.
void SequenceState::end_answer() {
    if (kept.empty()) {
        return;
    }
    seq->close_pending();
    seq->rows.evict(Eviction::none);
    kept.clear();
    evicted = false;
}

// Drops the rows that the next generated token displaces by the decode policy: at most one row of each head.
void SequenceState::evict_generated() {
    constexpr int32_t PACK_EVERY = 32;  // tokens; a search for gaps costs a little for every block, layer and head
    if (kept.empty() || generated == 0) {
        generated += kept.empty() ? 0 : 1;
        return;  // before the first token nothing was generated yet
    }
    struct Gone {
        int32_t layer, head, row;
    };
    std::vector<Gone> gone;
    DecodeInput in{};
    in.prompt    = prompt;
    in.budget    = kvedge_plan_budget(&answer, prompt);
    in.generated = generated;
    in.sinks     = answer.sinks;
    in.params    = answer.params[KVEDGE_STAGE_DECODE];
    std::vector<double> scores;
    for (size_t l = 0; l < kept.size(); l++) {
        for (size_t h = 0; h < kept[l].size(); h++) {
            const auto layer = (int32_t) l, head = (int32_t) h;
            in.kept   = kept[l][h];
            in.length = seq->rows.head_length(layer, head);
            in.recent = plan_recent(answer, prompt, in.kept);
            if (seq->rows.scored()) {
                scores.resize((size_t) in.length);
                read_scores(seq->rows, layer, head, scores.data());
                in.scores = scores.data();
            }
            const int32_t row = answer.decode->evict(in);
            if (row >= 0 && row < in.length) {
                gone.push_back({ layer, head, row });
            }
        }
    }
    for (const Gone & g : gone) {  // all memory first: either every head drops its row, or none does
        loosen_row(seq->rows, g.layer, g.head, g.row);
    }
    for (const Gone & g : gone) {
        drop_row(seq->rows, g.layer, g.head, g.row);
        if (device) {
            device->drop((size_t) g.layer, g.head, g.row);
        }
    }
    generated++;
    drop_empty_blocks(seq->rows);
    if (generated % PACK_EVERY == 0 && !device) {
        pack_if_sparse(seq->rows);
    }
}
