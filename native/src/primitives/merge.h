// Merging of evicted rows into the kept row with the most similar key (LOOK-M sec. 3.2), or with the nearest key.

#pragma once

#include "plan/stages.h"

namespace kvedge {

// An evicted row i joins the kept row j whose key has the largest cosine similarity with row i's key (the lowest j on ties). With L evicted
// rows joining row j:
//   row_j = (self(1, L) * row_j + sum_i weight(similarity_i) * row_i) / (1 + L)
// for keys and values, all from the original rows; a row with L = 0 stays unchanged. An evicted zero key joins no row, and a kept zero key
// receives nothing.
//
// With mass, a row of bias b counts as the e^b rows that it stands for, and a row that others joined stands for all of them. With m = e^b
// and M = sum_i m_i:
//   row_j = (self(m_j, M) * row_j + sum_i m_i * weight(similarity_i) * row_i) / (m_j + M),   b_j = ln(m_j + M)
// The softmax then keeps the joined rows' mass: exactly if their keys are equal, else at most the mass that they had, since the mean of
// exponentials is at least the exponential of the mean. This rule is kvedge's; the papers have none.
struct MergeRule {
    float (*self)(float own, float merged);  // masses of the kept row, and of the rows that join it
    float (*weight)(float similarity);
    bool above_mean = false;  // only rows that are at least as similar as the mean of all, up to rounding
    bool mass       = false;
    // Above 0: row i joins the row with the nearest key (the lowest on ties), if the distance is at most `reach` times the length of row
    // i's key. The similarity then counts as 1.
    float reach           = 0.0f;
    bool  uses_similarity = false;  // whether weight or above_mean uses the similarity
};

void merge_rows(const ReduceInput & in, const MergeRule & rule, const ReducedRows & out);

// Where the evicted rows of a head go. merge_rows or a device finds target and share; to_merge_factors makes factors of them.
struct MergeTargets {
    int32_t * target;  // [T] index into kept, or -1
    float *   share;   // [T] the similarity with the target; after to_merge_factors: the factor of the row
    float *   self;    // [n_kept] after to_merge_factors: the factor of the kept row itself
};

// Returns whether a row joins the kept row with the largest score. score: the product of their keys minus half of the kept key's square;
// own: the square of the row's own key. Not for NaN.
inline bool in_reach(float reach, float own, float score) { return own - 2.0f * score <= reach * reach * own; }

// The part of merge_rows that reads no rows: k and v of `in` may be NULL. out_bias [n_kept]: as ReducedRows::bias; not NULL if the rule has
// mass. Allocates nothing.
void to_merge_factors(const ReduceInput & in, const MergeRule & rule, const MergeTargets & merges, float * out_bias);

// Parts of reducers that merge: a call of merge_rows, and a rule that averages.
template <MergeRule (*RULE)(const double * params)> void reduce_by(const ReduceInput & in, const ReducedRows & out) {
    merge_rows(in, RULE(in.params), out);
}
template <MergeRule (*RULE)(const double * params)> bool biases_of(const double * params) { return RULE(params).mass; }
MergeRule averaging(const double * params);  // [0]: BIAS

// The setting of every reducer that merges.
constexpr Param BIAS = setting::words("bias", "none,mass", "added to a row's logits: nothing, or ln of the rows that it stands for");
inline bool     has_mass(double bias) { return bias == 1; }

// Returns the number of rows that row t stands for; 1 without mass.
float mass_of(const ReduceInput & in, bool mass, int32_t t);

// Returns the bias of a row that stands for `mass` rows, at most MOST_BIAS, the limit of a file.
float bias_of(float mass);

// Reducer::scratch of every reducer that calls merge_rows.
size_t merge_scratch(const ReduceSize & size);

}  // namespace kvedge
