// Low-frequency part of a signal along the tokens, by an orthonormal DCT-II (FlashCache eq. 5-9).

#pragma once

#include "core/stages.h"

namespace kvedge {

// The filter that keeps the first max(1, floor(gamma * T)) of T frequencies. Basis vector m: a[m] cos(pi / T * m * (i + 1/2)),
// a[0] = sqrt(1/T), else sqrt(2/T).
class LowPass {
  public:
    LowPass(int32_t n_tokens, double gamma);

    // x [T][pad16(d)], zero past d: what the filter takes away, in place. Exactly zero where that is all-pass or x constant.
    void take_away(std::vector<float> & x, int32_t d) const;

  private:
    int32_t            T_, n_;     // n_: frequencies kept, without the zeroth
    bool               all_pass_;
    std::vector<float> forward_;   // [n][T]
    std::vector<float> backward_;  // [T][n]
};

// The pending keys (or values) of one head in float32, [T][pad16(d)].
void widen_pending(const Sequence & seq, int32_t layer, int32_t head, bool values, std::vector<float> & out);

}  // namespace kvedge
