#include "plan/weights.h"

#include <algorithm>

namespace kvedge {

std::string GivenWeights::unusable(size_t layer, const LayerShape & shape) const {
    if (layer < (size_t) n_layers && shape.n_heads == n_heads && shape.d_v == d_v) {
        return "";
    }
    return "the given projection has " + std::to_string(n_layers) + " layers of " + std::to_string(n_heads) + " heads of " +
           std::to_string(d_v) + " numbers, but the arrays have another shape";
}

void GivenWeights::read(size_t layer, int32_t, float * out) const {
    const size_t n = (size_t) n_width * (size_t) n_heads * (size_t) d_v;
    std::copy_n(values.begin() + (std::ptrdiff_t) (layer * n), n, out);
}

}  // namespace kvedge
