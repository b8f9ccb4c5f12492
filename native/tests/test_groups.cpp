// Compares group_heads() (device/groups.h) with every way to divide KV heads into groups.

#include "device/groups.h"
#include "check.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

using namespace kvedge;

namespace {

// Returns the slots of KV heads that share a group.
int64_t slots(const std::vector<int32_t> & rows) {
    return (int64_t) rows.size() * slots_for(*std::max_element(rows.begin(), rows.end()));
}

// Returns the fewest slots over all ways to assign the KV heads to n groups.
int64_t fewest(const std::vector<int32_t> & rows, size_t n) {
    std::vector<size_t> of(rows.size(), 0);
    int64_t             least = INT64_MAX;
    for (;;) {
        std::vector<std::vector<int32_t>> groups(n);
        for (size_t h = 0; h < rows.size(); h++) {
            groups[of[h]].push_back(rows[h]);
        }
        int64_t sum = 0;
        for (const auto & group : groups) {
            sum += group.empty() ? 0 : slots(group);
        }
        least    = std::min(least, sum);
        size_t h = 0;
        while (h < of.size() && ++of[h] == n) {
            of[h++] = 0;
        }
        if (h == of.size()) {
            return least;
        }
    }
}

void try_heads(const std::vector<int32_t> & rows) {
    const auto        groups = group_heads(rows);
    std::vector<bool> seen(rows.size(), false);
    int64_t           sum = 0;
    for (const auto & heads : groups) {
        std::vector<int32_t> lengths;
        CHECK(!heads.empty() && std::is_sorted(heads.begin(), heads.end()));
        for (int32_t h : heads) {
            CHECK(!seen[(size_t) h]);
            seen[(size_t) h] = true;
            lengths.push_back(rows[(size_t) h]);
        }
        sum += slots(lengths);
    }
    CHECK(std::all_of(seen.begin(), seen.end(), [](bool s) { return s; }) && groups.size() <= 4);
    CHECK(sum == fewest(rows, groups.size()));
    const int64_t held = std::accumulate(rows.begin(), rows.end(), (int64_t) 0);
    CHECK(groups.size() == std::min<size_t>(4, rows.size()) || sum <= held + held / 6);
    CHECK(groups.size() == 1 || fewest(rows, groups.size() - 1) > held + held / 6);
}

}  // namespace

int main() {
    for (int32_t n : { 0, 1, 31, 32, 33, 500, 2047, 2048, 60000 }) {
        CHECK(slots_for(n) >= n + 32 && slots_for(n) <= n + 32 + 256 && slots_for(n) % (n < 256 ? 64 : 256) == 0);
    }
    std::mt19937 rng(1);
    for (int32_t i = 0; i < 60; i++) {
        std::vector<int32_t> rows((size_t) (1 + i % 7));
        for (auto & n : rows) {
            n = (int32_t) (rng() % (i % 3 == 0 ? 6000u : 300u));
        }
        try_heads(rows);
    }
    try_heads({ 819, 819, 819, 819 });
    try_heads({ 0, 0, 4000 });
    return failures() == 0 ? 0 : 1;
}
