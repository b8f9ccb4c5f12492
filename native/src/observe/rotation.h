// Rotary position encoding: each pair of a row's channels turns by an angle that grows with the position.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvedge {

struct Rotation {
    bool                 halves = false;  // pair i of n: channels i and i + n (NEOX); else 2 i and 2 i + 1 (NORM)
    std::vector<double>  angles;          // [n] radians a position; channels beyond the 2 n stay
    std::vector<uint8_t> axes;            // [n] which of a token's positions turns a pair (M-RoPE); empty: it has one
    std::string          unknown;         // why it is not known how queries turn; empty: it is
    std::string          unlike;          // why keys turn otherwise, as far as is known; empty: they turn as queries do

    size_t first(size_t pair) const { return halves ? pair : 2 * pair; }  // channel of a pair
    size_t second(size_t pair) const { return halves ? pair + angles.size() : 2 * pair + 1; }
};

// Positions of a token that has several: in time, down, across, and one that is 0 for text. The first three of text are alike.
constexpr int32_t PLACES = 4, LAST_PLACE = 3;

using Rotations = std::vector<Rotation>;  // by layer

// Cosine and sine of every pair.
struct Turn {
    std::vector<double> cos, sin;  // [n]
};

// Their means over n tokens of text, the first at position `first`.
Turn mean_turn(const Rotation & rotation, int32_t first, int32_t n);

// Those of n positions, into `out`, whose memory is there: cos and sin [n of angles].
void turn_into(const Rotation & rotation, int32_t n, Turn & out) noexcept;

// x [d], whose channels lie `stride` apart, turned.
void turn(const Rotation & rotation, const Turn & by, double * x, size_t stride);

}  // namespace kvedge
