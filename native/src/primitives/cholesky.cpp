#include "primitives/cholesky.h"

#include "kernels/kernels.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

constexpr int32_t N = CHOLESKY_BLOCK;

// L is the Cholesky factor, with diagonal blocks L_bb. The matrix becomes -L below the diagonal blocks, L' above them, and -L_bb^-1' in
// their place. With these signs the products, which add up, subtract.
class Factors {
  public:
    Factors(const Symmetric & a, float shift, float * work) : a_(a), shift_(shift), work_(work) {}

    void factor() {
        for (int32_t b = 0; b < a_.n; b += N) {
            const int32_t rest = a_.n - b, n = std::min(N, rest);
            kernels().gemm_pv({ at(b, 0), a_.ld }, rest, b, { at(0, b), a_.ld }, n, at(b, b));
            factor_diagonal(b, n);
            invert_diagonal(b, n);
            divide_below(b, n, rest - n);
        }
    }

    // right becomes -L^-1 right.
    void forward(float * right, size_t columns) {
        for (int32_t b = 0; b < a_.n; b += N) {
            const int32_t n = std::min(N, a_.n - b);
            kernels().gemm_pv({ at(b, 0), a_.ld }, n, b, { right, columns }, (int32_t) columns, right + (size_t) b * columns);
            for (int32_t i = 0; i < n; i++) {
                for (int32_t j = 0; j < n; j++) {
                    work_[i * N + j] = -*at(b + j, b + i);
                }
            }
            multiply(work_, N, n, right + (size_t) b * columns, columns);
        }
        std::for_each(right, right + (size_t) a_.n * columns, [](float & x) { x = -x; });
    }

    // right, from forward(), becomes the solution.
    void backward(float * right, size_t columns) {
        for (int32_t b = (a_.n - 1) / N * N; b >= 0; b -= N) {
            const int32_t n = std::min(N, a_.n - b), later = b + n;
            kernels().gemm_pv(
                { at(b, later), a_.ld }, n, a_.n - later, { right + (size_t) later * columns, columns }, (int32_t) columns, right + (size_t) b * columns);
            multiply(at(b, b), a_.ld, n, right + (size_t) b * columns, columns);
        }
    }

  private:
    float * at(int32_t row, int32_t column) const { return a_.data + (size_t) row * a_.ld + column; }

    // Writes L_bb into the block's lower triangle.
    void factor_diagonal(int32_t b, int32_t n) {
        for (int32_t i = 0; i < n; i++) {
            float * row = at(b + i, b);
            for (int32_t j = 0; j < i; j++) {
                const float * of = at(b + j, b);
                row[j]           = (row[j] - kernels().dot(row, of, (size_t) j)) / of[j];
            }
            row[i] = std::sqrt(std::max(shift_ / 2.0f, row[i] + shift_ - kernels().dot(row, row, (size_t) i)));
        }
    }

    void invert_diagonal(int32_t b, int32_t n) {
        float * inverse = work_;  // [n][N] inverse of L_bb
        std::fill(inverse, inverse + n * N, 0.0f);
        for (int32_t i = 0; i < n; i++) {
            float * row = inverse + i * N;
            for (int32_t j = 0; j < i; j++) {
                kernels().axpy(-at(b + i, b)[j], inverse + j * N, row, (size_t) j + 1);
            }
            row[i]            = 1.0f;
            const float pivot = 1.0f / at(b + i, b)[i];
            std::for_each(row, row + i + 1, [pivot](float & x) { x *= pivot; });
        }
        for (int32_t i = 0; i < n; i++) {
            for (int32_t j = 0; j < n; j++) {
                *at(b + i, b + j) = -inverse[j * N + i];
            }
        }
    }

    // Multiplies the rows below the block by -L_bb^-1', and writes the negated transpose of the result to the right of the block.
    void divide_below(int32_t b, int32_t n, int32_t rows) {
        float * were = work_;  // [rows][N]
        for (int32_t r = 0; r < rows; r++) {
            std::copy_n(at(b + n + r, b), n, were + (size_t) r * N);
            std::fill_n(at(b + n + r, b), n, 0.0f);
        }
        kernels().gemm_pv({ were, N }, rows, n, { at(b, b), a_.ld }, n, at(b + n, b));
        for (int32_t first = 0; first < rows; first += 16) {
            const int32_t last = std::min(rows, first + 16);
            for (int32_t c = 0; c < n; c++) {
                for (int32_t r = first; r < last; r++) {
                    *at(b + c, b + n + r) = -*at(b + n + r, b + c);
                }
            }
        }
    }

    // rows [n][columns] becomes matrix * rows.
    void multiply(const float * matrix, size_t ld, int32_t n, float * rows, size_t columns) {
        float * were = work_ + N * N;
        std::copy_n(rows, (size_t) n * columns, were);
        std::fill_n(rows, (size_t) n * columns, 0.0f);
        kernels().gemm_pv({ matrix, ld }, n, n, { were, columns }, (int32_t) columns, rows);
    }

    Symmetric a_;
    float     shift_;
    float *   work_;
};

}  // namespace

size_t cholesky_floats(int32_t n, size_t columns) { return std::max((size_t) n * (size_t) N, (size_t) N * ((size_t) N + columns)); }

void cholesky_solve(const Symmetric & a, float shift, float * right, size_t columns, float * work) {
    Factors factors(a, shift, work);
    factors.factor();
    factors.forward(right, columns);
    factors.backward(right, columns);
}

}  // namespace kvedge
