// Solves symmetric positive definite equations by Cholesky factors in blocks, so that nearly all work is products of matrices.

#pragma once

#include <cstddef>
#include <cstdint>

namespace kvedge {

constexpr int32_t CHOLESKY_BLOCK = 64;

// A matrix [n][ld] with ld a multiple of CHOLESKY_BLOCK. Used are the lower triangle and the diagonal; columns past n are zero.
struct Symmetric {
    float * data;
    size_t  ld;
    int32_t n;
};

size_t cholesky_floats(int32_t n, size_t columns);  // floats of `work`, for n equations with `columns` right sides

// Solves (a + shift I) x = right: right [n][columns] becomes x, and a is overwritten. columns: a multiple of 16. shift > 0; no pivot is
// below shift / 2.
void cholesky_solve(const Symmetric & a, float shift, float * right, size_t columns, float * work);

}  // namespace kvedge
