// Attention matching: changes kept values and adds a bias to each row, such that the prompt's own queries get from the kept rows what they
// got from all rows: the attention's output and its mass (Zweiger et al. 2026, arXiv:2602.16284, section 3).

#include "plan/stages.h"
#include "primitives/fit.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

enum { BIASES, MASS, RIDGE, QUERIES };
enum { PER_ROW, PER_HEAD, NO_BIAS };

constexpr int32_t FEWEST = 512;  // least number of queries of a head, for a head with few rows

const Param PARAMS[] = {
    setting::words("bias", "row,head,none", "added to logits for the attention's mass: one for each row, one for all of a head, or nothing"),
    setting::words("mass", "relative,absolute", "whose error biases keep small: of the share of the mass, or of the mass, which is largest where attention is spread"),
    setting::number("ridge", 0.3, 1e-5, 1, "how much it counts that values stay what they were, as a share of the largest direction"),
    setting::whole("queries", 1, 1, 64, "queries of the prompt for each row that is fitted, at least 512 of a head"),
    {},
};

bool biases(const double * params) { return params[BIASES] != NO_BIAS; }

int32_t queries(const double * params, int32_t n_free) {
    return (int32_t) std::max<int64_t>(FEWEST, (int64_t) params[QUERIES] * n_free);
}

// Returns the rows and queries to fit. Protected rows stay unchanged, and count in no sum.
FitProblem problem_of(const ReduceInput & in) {
    const int32_t first = std::min(in.sinks, in.n_tokens), last = std::max(first, in.n_tokens - in.recent);
    const auto    before = [&](int32_t row) { return (int32_t) (std::lower_bound(in.kept, in.kept + in.n_kept, row) - in.kept); };
    FitProblem    p{};
    p.n_rows    = last - first;
    p.first     = first;
    p.d_k       = in.d_k;
    p.d_v       = in.d_v;
    p.k         = in.k + (size_t) first * (size_t) in.d_k;
    p.v         = in.v + (size_t) first * (size_t) in.d_v;
    p.bias      = in.bias ? in.bias + first : nullptr;
    p.kept      = in.kept + before(first);
    p.n_kept    = before(last) - before(first);
    p.q         = in.q;
    p.n_queries = in.n_queries;
    p.softcap   = in.softcap;
    return p;
}

// Returns whether all queries are finite: queries that overflow half precision cannot be used.
bool finite(const FitProblem & p) {
    return std::all_of(p.q, p.q + (size_t) p.n_queries * (size_t) p.d_k, [](float x) { return std::isfinite(x); });
}

void reduce(const ReduceInput & in, const ReducedRows & out) {
    const auto dk = (size_t) in.d_k, dv = (size_t) in.d_v;
    for (size_t j = 0; j < (size_t) in.n_kept; j++) {
        std::copy_n(in.k + (size_t) in.kept[j] * dk, dk, out.k + j * dk);
        std::copy_n(in.v + (size_t) in.kept[j] * dv, dv, out.v + j * dv);
    }
    const FitProblem p = problem_of(in);
    if (p.n_kept == 0 || p.n_kept == p.n_rows || p.n_queries < p.n_kept || !finite(p)) {
        return;
    }
    Fit        fit(p, in.scratch);
    const auto at = (size_t) (p.kept - in.kept);
    fit.attend();
    switch ((int32_t) in.params[BIASES]) {
        case PER_ROW:  fit.weigh_rows(in.params[MASS] == 0); break;
        case PER_HEAD: fit.weigh_all(); break;
        default:       break;
    }
    if (!fit.solve((float) in.params[RIDGE], out.v + at * dv)) {  // as reducer evict
        for (size_t j = at; j < at + (size_t) p.n_kept; j++) {
            std::copy_n(in.v + (size_t) in.kept[j] * dv, dv, out.v + j * dv);
        }
    } else if (out.bias) {
        fit.add_biases(out.bias + at);
    }
}

size_t scratch(const ReduceSize & size) { return Fit::floats(size); }

}  // namespace

extern const Reducer reducer_match = { { "match", PARAMS, [](const double *, Observation & to) { to.queries = true; } }, reduce, scratch, nullptr, biases, queries };

}  // namespace kvedge
