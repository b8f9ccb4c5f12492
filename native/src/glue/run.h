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
    std::vector<int32_t> index;          // places of the tokens in the ubatch
    Kind                 kind   = Kind::prompt;
    bool                 output = false;      // logits of the last token are requested
    Observation          wanted;              // what is gathered for a plan that may compress these tokens
    bool                 watched = false;     // the plan will choose among these tokens
    bool                 score   = false;     // the tokens' attention is added to the scores of existing rows
    bool                 decode  = false;     // few query rows: the decode path
    bool                 watch   = false;     // a single token whose attention is watched (kvedge_watch)
    bool                 entered = false;     // the tokens are in the store
    std::vector<uint8_t> modality;            // [pending] 1 for an image token, where queries are kept
    std::vector<int32_t> rotation_positions;  // [PLACES][tokens] positions that rotate the tokens; empty: one position suffices
    const ReplayScope *  replay = nullptr;  // the scope of a second pass; NULL: no pass
    std::unique_ptr<BoundedRequest> request;            // the announcement of a bounded prompt; NULL: none
    BoundedPrompt *                 bounded = nullptr;  // the prompt that is compressed layer by layer; NULL: none
    UbatchState                     before;  // state of the sequence before this run
    std::shared_ptr<GraphRows>      device;  // rows of the sequence on devices; built graphs hold the tensors
    DecodePartials                  partials;

    int32_t n() const { return (int32_t) index.size(); }
    bool    is_prompt() const { return kind != Kind::answer; }
};

using Runs = std::vector<std::unique_ptr<Run>>;

}  // namespace kvedge
