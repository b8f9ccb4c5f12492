// Mean and covariance of a layer's queries before rotary position encoding.

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
    int32_t count(int32_t head) const { return n_[(size_t) head]; }  // queries of a head that were added
    // Writes the mean [d] and the covariance [d][d] of a head's queries. The head must have at least one query.
    void    read(int32_t head, std::vector<double> & mean, std::vector<double> & covariance) const;

    // Adds n queries x [n][ld] of a head, d channels each. Subtracts the head's first query from x, because a large mean
    // would hide the covariance in rounding. across: room for [d][n] floats; tile: room for [TILE][ld] floats.
    void add(int32_t head, float * x, size_t ld, int32_t n, float * across, float * tile);

    // Notes a position of a token. The next token follows the largest position that was noted.
    void    note_position(int32_t position) { next_ = next_ > position ? next_ : position + 1; }
    void    set_next_position(int32_t next) { next_ = next; }
    int32_t next_position() const { return next_; }

    // Writes the moments, and reads them back. read: returns false if the bytes are damaged. Throws std::bad_alloc.
    void write(Sink & out) const;
    bool read(int32_t n_heads, int32_t d, Reader & in);

    uint64_t bytes() const;
    static uint64_t bytes(int32_t n_heads, int32_t d);

    static constexpr int32_t TILE = 16;

  private:
    // Returns where row i of the upper triangle [d][d] begins, at its diagonal.
    size_t row(size_t i) const { return i * (2 * (size_t) d_ + 1 - i) / 2; }

    int32_t              d_ = 0, next_ = 0;
    std::vector<int32_t> n_;       // [H]
    Bulk<float>          origin_;  // [H][d]
    Bulk<double>         sum_;     // [H][d]
    Bulk<double>         outer_;   // [H][d (d + 1) / 2] sums of the products of two channels
};

// Working memory of one thread, which undoes the rotation of queries.
class MomentsScratch {
  public:
    static constexpr int32_t BLOCK = 64;  // number of queries in one step

    bool reserve(int32_t d);  // Returns false if there is no memory.

    size_t  ld     = 0;        // floats of a row
    float * x      = nullptr;  // [BLOCK][ld]
    float * across = nullptr;  // [d][BLOCK]
    float * tile   = nullptr;  // [TILE][ld]
    float * cos    = nullptr;  // [BLOCK][d / 2]
    float * sin    = nullptr;  // [BLOCK][d / 2]

  private:
    Pages memory_;
};

}  // namespace kvedge
