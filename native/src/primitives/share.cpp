#include "primitives/share.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

namespace kvedge {

namespace {

// Scales the open shares, so that all shares add up to total.
void rescale(std::vector<double> & shares, const std::vector<bool> & fixed, double total) {
    double open = 0.0, left = total;
    size_t n_open = 0;
    for (size_t i = 0; i < shares.size(); i++) {
        (fixed[i] ? left : open) += fixed[i] ? -shares[i] : shares[i];
        n_open += fixed[i] ? 0 : 1;
    }
    for (size_t i = 0; i < shares.size(); i++) {
        if (!fixed[i]) {
            shares[i] = open > 0.0 ? shares[i] * (left / open) : left / (double) n_open;
        }
    }
}

// Fixes the open shares beyond a limit at the limit. Returns whether there were any.
template <class Beyond> bool fix(std::vector<double> & shares, std::vector<bool> & fixed, double limit, const Beyond & beyond) {
    bool any = false;
    for (size_t i = 0; i < shares.size(); i++) {
        if (!fixed[i] && beyond(shares[i], limit)) {
            shares[i] = limit;
            fixed[i] = any = true;
        }
    }
    return any;
}

}  // namespace

void fill_up(std::vector<double> & shares, double total, double most, double least) {
    std::vector<bool> fixed(shares.size(), false);
    do {
        rescale(shares, fixed, total);
    } while (fix(shares, fixed, most, [](double s, double limit) { return s > limit; }) ||
             fix(shares, fixed, least, [](double s, double limit) { return s < limit; }));
    // If every share is fixed, their sum can miss the total; the shares at `most` then take the difference.
    if (std::all_of(fixed.begin(), fixed.end(), [](bool f) { return f; })) {
        const auto n_full = std::count(shares.begin(), shares.end(), most);
        for (double & s : shares) {
            s = s == most && n_full > 0 ? (total - least * (double) (shares.size() - (size_t) n_full)) / (double) n_full : s;
        }
    }
}

std::vector<int64_t> round_shares(std::vector<double> shares, int64_t total, int64_t most, int64_t least) {
    fill_up(shares, (double) total, (double) most, (double) least);
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

// Finds the digits of an ordered integer form of the float, the highest digit first, with one pass over all numbers for each digit.
float nth_largest(const float * x, size_t n, size_t k) {
    constexpr uint32_t SIGN = 0x80000000u;
    constexpr struct {
        int32_t  shift;
        uint32_t most;
    } DIGITS[] = { { 21, 2047 }, { 10, 2047 }, { 0, 1023 } };
    uint32_t known = 0, digits = 0;
    for (const auto & digit : DIGITS) {
        std::array<size_t, 2048> counts{};
        for (size_t i = 0; i < n; i++) {
            uint32_t bits;
            std::memcpy(&bits, x + i, sizeof(bits));
            bits ^= bits & SIGN ? UINT32_MAX : SIGN;
            if ((bits & digits) == known) {
                counts[(bits >> digit.shift) & digit.most]++;
            }
        }
        uint32_t at = digit.most;
        for (; k >= counts[at]; at--) {
            k -= counts[at];
        }
        known |= at << digit.shift;
        digits |= digit.most << digit.shift;
    }
    known ^= known & SIGN ? SIGN : UINT32_MAX;
    float out;
    std::memcpy(&out, &known, sizeof(out));
    return out;
}

std::vector<int32_t> count_winners(const float * scores, size_t n_heads, size_t n, size_t left) {
    std::vector<int32_t> winners(n_heads, 0);
    if (left == 0) {
        return winners;
    }
    const float worst = nth_largest(scores, n_heads * n, left - 1);  // the smallest winner
    for (size_t h = 0; h < n_heads; h++) {
        winners[h] = (int32_t) std::count_if(scores + h * n, scores + (h + 1) * n, [&](float s) { return s > worst; });
        left -= (size_t) winners[h];
    }
    for (size_t h = 0; h < n_heads; h++) {
        const auto equal = std::min(left, (size_t) std::count(scores + h * n, scores + (h + 1) * n, worst));
        winners[h] += (int32_t) equal;
        left -= equal;
    }
    return winners;
}

void share_among_heads(float * scores, int32_t n_heads_kv, int32_t n_tokens) {
    const auto T = (size_t) n_tokens, n = (size_t) n_heads_kv;
    for (size_t t = 0; t < T; t++) {
        double sum = 0.0;
        for (size_t h = 0; h < n; h++) {
            sum += (double) scores[h * T + t];
        }
        for (size_t h = 0; h < n; h++) {
            scores[h * T + t] = (float) (sum / (double) n);
        }
    }
}

}  // namespace kvedge
