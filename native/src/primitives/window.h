// Attention of the prompt's last queries over everything stored (SnapKV's observation window).

#pragma once

#include "plan/stages.h"

namespace kvedge {

enum class GroupReduction : int32_t { mean = 0, max = 1 };

// out [T]: attention that each pending token of one KV head, of which `view` is, receives from the window's queries, averaged over them, and
// over the group's query heads or the largest of theirs. Zero where the window is empty.
void window_attention(const ScoreInput & in, const HeadView & view, int32_t head, GroupReduction reduction, float * out);

// out [T]: attention that each pending token of one KV head receives from those of the window's queries that come after it, over the
// number of these: each counts e^(-fade * queries behind it), and few of them as one. Mean over the group; 0 where there are none.
void faded_votes(const ScoreInput & in, const HeadView & view, int32_t head, double fade, float * out);

enum class Pooling : int32_t { avg = 0, max = 1 };

// x [n] pooled in place with an odd kernel and stride 1; beyond the ends avg counts zeros and max nothing.
void pool(Pooling kind, int32_t kernel, float * x, int32_t n);

}  // namespace kvedge
