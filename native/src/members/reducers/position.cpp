// By position: every evicted token is averaged into the nearest kept token, protected or not (PrefixKV table 12).

#include "primitives/buckets.h"
#include "primitives/merge.h"

namespace kvedge {

static const Param PARAMS[] = { BIAS, {} };

static void reduce(const ReduceInput & in, const ReducedRows & out) {
    merge_buckets(in, { 0, in.n_kept, has_mass(in.params[0]) }, out);
}

static bool biases(const double * params) { return has_mass(params[0]); }

static size_t scratch(const ReduceSize & size) { return (size_t) size.n_kept; }

extern const Reducer reducer_position = { { "position", PARAMS }, reduce, scratch, nullptr, biases };

}  // namespace kvedge
