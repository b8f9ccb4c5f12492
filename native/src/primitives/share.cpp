#include "primitives/share.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvedge {

namespace {

// Scales the shares to `total`, those that reach `most` apart.
void fill_up(std::vector<double> & shares, double total, double most) {
    std::vector<bool> full(shares.size(), false);
    for (size_t turn = 0; turn <= shares.size(); turn++) {
        double open = 0.0, left = total;
        size_t n_open = 0;
        for (size_t i = 0; i < shares.size(); i++) {
            open += full[i] ? 0.0 : shares[i];
            left -= full[i] ? most : 0.0;
            n_open += full[i] ? 0 : 1;
        }
        bool again = false;
        for (size_t i = 0; i < shares.size(); i++) {
            if (!full[i]) {
                shares[i] = open > 0.0 ? shares[i] * (left / open) : left / (double) n_open;
            }
        }
        for (size_t i = 0; i < shares.size(); i++) {
            if (!full[i] && shares[i] > most) {
                shares[i] = most;
                full[i] = again = true;
            }
        }
        if (!again) {
            return;
        }
    }
}

}  // namespace

std::vector<int64_t> round_shares(std::vector<double> shares, int64_t total, int64_t most) {
    fill_up(shares, (double) total, (double) most);
    std::vector<int64_t> out;
    std::vector<double>  rest;
    for (double s : shares) {
        out.push_back((int64_t) std::floor(s + 1e-9));
        rest.push_back(s - (double) out.back());
    }
    std::vector<size_t> order(shares.size());
    std::iota(order.begin(), order.end(), 0);
    // Remainders that differ only by rounding count as equal.
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return std::round(rest[a] * 1e9) > std::round(rest[b] * 1e9); });
    int64_t left = total - std::accumulate(out.begin(), out.end(), (int64_t) 0);
    for (size_t turn = 0; left > 0 && turn < 2; turn++) {
        for (size_t i : order) {
            if (left > 0 && out[i] < most) {
                out[i]++;
                left--;
            }
        }
    }
    return out;
}

}  // namespace kvedge
