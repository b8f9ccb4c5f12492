// Fits kept rows so that queries get from them what they get from all rows of a head: biases by non-negative least squares in a box, values
// by ridge regression (Zweiger et al. 2026, arXiv:2602.16284, section 3).

#pragma once

#include "plan/stages.h"

namespace kvedge {

// A head's rows that take part, the kept rows among them, and the queries. n_rows > n_kept >= 1, n_queries >= n_kept.
struct FitProblem {
    int32_t         n_rows, first, d_k, d_v;
    const float *   k;     // [n_rows][d_k]
    const float *   v;     // [n_rows][d_v]
    const float *   bias;  // [n_rows] biases of the logits, or NULL
    const int32_t * kept;  // [n_kept] ascending; kept[j] - first is a row of k and v
    int32_t         n_kept;
    const float *   q;     // [n_queries][d_k], scaled
    int32_t         n_queries;
    float           softcap;  // 0: none
};

// With z_it = cap(q_i . k_t) + b_t over all rows, m_i = max_t z_it, y_i = sum_t e^(z_it - m_i), and M the kept columns of
// e^(z - m):
//   weigh_rows  w = argmin |M w - y|^2 with e^-3 <= w <= e^3, by cyclic coordinate descent on M'M. Starts with the one weight that is
//               best for all rows; ends after 20 sweeps, or when no weight moves by more than 1e-3 of itself. relative: rows are
//               divided by y_i
//   weigh_all   w = median_i(y_i / sum_j M_ij), in the same box, for all rows
//   solve       C = argmin |X C - Y|^2 + ridge |X|_2^2 |C - V_kept|^2 with X = softmax(z_kept + ln w), Y = softmax(z) V, by Cholesky
// Products are in float32, of 128 queries at a time, and summed in float32. Compared with float64 (pykvedge/reference/checks/rules.py),
// values differ by at most 1e-2 of the largest value, and biases by at most 0.1.
class Fit {
  public:
    Fit(const FitProblem & problem, float * scratch);
    static size_t floats(const ReduceSize & size);  // of scratch, in floats

    void attend();  // call this function first
    void weigh_rows(bool relative);
    void weigh_all();
    // Writes values [n_kept][d_v]. False: a value is NaN or too large for half precision; then none of the values is usable.
    bool solve(float ridge, float * values);
    void add_biases(float * biases) const;  // += ln w

  private:
    struct Space {
        float *packed, *values, *logits, *outputs;
        float *kept, *top, *mass, *sought;
        float *tile, *turned, *gram, *right, *weights, *work, *slope, *factors;
        double *right_sums, *row_sums;
        size_t row, kept_row, value_row;
        size_t floats;
    };
    static Space lay_out(float * base, const ReduceSize & size);

    void attend_tile(int32_t first, int32_t n);
    void clear_gram();
    void add_gram(int32_t n, bool values, int32_t first);
    void mirror_gram();
    void start_descent();
    void descend();
    float norm();

    const FitProblem & p_;
    Space              x_;
};

}  // namespace kvedge
