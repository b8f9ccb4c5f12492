// A fast high-pass filter. The projection of n tokens on the first w cosines (the low pass) is P[i][j] = D(i - j) + D(i + j + 1) with
// the Dirichlet kernel D(t) = sin((w - 1/2) pi t / n) / (2n sin(pi t / 2n)) of period 2n. The second term mirrors tokens at both ends.
// The tokens are divided into boxes of b or b - 1 tokens. Inside a box a b x b matrix (own), the same for all boxes, gives P. Between
// boxes the kernel is smooth: about 30 points of a box, whatever b is, determine all its rows. So P is, up to rounding,
//
//     own + scatter * far * gather
//
// gather reduces a box to its points, far is the kernel between the points of all boxes, and scatter interpolates rows from points.
// The high pass is 1 - P. This takes n (b + 60) + (30 n / b)^2 products for each channel; two products with the cosines take 2 n w.
// QR with pivots chooses the points: each time the row of the kernel matrix that is farthest from the span of the chosen rows. Every
// row is then a weighted sum of the chosen rows.

#include "device/highpass.h"

#include "device/own.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

namespace kvedge {

using T = ggml_tensor *;

namespace {

constexpr double PI = 3.14159265358979323846;

constexpr int64_t OWN_STEP = 32, MOST_WIDTH = 448;  // kvedge's operations: a box must fit in the shared memory of a CUDA block

int64_t rounded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace

GraphHighPass::GraphHighPass(int32_t n_tokens, double gamma, bool own)
    : n_(std::max(n_tokens, 1)), kept_(std::clamp((int64_t) std::floor(gamma * (double) n_tokens + 1e-9), (int64_t) 1, n_)),
      by_own_(own) {
    constexpr double  RANK = 30.0;
    constexpr int64_t STEP = 16;  // matrix products are fast if row lengths are multiples of 16
    if (all_pass()) {
        return;
    }
    // the box size at which the matrices inside a box and between boxes cost the least together
    const auto cheap = (int64_t) std::cbrt(2.0 * RANK * RANK * (double) n_);
    const auto best  = own ? rounded(std::min(cheap, MOST_WIDTH), OWN_STEP) : rounded(cheap, STEP);
    boxes_          = (n_ + best - 1) / best;
    most_           = (n_ + boxes_ - 1) / boxes_;
    width_          = rounded(most_, own ? OWN_STEP : STEP);
    order_.assign((size_t) (width_ * boxes_), (int32_t) (n_ / 2));
    for (int64_t box = 0; box < boxes_; box++) {
        for (int64_t t = first(box); t < first(box + 1); t++) {
            order_[(size_t) (box * width_ + t - first(box))] = (int32_t) t;
        }
    }
}

void GraphHighPass::make_kernel() {
    const double n = (double) n_;
    kernel_.resize((size_t) (2 * n_));
    for (int64_t t = 0; t < 2 * n_; t++) {
        const double angle  = PI * (double) ((2 * kept_ - 1) * t % (4 * n_)) / (2.0 * n);
        const double below  = 2.0 * n * std::sin(PI * (double) t / (2.0 * n));
        kernel_[(size_t) t] = t == 0 ? (double) (2 * kept_ - 1) / (2.0 * n) : std::sin(angle) / below;
    }
}

// Chooses points_ and computes spread_ by QR of the kernel between the rows of a box and tokens outside the box. Samples all near
// tokens, and fewer far tokens, where the kernel is smooth.
void GraphHighPass::choose_points() {
    const double      ENOUGH = by_own_ ? 1e-5 : 1e-7;  // error relative to the longest row; half precision adds about 1e-4
    constexpr int64_t DENSE  = 8;
    std::vector<int64_t> outside;
    for (int64_t at = most_ - 1; at < n_ + most_; at += std::max((int64_t) 1, (at - most_ + 2) / DENSE)) {
        outside.push_back(at);
        outside.push_back(most_ - 2 - at);
    }
    const auto          b = (size_t) most_, m = outside.size();
    std::vector<double> left(b * m), q(m), columns, squares(b);
    for (size_t i = 0; i < b; i++) {
        for (size_t j = 0; j < m; j++) {
            left[i * m + j] = kernel((int64_t) i - outside[j]);
        }
    }
    double top = 0.0;
    while (points_.size() < b) {
        for (size_t i = 0; i < b; i++) {
            squares[i] = std::inner_product(&left[i * m], &left[i * m] + m, &left[i * m], 0.0);
        }
        const auto   most   = std::max_element(squares.begin(), squares.end());
        const size_t pivot  = (size_t) (most - squares.begin());
        const double length = std::sqrt(*most);
        top                 = points_.empty() ? length : top;
        if (length <= ENOUGH * top) {
            break;
        }
        std::transform(&left[pivot * m], &left[pivot * m] + m, q.begin(), [length](double x) { return x / length; });
        points_.push_back((int32_t) pivot);
        for (size_t i = 0; i < b; i++) {
            double * row = &left[i * m];
            columns.push_back(std::inner_product(q.begin(), q.end(), row, 0.0));
            for (size_t j = 0; j < m; j++) {
                row[j] -= columns.back() * q[j];
            }
        }
    }
    // rows = columns * q, so spread = columns * (columns of the points)^-1; the latter matrix is triangular
    spread_ = columns;
    for (size_t j = points_.size(); j-- > 0;) {
        double * own = &spread_[j * b];
        for (size_t k = j + 1; k < points_.size(); k++) {
            const double factor = columns[j * b + (size_t) points_[k]];
            for (size_t i = 0; i < b; i++) {
                own[i] -= spread_[k * b + i] * factor;
            }
        }
        const double pivot = columns[j * b + (size_t) points_[j]];
        std::transform(own, own + b, own, [pivot](double x) { return x / pivot; });
    }
    rank_ = rounded((int64_t) points_.size(), 8);
}

// A single box includes the mirror images of its own tokens.
void GraphHighPass::fill_own(float * out, bool high) const {
    for (int64_t i = 0; i < width_; i++) {
        for (int64_t j = 0; j < width_; j++) {
            const double low = kernel(i - j) + (boxes_ == 1 ? kernel(i + j + 1) : 0.0);
            *out++           = i >= most_ || j >= most_ ? 0.0f : (float) (high ? (i == j ? 1.0 : 0.0) - low : low);
        }
    }
}

void GraphHighPass::fill_spread(float * out, bool by_row) const {
    std::fill_n(out, rank_ * width_, 0.0f);
    for (size_t p = 0; p < points_.size(); p++) {
        for (size_t i = 0; i < (size_t) most_; i++) {
            const double one = spread_[p * (size_t) most_ + i];
            const size_t at  = by_row ? i * (size_t) rank_ + p : p * (size_t) width_ + i;
            out[at]          = (float) (by_row ? -one : one);  // minus: the high pass subtracts the low pass of other boxes
        }
    }
}

void GraphHighPass::fill_far(float * out, int64_t own) const {
    const int64_t size = rank_ * boxes_, n_points = (int64_t) points_.size();
    float *       to   = out + own * rank_ * size;
    std::fill_n(to, rank_ * size, 0.0f);
    for (int64_t p = 0; p < n_points; p++, to += size) {
        const int64_t i = first(own) + points_[(size_t) p];
        for (int64_t box = 0; box < boxes_; box++) {
            for (int64_t o = 0; o < n_points; o++) {
                const int64_t j       = first(box) + points_[(size_t) o];
                to[box * rank_ + o] = (float) (kernel(i + j + 1) + (box == own ? 0.0 : kernel(i - j)));
            }
        }
    }
}

void GraphHighPass::prepare(ggml_context * c, GraphTransfer & transfer) {
    if (all_pass()) {
        return;
    }
    make_kernel();
    if (by_own_) {
        send_own(c, transfer);
        return;
    }
    own_ = ggml_new_tensor_2d(c, GGML_TYPE_F32, width_, width_);
    transfer.send<float>(own_, [this](float * to, int32_t) { fill_own(to, true); });
    if (boxes_ == 1) {
        return;
    }
    choose_points();
    gather_  = ggml_new_tensor_2d(c, GGML_TYPE_F32, width_, rank_);
    far_     = ggml_new_tensor_2d(c, GGML_TYPE_F32, rank_ * boxes_, rank_ * boxes_);
    scatter_ = ggml_new_tensor_2d(c, GGML_TYPE_F32, rank_, width_);
    transfer.send<float>(gather_, [this](float * to, int32_t) { fill_spread(to, false); });
    transfer.send<float>(scatter_, [this](float * to, int32_t) { fill_spread(to, true); });
    transfer.send<float>(far_, [this](float * to, int32_t box) { fill_far(to, box); }, (int32_t) boxes_);
}

void GraphHighPass::send_own(ggml_context * c, GraphTransfer & transfer) {
    if (boxes_ > 1) {
        choose_points();
    }
    const auto width = (size_t) width_, rank = (size_t) rank_, padded = (size_t) rounded(rank_, OWN_STEP);
    own_ = ggml_new_tensor_2d(c, GGML_TYPE_F16, FRAGMENT * FRAGMENT, (int64_t) (width * (width + padded) / (FRAGMENT * FRAGMENT)));
    transfer.send<ggml_fp16_t>(own_, [this, width, rank, padded](ggml_fp16_t * to, int32_t) {
        std::vector<float> from(width * std::max(width, rank));
        const auto         copy = [&](size_t before, size_t columns) {
            for (size_t i = 0; i < width * columns; i++) {
                to[fragment_at(i / columns, before + i % columns, width + padded)] = ggml_fp32_to_fp16(from[i]);
            }
        };
        std::fill_n(to, width * (width + padded), ggml_fp32_to_fp16(0.0f));
        fill_own(from.data(), false);
        copy(0, width);
        if (rank > 0) {
            fill_spread(from.data(), true);
            std::transform(from.begin(), from.end(), from.begin(), std::negate<>());
            copy(width, rank);
        }
    });
    if (boxes_ == 1) {
        return;
    }
    gather_ = ggml_new_tensor_2d(c, GGML_TYPE_F16, FRAGMENT * FRAGMENT, (int64_t) (width * padded / (FRAGMENT * FRAGMENT)));
    far_    = ggml_new_tensor_2d(c, GGML_TYPE_F32, rank_ * boxes_, rank_ * boxes_);
    transfer.send<ggml_fp16_t>(gather_, [this, width, rank, padded](ggml_fp16_t * to, int32_t) {
        std::vector<float> from(width * rank);
        std::fill_n(to, width * padded, ggml_fp32_to_fp16(0.0f));
        fill_spread(from.data(), false);
        for (size_t i = 0; i < from.size(); i++) {
            to[fragment_at(i / width, i % width, width)] = ggml_fp32_to_fp16(from[i]);
        }
    });
    transfer.send<float>(far_, [this](float * to, int32_t box) { fill_far(to, box); }, (int32_t) boxes_);
}

T GraphHighPass::deviation(ggml_context * c, const MeasuredRows & rows) const {
    T others = nullptr;
    if (boxes_ > 1) {
        const int64_t columns = rows.heads * (rows.k->ne[0] + rows.v->ne[0]);
        others = product(c, far_, own_operation(c, OWN_POINTS, rows, gather_, rank_ * boxes_, columns, { boxes_, width_, rank_ }));
    }
    T out       = own_operation(c, OWN_DEVIATION, rows, own_, rows.heads * (n_ + 2 * boxes_), 1, { boxes_, width_, rank_ });
    out->src[3] = others;
    // the factor of a row itself: 1, corrected by the rounding error of the matrix diagonal, which is equal for all rows
    const auto  own = (float) kernel(0);
    const float by  = boxes_ > 1 ? 1.0f - own + ggml_fp16_to_fp32(ggml_fp32_to_fp16(own)) : 1.0f;
    std::memcpy(out->op_params + OWN_KIND + 5, &by, sizeof(by));
    return out;
}

T GraphHighPass::deviation(ggml_context * c, T rows) const {
    const int64_t d = rows->ne[0], n = rows->ne[1], heads = rows->ne[2];
    // the middle row is subtracted: a part common to all rows would cost precision, and padding becomes 0
    const auto middle = (size_t) (std::find(order_.begin(), order_.end(), (int32_t) (n_ / 2)) - order_.begin());
    T origin = ggml_view_3d(c, rows, d, 1, heads, rows->nb[1], rows->nb[2], middle * rows->nb[1]);
    T x      = ggml_reshape_2d(c, ggml_cont(c, ggml_transpose(c, ggml_sub(c, rows, origin))), width_, boxes_ * d * heads);
    T high   = product(c, own_, x);
    if (boxes_ > 1) {
        T points = ggml_reshape_2d(c, product(c, gather_, x), rank_ * boxes_, d * heads);
        T others = ggml_reshape_2d(c, product(c, far_, points), rank_, boxes_ * d * heads);
        high     = ggml_add(c, high, product(c, scatter_, others));
    }
    T square = ggml_reshape_3d(c, ggml_sqr(c, high), n, d, heads);
    return ggml_pool_2d(c, square, GGML_OP_POOL_AVG, 1, (int) d, 1, (int) d, 0, 0);
}

double GraphHighPass::add(const float * deviation, float * out) const {
    double sum = 0.0;
    for (int64_t box = 0; box < boxes_; box++) {
        const float * from = deviation + box * width_;
        for (int64_t t = first(box); t < first(box + 1); t++) {
            sum += (double) *from;
            out[t] += *from++;
        }
    }
    return sum;
}

}  // namespace kvedge
