// Symmetric positive definite equations, solved by Cholesky factors in blocks, so that nearly all of it are products of matrices.

#pragma once

#include <cstddef>
#include <cstdint>

namespace kvedge {

constexpr int32_t CHOLESKY_BLOCK = 64;

// A matrix [n][ld] with ld a multiple of CHOLESKY_BLOCK: its lower triangle and diagonal, and zeros past column n.
struct Symmetric {
    float * data;
    size_t  ld;
    int32_t n;
};

size_t cholesky_floats(int32_t n, size_t columns);  // of work, for n equations with right sides of so many columns

// right [n][columns] becomes (a + shift I)^-1 right, and a is overwritten. columns: a multiple of 16. shift > 0; rounding takes no
// more from a pivot than leaves half of it.
void cholesky_solve(const Symmetric & a, float shift, float * right, size_t columns, float * work);

}  // namespace kvedge
