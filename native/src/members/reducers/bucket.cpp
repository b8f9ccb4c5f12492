// Buckets around anchors: a token between two kept tokens is averaged into the nearer one (Elastic Cache eq. 2-3). Protected tokens receive
// nothing unless into_protected is set.

#include "primitives/buckets.h"
#include "primitives/merge.h"

#include <algorithm>

namespace kvedge {

namespace {

enum { INTO_PROTECTED, MASS };

const Param PARAMS[] = { setting::flag("into_protected", false, "protected tokens receive too"), BIAS, {} };

void reduce(const ReduceInput & in, const ReducedRows & out) {
    const int32_t * end = in.kept + in.n_kept;
    int32_t         first = 0, last = in.n_kept;
    if (in.params[INTO_PROTECTED] == 1) {
        first = (int32_t) (std::lower_bound(in.kept, end, in.sinks) - in.kept);
        last  = (int32_t) (std::lower_bound(in.kept, end, in.n_tokens - in.recent) - in.kept);
    }
    merge_buckets(in, { first, std::max(first, last), has_mass(in.params[MASS]) }, out);
}

bool biases(const double * params) { return has_mass(params[MASS]); }

size_t scratch(const ReduceSize & size) { return (size_t) size.n_kept; }

}  // namespace

extern const Reducer reducer_bucket = { { "bucket", PARAMS }, reduce, scratch, nullptr, biases };

}  // namespace kvedge
