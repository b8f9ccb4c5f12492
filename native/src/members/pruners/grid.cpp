// Grid: keeps the rows at the centres of equal cells; the baseline that looks at no row.

#include "plan/stages.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

// Finds the most cells a x b with a <= down, b <= across and a * b <= n; on ties the squarest cells, then the smaller a.
static void count_cells(int32_t down, int32_t across, int32_t n, int32_t & a, int32_t & b) {
    double best = 0.0;
    a = b = 0;
    for (int32_t rows = 1; rows <= std::min(down, n); rows++) {
        const int32_t columns = std::min(across, n / rows);
        const double  slant   = std::fabs(std::log((double) down * columns / ((double) rows * across)));
        if (rows * columns > a * b || (rows * columns == a * b && slant < best)) {
            a    = rows;
            b    = columns;
            best = slant;
        }
    }
}

static void prune(const ImageRows & image, int32_t keep, const double *, int32_t, std::vector<int32_t> & kept) {
    int32_t a, b;
    count_cells(image.down, image.across, keep, a, b);
    for (int32_t i = 0; i < a; i++) {
        for (int32_t j = 0; j < b; j++) {
            kept.push_back((2 * i + 1) * image.down / (2 * a) * image.across + (2 * j + 1) * image.across / (2 * b));
        }
    }
}

extern const Pruner pruner_grid;
const Pruner        pruner_grid = { { "grid", nullptr }, prune };

}  // namespace kvedge
