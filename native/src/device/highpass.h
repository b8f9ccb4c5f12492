// The DCT high-pass filter of primitives/dct.h, built from ggml operations or from kvedge's (own.h).

#pragma once

#include "device/measured.h"
#include "device/graph_transfer.h"

#include <cstdint>
#include <cstdlib>
#include <vector>

namespace kvedge {

class GraphHighPass {
  public:
    // gamma: share of low frequencies that the filter removes. own: use kvedge's operations (own.h).
    GraphHighPass(int32_t n_tokens, double gamma, bool own);

    bool all_pass() const { return kept_ == n_; }  // all frequencies are low: the high pass of every row is 0

    // Adds the filter's matrices to a transfer for one graph. This object must outlive the transfer.
    void prepare(ggml_context * c, GraphTransfer & transfer);

    // The tokens in the order in which the filter reads rows, box by box. Padding is at the end of each box and reads token n / 2.
    const std::vector<int32_t> & order() const { return order_; }
    // Returns the mean square of each row's high pass, [order, 1, heads], for rows [d, order, heads] f32 in the order of order().
    ggml_tensor * deviation(ggml_context * c, ggml_tensor * rows) const;
    // Returns by kvedge's operations: [heads * n] mean square of the high pass of a key plus that of its value; then
    // [2][heads][boxes] sums of squares of the high pass of keys, of values.
    ggml_tensor * deviation(ggml_context * c, const MeasuredRows & rows) const;
    int64_t       boxes() const { return boxes_; }
    // Adds the deviations of one head, in the order of order(), to out [n] in token order. Returns their sum.
    double add(const float * deviation, float * out) const;

  private:
    int64_t first(int64_t box) const { return box * n_ / boxes_; }  // first token of a box
    double  kernel(int64_t distance) const {  // |distance| < 4 n
        distance = std::abs(distance);
        return kernel_[(size_t) (distance < 2 * n_ ? distance : distance - 2 * n_)];
    }
    void    make_kernel();
    void    choose_points();
    void    fill_own(float * out, bool high) const;  // writes a box's matrix; high: of the high pass, else of the low pass
    void    fill_spread(float * out, bool by_row) const;  // writes gather_ [rank][width]; by_row: scatter_ [width][rank]
    void    fill_far(float * out, int64_t box) const;  // writes the rows of far_ for the points of a box
    void    send_own(ggml_context * c, GraphTransfer & transfer);  // adds the matrices of kvedge's operations to a transfer

    int64_t              n_, kept_;
    bool                 by_own_;
    int64_t              boxes_ = 1, most_ = 1, width_ = 0;  // number of boxes; most rows of a box, without and with padding
    int64_t              rank_ = 0;                          // points of a box, padded to a multiple of 8
    std::vector<int32_t> order_;
    std::vector<double>  kernel_;   // [2 n]
    std::vector<int32_t> points_;   // rows of a box that represent the whole box towards other boxes
    std::vector<double>  spread_;   // [points][most] weights that interpolate the rows of a box from its points
    // For kvedge's operations own_ holds the box's low-pass matrix with scatter_ beside it, both in fragments (own.h).
    ggml_tensor *        own_     = nullptr;  // [width, width]
    ggml_tensor *        gather_  = nullptr;  // [width, rank]
    ggml_tensor *        far_     = nullptr;  // [rank * boxes, rank * boxes]
    ggml_tensor *        scatter_ = nullptr;  // [rank, width]
};

}  // namespace kvedge
