// What MixKV mixes: norms of values, and how far keys point away from the mean direction.

#pragma once

#include "core/stages.h"

#include <vector>

namespace kvedge {

double mean(const std::vector<double> & x);

// Min-max to [0, 1], what is constant but for rounding to 0, then scaled so that the mean is `to`.
void scale_to(std::vector<double> & x, double to);

// What a head's keys say: norms, distance of the wanted ones from the mean direction of those that count, and how alike those that
// count are (MixKV, eq. 4), in [0, 1].
struct Keys {
    std::vector<double> minus_norm;  // [n wanted]
    std::vector<double> diversity;   // [n wanted]
    double              redundancy;
};

// Of the head's pending keys [T]. counts [T]: 1 for those whose mean direction it is, NULL: all. wanted [T]: 1 for those that are told of.
Keys read_keys(const HeadView & view, const LayerShape & shape, int32_t n_tokens, const uint8_t * counts, const uint8_t * wanted);

// Norms of the wanted ones of the head's pending values.
std::vector<double> value_norms(const HeadView & view, const LayerShape & shape, const uint8_t * wanted);

}  // namespace kvedge
