// What a plan wants gathered while the prompt is read.

#pragma once

#include "attention/attention.h"
#include "plan/plan.h"
#include "sequence/sequence.h"

namespace kvedge {

struct Observation {
    bool    sums    = false;  // column sums of the attention
    bool    squares = false;  // and of its squares
    bool    entropy = false;  // entropy of its rows
    bool    queries = false;  // all queries, kept until the compression
    int32_t window  = 0;      // the last queries; 0: none
    int32_t moments = -1;     // mean and covariance of the queries of this token and all later ones; -1: not

    bool    peaks   = false;  // the largest attention that each token received
    bool    apart   = false;  // from each query head

    bool attention() const { return sums || entropy || peaks; }
    bool any() const { return attention() || queries || window > 0 || moments >= 0; }
};

Observation plan_observes(const kvedge_plan & plan);

// Bytes that gathering it takes of one layer, for a prompt of n_tokens.
uint64_t observed_bytes(const Observation & wanted, const LayerShape & layer, int32_t n_tokens);

// Room for what is wanted of all that is pending and of the next n tokens. False: no memory.
bool make_room(Sequence & seq, const Observation & wanted, int32_t n);
// The same of one layer, where nothing is wanted but sums and the window. n: tokens that are not entered yet.
bool make_layer_room(Sequence & seq, const Observation & wanted, size_t layer, int32_t n);

// Makes the job gather what is wanted of the attention that it computes. locks: [Hkv].
void gather(AttendJob & job, Observed & to, const Observation & wanted, SpinLock * locks);

}  // namespace kvedge
