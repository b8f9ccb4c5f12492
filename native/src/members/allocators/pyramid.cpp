// Pyramid: lower layers keep more, on a straight line from the first layer to the last (PyramidKV, Cai et al. 2024).

#include "primitives/share.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

enum { BETA, ROUNDING };

const Param PARAMS[] = {
    setting::whole("beta", 20, 1, 1000, "the last layer gets 1 / beta of the mean"),
    setting::words("rounding", "exact,official", "exact meets the budget; official rounds the step down and exceeds it"),
    {},
};

void allocate(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    const auto          n_layers = (int32_t) in.shapes->size();
    const int32_t       held     = std::max(in.recent, 1);  // pairs of every head, so that no head is empty
    const int32_t       base     = in.budget - held;
    const int32_t       most     = in.n_tokens - held;
    double              last     = std::floor(base / in.params[BETA]);
    double              first    = 2.0 * base - last;
    if (first > most) {
        first = most;
        last  = 2.0 * base - first;
    }
    const bool          official = in.params[ROUNDING] == 1 && n_layers > 1;
    const double        step     = n_layers > 1 ? (first - last) / (n_layers - 1) : 0.0;
    std::vector<double> line((size_t) n_layers);
    for (int32_t l = 0; l < n_layers; l++) {
        line[(size_t) l] = n_layers == 1 ? base : first - l * (official ? std::floor(step) : step);
    }
    const auto counts = official ? std::vector<int64_t>(line.begin(), line.end()) : round_shares(line, (int64_t) base * n_layers, most);
    for (int32_t l = 0; l < n_layers; l++) {
        out[(size_t) l].assign((size_t) (*in.shapes)[(size_t) l].n_heads_kv, (int32_t) counts[(size_t) l] + held);
    }
}

}  // namespace

extern const Allocator allocator_pyramid = { { "pyramid", PARAMS }, allocate, [](const kvedge_plan &) { return Reach::layer; } };

}  // namespace kvedge
