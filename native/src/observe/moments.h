// Mean and covariance of a layer's queries, as they were before they were turned by their positions.

#pragma once

#include "system/pages.h"
#include "observe/rotation.h"

#include <cstdint>
#include <vector>

namespace kvedge {

class Sink;
class Reader;

class QueryMoments {
  public:
    QueryMoments() = default;
    QueryMoments(int32_t n_heads, int32_t d);  // Throws std::bad_alloc.

    bool    empty() const { return n_.empty(); }
    int32_t count(int32_t head) const { return n_[(size_t) head]; }  // queries so far
    // Of the queries of a head, of which there is one: mean [d] and covariance [d][d], over their number.
    void    read(int32_t head, std::vector<double> & mean, std::vector<double> & covariance) const;

    // The n rows of a head x [n][ld], d channels each, which become their distance from the head's origin: the first row
    // of all, as large means would drown the covariance in rounding. across: room for [d][n] floats; tile: for [TILE][ld].
    void add(int32_t head, float * x, size_t ld, int32_t n, float * across, float * tile);

    // Where tokens have several positions, the largest of them is what the next one follows.
    void    note_position(int32_t position) { next_ = next_ > position ? next_ : position + 1; }
    void    set_next_position(int32_t next) { next_ = next; }
    int32_t next_position() const { return next_; }

    // To bytes and back. False: damaged. Throws std::bad_alloc.
    void write(Sink & out) const;
    bool read(int32_t n_heads, int32_t d, Reader & in);

    uint64_t bytes() const;
    static uint64_t bytes(int32_t n_heads, int32_t d);

    static constexpr int32_t TILE = 16;

  private:
    // Row i of the upper triangle [d][d], from its diagonal on.
    size_t row(size_t i) const { return i * (2 * (size_t) d_ + 1 - i) / 2; }

    int32_t              d_ = 0, next_ = 0;
    std::vector<int32_t> n_;       // [H]
    Bulk<float>          origin_;  // [H][d]
    Bulk<double>         sum_;     // [H][d]
    Bulk<double>         outer_;   // [H][d (d + 1) / 2] sums of products of two channels
};

// Working memory of one thread that turns queries back.
class MomentsScratch {
  public:
    static constexpr int32_t BLOCK = 64;  // queries at a time

    bool reserve(int32_t d);  // False: no memory.

    size_t  ld     = 0;        // floats of a row
    float * x      = nullptr;  // [BLOCK][ld]
    float * across = nullptr;  // [d][BLOCK]
    float * tile   = nullptr;  // [TILE][ld]
    float * cos    = nullptr;  // [BLOCK][d / 2]
    float * sin    = nullptr;  // likewise

  private:
    Pages memory_;
};

}  // namespace kvedge
