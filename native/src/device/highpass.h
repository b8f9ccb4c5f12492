// primitives/dct.h's HighPass as ggml's operations.

#pragma once

#include "device/measured.h"
#include "device/parcel.h"

#include <cstdint>
#include <cstdlib>
#include <vector>

namespace kvedge {

class GraphHighPass {
  public:
    // own: by the operations of own.h
    GraphHighPass(int32_t n_tokens, double gamma, bool own);

    bool all_pass() const { return kept_ == n_; }  // nothing is taken from anything

    // The constants, of one graph; it must outlive the parcel.
    void prepare(ggml_context * c, Parcel & parcel);

    // In which order it takes rows: the token of each. What stands in for no token is behind the others of its box.
    const std::vector<int32_t> & order() const { return order_; }
    // Of rows [d, order, heads] f32: [order, 1, heads] mean square of what is taken from each.
    ggml_tensor * deviation(ggml_context * c, ggml_tensor * rows) const;
    // By our own operations: [heads * n] mean square of what is taken from each key, plus that of its value; then of the keys of
    // each head, and of the values, the sum of squares of what is taken from each box.
    ggml_tensor * deviation(ggml_context * c, const MeasuredRows & rows) const;
    int64_t       boxes() const { return boxes_; }
    // [n] += those of one head; returns their sum.
    double add(const float * deviation, float * out) const;

  private:
    int64_t first(int64_t box) const { return box * n_ / boxes_; }  // token
    double  kernel(int64_t distance) const {  // less than 4 n
        distance = std::abs(distance);
        return kernel_[(size_t) (distance < 2 * n_ ? distance : distance - 2 * n_)];
    }
    void    make_kernel();
    void    choose_points();
    void    fill_own(float * out, bool high) const;  // high: what is taken, else what is kept
    void    fill_spread(float * out, bool by_row) const;
    void    fill_far(float * out, int64_t box) const;  // for the points of a box
    void    send_own(ggml_context * c, Parcel & parcel);  // the constants of our own operations

    int64_t              n_, kept_;
    bool                 by_own_;
    int64_t              boxes_ = 1, most_ = 1, width_ = 0;  // rows of a box at most, and the rows that it has room for
    int64_t              rank_ = 0;                          // a multiple of 8: points of a box, and what is left is empty
    std::vector<int32_t> order_;
    std::vector<double>  kernel_;   // [2 n]
    std::vector<int32_t> points_;   // of a box, that stand for all of it where others are concerned
    std::vector<double>  spread_;   // [points][most] how what is known of the points goes to the rows
    // of our own operations: own_ is what a box keeps, with scatter_ beside it, and both lie in fragments (own.h)
    ggml_tensor *        own_     = nullptr;  // [width, width]
    ggml_tensor *        gather_  = nullptr;  // [width, rank]
    ggml_tensor *        far_     = nullptr;  // [rank * boxes, rank * boxes]
    ggml_tensor *        scatter_ = nullptr;  // [rank, width]
};

}  // namespace kvedge
