// CHECK for tests. A failed CHECK prints its file and line, and makes main() return 1.

#pragma once

#include <cmath>
#include <cstdio>

inline int & failures() {
    static int n = 0;
    return n;
}

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            failures()++;                                                      \
        }                                                                      \
    } while (0)

inline bool close_to(double a, double b, double tolerance) {
    return std::fabs(a - b) <= tolerance * (1.0 + std::fabs(b));
}
