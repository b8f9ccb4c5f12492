#include "primitives/mixture.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

constexpr double EPS  = 1e-8;
constexpr double SAME = 1e-6;  // of the largest: smaller differences come from rounding, as with two keys at the same distance from their mean

}  // namespace

double mean(const std::vector<double> & x) {
    double sum = 0.0;
    for (double v : x) {
        sum += v;
    }
    return sum / (double) x.size();
}

void scale_to(std::vector<double> & x, double to) {
    if (x.empty()) {
        return;
    }
    double low = x[0], high = x[0];
    for (const double v : x) {
        low  = v < low ? v : low;
        high = high < v ? v : high;
    }
    const double a = low, width = high - low, least = SAME * std::max(std::abs(low), std::abs(high));
    for (double & v : x) {
        v = width > least ? (v - a) / (width + EPS) : 0.0;
    }
    const double factor = to / (mean(x) + EPS);
    for (double & v : x) {
        v *= factor;
    }
}

double redundancy(double square, double n) { return n > 1.0 ? std::clamp((n * square - 1.0) / (n - 1.0), 0.0, 1.0) : 0.0; }

}  // namespace kvedge
