// Merging of evicted rows into the kept row with the most similar key (LOOK-M sec. 3.2), or with the nearest.

#pragma once

#include "plan/stages.h"

namespace kvedge {

// With L evicted rows i pointing at kept row j, the one whose key has the largest cosine similarity with row i's (the
// lowest on ties):
//   row_j = (self(1, L) * row_j + sum_i weight(similarity_i) * row_i) / (1 + L)
// for keys and values alike, all from the original rows; rows with L = 0 stay as they are. An evicted zero key merges
// into nothing, a kept zero key receives nothing.
//
// With mass, a row of bias b counts as the e^b rows that it stands for, and a row that others merged into stands for all of
// them: with m = e^b and M = sum_i m_i
//   row_j = (self(m_j, M) * row_j + sum_i m_i * weight(similarity_i) * row_i) / (m_j + M),   b_j = ln(m_j + M)
// so that the softmax does not lose what the rows received together: exactly where their keys are equal, else no more than it
// had, since the mean of exponentials is at least the exponential of the mean. Our own; the papers have none.
struct MergeRule {
    float (*self)(float own, float merged);  // masses of the kept row, and of what merges into it
    float (*weight)(float similarity);
    bool above_mean = false;  // only rows that are at least as similar as the mean of all, but for rounding
    bool mass       = false;
    // Above 0: row i goes to the row whose key is nearest by distance, the lowest on ties, if that is at most so many times
    // the length of its own key away. Its similarity is then 1.
    float reach = 0.0f;
    bool  looks = false;  // whether weight or above_mean looks at the similarity
};

void merge_rows(const ReduceInput & in, const MergeRule & rule, const ReducedRows & out);

// Where the evicted rows of a head go, found by merge_rows or on a device, and then what of each row is added.
struct Joins {
    int32_t * target;  // [T] index into kept, or -1
    float *   share;   // [T] the similarity with the target; weigh_joins makes the factor of the row of it
    float *   self;    // [n_kept] weigh_joins: the factor of the kept row itself
};

// Whether a row goes to the kept row with the largest score, which is their product less half of the kept row's square; own:
// the square of its own length. Not with NaN.
inline bool in_reach(float reach, float own, float score) { return own - 2.0f * score <= reach * reach * own; }

// The part of merge_rows that looks at no row: k and v of `in` may be NULL. out_bias [n_kept]: as ReducedRows::bias, not NULL
// where the rule has mass. Allocates nothing.
void weigh_joins(const ReduceInput & in, const MergeRule & rule, const Joins & joins, float * out_bias);

// What reducers that merge are made of: how merge_rows is called, and a rule that averages.
template <MergeRule (*RULE)(const double * params)> void reduce_by(const ReduceInput & in, const ReducedRows & out) {
    merge_rows(in, RULE(in.params), out);
}
template <MergeRule (*RULE)(const double * params)> bool biases_of(const double * params) { return RULE(params).mass; }
MergeRule averaging(const double * params);  // [0]: BIAS

// The setting of every reducer that merges.
constexpr Param BIAS = setting::words("bias", "none,mass", "added to a row's logits: nothing, or ln of the rows that it stands for");
inline bool     has_mass(double bias) { return bias == 1; }

// Rows that row t stands for.
float mass_of(const ReduceInput & in, bool mass, int32_t t);

// The bias of a row that stands for so many; no more than a file may hold, whatever one has brought.
float bias_of(float mass);

// Reducer::scratch of every reducer that calls merge_rows.
size_t merge_scratch(const ReduceSize & size);

}  // namespace kvedge
