// The tokens of one sequence in the current ubatch.

#pragma once

#include "attention/attention.h"
#include "glue/sequences.h"

#include <memory>
#include <vector>

namespace kvedge {

// prompt: tokens that the plan may choose from later. bounded: a prompt that is compressed layer by layer. replayed: tokens of a
// second pass over the prompt. answer: a generated token.
enum class Kind { prompt, bounded, replayed, answer };

struct Run {
    SequenceState *      state;
    std::vector<int32_t> index;          // their places in the ubatch
    Kind                 kind   = Kind::prompt;
    bool                 output = false;  // logits of the last token are asked for
    Observation          wanted;          // of a prompt that the plan may compress: what is gathered
    bool                 watched = false; // the plan is to choose among these tokens
    bool                 score   = false; // their attention is added to the scores of rows that are there already
    bool                 decode  = false; // few rows: the decode path
    bool                 watch   = false; // a single token whose attention somebody wants to see
    bool                 entered = false; // they are in the store
    std::vector<uint8_t> modality;        // of the pending tokens, where queries are kept
    std::vector<int32_t> places;          // [PLACES][tokens] positions that turn them, where they have several and it matters
    const ReplayScope *  replay = nullptr;  // of tokens of a second pass, which nothing but that is to see
    std::unique_ptr<BoundedRequest> request;            // announced for them
    BoundedPrompt *                 bounded = nullptr;  // which is compressed layer by layer; NULL: not so
    OnItsWay                        before;  // the sequence's, that this run changed
    std::shared_ptr<GraphRows>      device;  // as the sequence's; graphs that were built hold its tensors
    DecodePartials                  partials;

    int32_t n() const { return (int32_t) index.size(); }
    bool    is_prompt() const { return kind != Kind::answer; }
};

using Runs = std::vector<std::unique_ptr<Run>>;

}  // namespace kvedge
