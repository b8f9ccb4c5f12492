#include "observe/rotation.h"

#include <cmath>

namespace kvedge {

// Radians for each position of text. A token of text has 0 as its last position.
static double angle_of(const Rotation & rotation, size_t pair) {
    return rotation.axes.empty() || rotation.axes[pair] != LAST_PLACE ? rotation.angles[pair] : 0.0;
}

void turn_into(const Rotation & rotation, int32_t n, Turn & out) noexcept {
    for (size_t i = 0; i < rotation.angles.size(); i++) {
        out.cos[i] = std::cos(angle_of(rotation, i) * (double) n);
        out.sin[i] = std::sin(angle_of(rotation, i) * (double) n);
    }
}

Turn mean_turn(const Rotation & rotation, int32_t first, int32_t n) {
    Turn out{ std::vector<double>(rotation.angles.size(), 0.0), std::vector<double>(rotation.angles.size(), 0.0) };
    for (size_t i = 0; i < rotation.angles.size(); i++) {
        const double angle = angle_of(rotation, i);
        for (int32_t p = 0; p < n; p++) {
            out.cos[i] += std::cos(angle * (double) (first + p));
            out.sin[i] += std::sin(angle * (double) (first + p));
        }
        out.cos[i] /= (double) n;
        out.sin[i] /= (double) n;
    }
    return out;
}

void turn(const Rotation & rotation, const Turn & by, double * x, size_t stride) {
    for (size_t i = 0; i < rotation.angles.size(); i++) {
        double &     a = x[rotation.first(i) * stride];
        double &     b = x[rotation.second(i) * stride];
        const double was = a;
        a = by.cos[i] * was - by.sin[i] * b;
        b = by.sin[i] * was + by.cos[i] * b;
    }
}

}  // namespace kvedge
