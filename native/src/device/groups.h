// Heads of different lengths: which of them share a pair of tensors, so that little of what is held is padding.

#pragma once

#include <cstdint>
#include <vector>

namespace kvedge {

// Slots of a list that n rows lie in, with room for a few tokens that follow: a buffer that grows has a graph made anew. Attention kernels of GPUs want multiples of 256, and one that gets others takes twice as long; a small
// cache would be padding then.
int32_t slots_for(int32_t n);

// Cuts heads with these numbers of rows into at most 4 groups, by their lengths. As few as hold at most a sixth more slots
// than there are rows, or else the best 4. Returns for each group its heads, ascending.
std::vector<std::vector<int32_t>> group_heads(const std::vector<int32_t> & rows);

}  // namespace kvedge
