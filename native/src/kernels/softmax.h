#pragma once

#include <algorithm>
#include <cmath>

namespace kvedge {

// One row of a softmax whose columns come in several parts: with x = logit - top, the sums of e^x and of x e^x.
struct SoftmaxRow {
    float top = -INFINITY, sum = 0.0f, dot = 0.0f;

    void add(const SoftmaxRow & part) {
        if (part.sum == 0.0f) {
            return;
        }
        if (sum == 0.0f) {
            *this = part;
            return;
        }
        const float now  = std::max(top, part.top), a = top - now, b = part.top - now;
        const float mine = std::exp(a), theirs = std::exp(b);
        dot = mine * (dot + a * sum) + theirs * (part.dot + b * part.sum);
        sum = mine * sum + theirs * part.sum;
        top = now;
    }

    // Returns the entropy in nats; 0 for a row without columns. sink: added to the denominator, without a column.
    double entropy(float sink = 0.0f) const {
        const double total = (double) sum + (double) sink;
        return sum > 0.0f ? ((double) sum * std::log(total) - (double) dot) / total : 0.0;
    }
};

}  // namespace kvedge
