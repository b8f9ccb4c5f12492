// Puts KV heads of similar length into groups that share a pair of tensors, so that little memory is padding.

#pragma once

#include <cstdint>
#include <vector>

namespace kvedge {

// Returns the slots of a list for n rows, with at least 32 free slots, because a larger buffer needs a new graph. The number is a
// multiple of 256, as GPU attention kernels are twice as slow otherwise; below 256 rows a multiple of 64, to save padding.
int32_t slots_for(int32_t n);

// Divides KV heads, given their numbers of rows, into at most 4 groups by length. Uses the fewest groups whose slots exceed the rows
// by at most a sixth, else the 4 groups with the fewest slots. Returns the ascending KV heads of each group.
std::vector<std::vector<int32_t>> group_heads(const std::vector<int32_t> & rows);

}  // namespace kvedge
