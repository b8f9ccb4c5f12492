// A low-pass filter along the tokens by an orthonormal DCT-II, and what it removes from keys and values (FlashCache eq. 5-10).

#pragma once

#include "kernels/kernels.h"
#include "plan/pending.h"

namespace kvedge {

// The filter keeps the first w = max(1, floor(gamma * T)) of T frequencies. Basis vector m: a[m] cos(pi / T * m * (i + 1/2)),
// a[0] = sqrt(1/T), else sqrt(2/T).
class HighPass {
  public:
    // Buffers of the filter, which the heads share one after another.
    struct Work {
        std::vector<float> x, squares, rows;
    };

    HighPass(int32_t n_tokens, double gamma);
    HighPass(const HighPass &)             = delete;  // filter_ points into the object
    HighPass & operator=(const HighPass &) = delete;

    // Returns R of a layer (FlashCache eq. 13): the share of its pending keys' energy that the filter removes, plus the share of its
    // values'; 0 if the filter removes nothing. deviation [Hkv][T] += mean over the channels of the square of what is removed from a
    // token's key, plus that of its value; exactly 0 if all rows are the same. deviation NULL: not wanted.
    double measure(const PendingView & view, int32_t layer, const LayerShape & shape, float * deviation) const;

    // Like measure(), for one head and the pending tokens that count: counts [n_pending] is 1 for T tokens. deviation [T] += their
    // deviations. Returns the mean over these tokens of the root of their values' part.
    double add_deviation(const HeadView & head, const LayerShape & shape, const uint8_t * counts, float * deviation, Work & work) const;

  private:
    struct Energy {
        double all = 0.0, high = 0.0;  // sums of squares before the filter, and of what the filter removes
    };

    // n consecutive rows in memory.
    struct Run {
        Rows    rows;
        int32_t n;
    };

    void add_rows(std::vector<Run> && runs, int32_t d, float * deviation, Work & work, Energy & sum) const;
    std::vector<Run> plain_runs(std::vector<Run> runs, size_t d, std::vector<float> & to) const;

    void find_origin(const std::vector<Run> & runs, size_t from, size_t w, float * origin) const;

    static std::vector<Run> runs_of(const HeadView & view, bool values, const uint8_t * counts);
    void plan_stages(int32_t n);
    void mix_transform(int32_t kept);    // T = n
    void mix_convolution(int32_t kept);  // T < n

    int32_t                         T_, n_ = 1;  // n_: length of the FFT
    bool                            all_pass_;
    BandFilter                      filter_{};
    std::vector<std::vector<float>> twiddles_;
    std::vector<BandMix>            mixes_;
    std::vector<int32_t>            place_;  // [T] row of each token
    std::vector<int32_t>            order_;  // [n] row of each frequency
};

}  // namespace kvedge
