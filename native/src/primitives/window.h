// Attention of the prompt's last queries over everything stored (SnapKV's observation window).

#pragma once

#include "plan/stages.h"

namespace kvedge {

enum class GroupReduction : int32_t { mean = 0, max = 1 };

// Writes to out [T] the attention that each pending token of one KV head receives from the window's queries: the mean over the queries,
// then the mean or the largest over the group's query heads. 0 if the window is empty. view: of that head.
void window_attention(const ScoreInput & in, const HeadView & view, int32_t head, GroupReduction reduction, float * out);

// Writes to out [T] the attention that each pending token of one KV head receives from the window's queries after it, over the number of
// these queries. A query counts e^(-fade * queries behind it); a number below 1 counts as 1. Mean over the group; 0 without queries.
void faded_votes(const ScoreInput & in, const HeadView & view, int32_t head, double fade, float * out);

enum class Pooling : int32_t { avg = 0, max = 1 };

// Pools x [n] in place with an odd kernel and stride 1. Beyond the ends, avg counts zeros and max counts nothing.
void pool(Pooling kind, int32_t kernel, float * x, int32_t n);

}  // namespace kvedge
