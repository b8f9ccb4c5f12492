// By position: every evicted token is averaged into the nearest kept one, protected or not (PrefixKV table 12).

#include "primitives/buckets.h"

namespace kvedge {

static void reduce(const ReduceInput & in, float * k, float * v) { merge_buckets(in, 0, in.n_kept, k, v); }

static size_t scratch(int32_t, int32_t n_kept, int32_t) { return (size_t) n_kept; }

extern const Reducer reducer_position = { { "position", nullptr }, reduce, scratch };

}  // namespace kvedge
