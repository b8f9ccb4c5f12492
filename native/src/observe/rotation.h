// Rotary position encoding (RoPE): each pair of a row's channels turns by an angle that is proportional to the position.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvedge {

struct Rotation {
    bool                 halves = false;  // pair i of n: channels i and i + n (NEOX); else 2 i and 2 i + 1 (NORM)
    std::vector<double>  angles;          // [n] radians per position; channels from 2 n on do not turn
    std::vector<uint8_t> axes;            // [n] which of a token's positions turns a pair (M-RoPE); empty: tokens have one position
    std::string          unknown;         // why the rotation of queries is unknown; empty: it is known
    std::string          unlike;          // why keys turn otherwise than queries; empty: keys turn as queries do

    size_t first(size_t pair) const { return halves ? pair : 2 * pair; }  // a pair's first channel
    size_t second(size_t pair) const { return halves ? pair + angles.size() : 2 * pair + 1; }
};

// The positions of a token in M-RoPE: time, down, across, and a last one that is 0 for text. The first three of a text token are equal.
constexpr int32_t PLACES = 4, LAST_PLACE = 3;

using Rotations = std::vector<Rotation>;  // [layer]

// Cosine and sine of the angle of every pair.
struct Turn {
    std::vector<double> cos, sin;  // [n]
};

// Returns the mean cosine and sine over n text tokens at the positions [first, first + n).
Turn mean_turn(const Rotation & rotation, int32_t first, int32_t n);

// Writes the cosines and sines of angles times n to `out`, whose vectors have the size of rotation.angles.
void turn_into(const Rotation & rotation, int32_t n, Turn & out) noexcept;

// Turns x [d], whose channels lie `stride` apart.
void turn(const Rotation & rotation, const Turn & by, double * x, size_t stride);

}  // namespace kvedge
