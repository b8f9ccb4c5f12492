#include "device/groups.h"

#include <algorithm>
#include <numeric>

namespace kvedge {

namespace {

constexpr size_t MOST = 4;  // groups of a layer: each group costs kernel launches for every token

}  // namespace

int32_t slots_for(int32_t n) {
    constexpr int32_t ROOM = 32;
    const int32_t     step = n < 256 ? 64 : 256;
    return (n + ROOM + step - 1) / step * step;
}

std::vector<std::vector<int32_t>> group_heads(const std::vector<int32_t> & rows) {
    const size_t         n = rows.size();
    std::vector<int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return rows[(size_t) a] > rows[(size_t) b]; });

    // least[g][i]: fewest slots of the i longest heads in g groups; begin[g][i]: index of the first head of the last group
    const size_t most = std::min(MOST, n);
    std::vector  least(most + 1, std::vector<int64_t>(n + 1, INT64_MAX / 2));
    std::vector  begin(most + 1, std::vector<size_t>(n + 1, 0));
    least[0][0] = 0;
    for (size_t g = 1; g <= most; g++) {
        for (size_t i = g; i <= n; i++) {
            for (size_t from = g - 1; from < i; from++) {
                const int64_t slots = least[g - 1][from] + (int64_t) (i - from) * slots_for(rows[(size_t) order[from]]);
                if (slots < least[g][i]) {
                    least[g][i] = slots;
                    begin[g][i] = from;
                }
            }
        }
    }
    const int64_t held = std::accumulate(rows.begin(), rows.end(), (int64_t) 0);
    size_t        g    = 1;
    while (g < most && least[g][n] > held + held / 6) {
        g++;
    }
    std::vector<std::vector<int32_t>> out(g);
    for (size_t end = n; g > 0; end = begin[g][end], g--) {
        out[g - 1].assign(order.begin() + (std::ptrdiff_t) begin[g][end], order.begin() + (std::ptrdiff_t) end);
        std::sort(out[g - 1].begin(), out[g - 1].end());
    }
    return out;
}

}  // namespace kvedge
