// Decode: few query rows, every K and V row read once from memory. Part of kernels_impl.h, under its rules.

#pragma once

#include "kernels_compiler.h"
#include "kernels_numbers.h"

namespace kvedge {
namespace {

// Query rows that are worked on together: more would leave no registers for their sums.
constexpr int MOST_ROWS = 6;

// Returns the columns per row with which V::ACC registers hold the sums of M rows: a power of 2, at most `most`.
constexpr int columns(int m, int most) { return most * m <= V::ACC ? most : columns(m, most / 2); }

template <int N> struct IntN {
    static constexpr int value = N;
};
// Calls f(n as an IntN), 1 <= n <= MOST.
template <int MOST, class F> inline void with_count(int32_t n, const F & f) {
    if constexpr (MOST > 1) {
        if (n < MOST) {
            return with_count<MOST - 1>(n, f);
        }
    }
    f(IntN<MOST>());
}

// Splits m rows into parts of about equal size, at most MOST, and calls f(first row, number of rows as an IntN) for each part.
template <int MOST = MOST_ROWS, class F> inline void split_rows(int32_t m, const F & f) {
    const int32_t parts = (m + MOST - 1) / MOST;
    for (int32_t p = 0; p < parts; p++) {
        const int32_t a = parts == 1 ? 0 : m * p / parts;  // one part, most often: divisions cost as much as a small part
        with_count<MOST>(parts == 1 ? m : m * (p + 1) / parts - a, [&](auto rows) { f(a, rows); });
    }
}

constexpr size_t LINE = 64;  // bytes of a line of cache

inline void prefetch(const uint8_t * p) { KVEDGE_PREFETCH(p); }
inline const uint8_t * later(const uint8_t * next, size_t n) { return next ? next + n : nullptr; }

// Returns the bytes of V::W values of a row, on average.
template <Type T> constexpr size_t vector_bytes() {
    return is_quantised(T) ? (size_t) V::W * block_bytes(T) / GROUP : (size_t) V::W * type_size(T);
}

// Prefetches the cache lines that begin in bytes [step * STEP, (step + 1) * STEP) from p on.
template <size_t STEP> inline void fetch_step(const uint8_t * p, size_t step) {
    if constexpr (STEP % LINE == 0) {
        KVEDGE_UNROLL
        for (size_t at = 0; at < STEP; at += LINE) {
            prefetch(p + step * STEP + at);
        }
    } else if (const size_t at = (step * STEP + LINE - 1) / LINE * LINE; at < (step + 1) * STEP) {
        prefetch(p + at);
    }
}

// Adds the products of M query rows with V::W columns of C rows of keys to acc. Registers hold the smaller of both sets, and one row of the
// other set at a time; a single query row loads all keys first. The loops are nested so that the compiler unrolls them and keeps acc in
// registers.
template <Type T, int M, int C> inline void dot_step(FloatIn q, const uint8_t * k, size_t stride, int32_t i, V (&acc)[M][C]) {
    constexpr bool QUERIES_STAY = M < C && M > 1;
    V              stay[QUERIES_STAY ? M : C];
    KVEDGE_UNROLL
    for (int j = 0; j < (QUERIES_STAY ? M : C); j++) {
        stay[j] = QUERIES_STAY ? V::load(q.row(j) + i).kept() : load_as<T>(k + j * stride, (size_t) i);
    }
    KVEDGE_UNROLL
    for (int g = 0; g < (QUERIES_STAY ? C : M); g++) {
        const V goes = QUERIES_STAY ? load_as<T>(k + g * stride, (size_t) i) : V::load(q.row(g) + i).kept();
        KVEDGE_UNROLL
        for (int j = 0; j < (QUERIES_STAY ? M : C); j++) {
            V & sum = acc[QUERIES_STAY ? j : g][QUERIES_STAY ? g : j];
            sum     = V::fma(stay[j], goes, sum);
        }
    }
}

// Writes s[r][c] for M query rows and C rows of keys, C = 1, 2 or a multiple of 4, with the same rounding for any M and C. ahead: C rows to
// prefetch meanwhile, in the order of memory and evenly spread, since many misses at once would stall.
template <Type T, int M, int C> inline void dot_micro(
    FloatIn q, const uint8_t * k, size_t stride, int32_t d, FloatOut s, const uint8_t * ahead) {
    constexpr size_t STEP = C * vector_bytes<T>();
    V                acc[M][C];
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        KVEDGE_UNROLL
        for (int c = 0; c < C; c++) {
            acc[r][c] = V::zero();
        }
    }
    fetch_step<STEP>(ahead, 0);
    int32_t i = 0;
    for (; i + V::W <= d; i += V::W) {
        fetch_step<STEP>(ahead, (size_t) (i / V::W));
        dot_step<T, M, C>(q, k, stride, i, acc);
    }
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        float * row = s.row(r);
        if constexpr (C == 2 && M % 2 == 0) {
            if (r % 2 == 0) {
                float sums[4];
                V::hsum4(acc[r][0], acc[r][1], acc[r + 1][0], acc[r + 1][1], sums);
                __builtin_memcpy(row, sums, 8);
                __builtin_memcpy(row + s.ld, sums + 2, 8);
            }
        } else if constexpr (C == 1) {
            float sums[4];
            V::hsum4(acc[r][0], acc[r][0], acc[r][0], acc[r][0], sums);
            row[0] = sums[0];
        } else {
            KVEDGE_UNROLL
            for (int c = 0; c < C; c += 4) {
                V::hsum4(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3], row + c);
            }
        }
    }
    for (; !is_quantised(T) && i < d; i++) {
        for (int r = 0; r < M; r++) {
            for (int c = 0; c < C; c++) {
                s.row(r)[c] = scalar_fma(q.row(r)[i], scalar_load(T, k + c * stride, (size_t) i), s.row(r)[c]);
            }
        }
    }
}

// A share of the rows that are needed next (NULL: none): each of `parts` passes over the same rows prefetches its share.
struct PrefetchShare {
    const uint8_t * next;
    int32_t         pass, parts;

    const uint8_t * of(int32_t step, size_t at) const {
        const bool mine = parts == 1 || step % parts == pass;  // a division takes as long as a query's part of a tile
        return next && mine ? next + at : nullptr;
    }
};

// Handles as many rows of k as make whole tiles of C. Returns their number.
template <Type T, int M, int C> int32_t dot_tiles(FloatIn q, Rows k, int32_t n, int32_t d, FloatOut s, const PrefetchShare & share) {
    int32_t c = 0;
    for (; c + C <= n; c += C) {
        const uint8_t * tile  = k.data + (size_t) c * k.stride;  // in cache already; prefetched if nothing else is
        const uint8_t * ahead = share.of(c / C, (size_t) c * k.stride);
        dot_micro<T, M, C>(q, tile, k.stride, d, s.at(0, c), ahead ? ahead : tile);
    }
    return c;
}

template <Type T>
KVEDGE_APART void rows_dot_t(FloatIn q, int32_t m, Rows k, int32_t n, int32_t d, FloatOut s, const uint8_t * next) {
    constexpr int32_t B = 64;  // rows of K that stay in L1 while every group of query rows passes over them
    constexpr int     MOST = V::ACC / 4;  // a tile then has at least four columns, except for one token of a group of four
    for (int32_t c0 = 0; c0 < n; c0 += B) {
        const int32_t w = n - c0 < B ? n - c0 : B;
        PrefetchShare share = { later(next, (size_t) c0 * k.stride), 0, m == 4 ? 1 : (m + MOST - 1) / MOST };
        const auto    part_of = [&](int32_t r, auto rows) {
            constexpr int  M    = decltype(rows)::value, C = columns(M, 8);
            const FloatOut to   = s.at(r, c0);
            const Rows     part = k.from(c0);
            const int32_t  done = dot_tiles<T, M, C>(q.at(r), part, w, d, to, share);
            if (done < w) {
                dot_tiles<T, M, 1>(q.at(r), part.from(done), w - done, d, to.at(0, done), { nullptr, 0, 1 });
            }
            share.pass++;
        };
        if (m == 4) {
            part_of(0, IntN<4>());
        } else {
            split_rows<MOST>(m, part_of);
        }
    }
}

// Adds n weighted rows v to columns [i, i + D * V::W) of o. fetch(c) prefetches what is needed next, at every row.
template <Type T, int M, int D, class F> inline void axpy_micro(FloatIn p, Rows v, int32_t i, int32_t n, FloatOut o, const F & fetch) {
    V acc[M][D];
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        KVEDGE_UNROLL
        for (int j = 0; j < D; j++) {
            acc[r][j] = V::load(o.row(r) + i + j * V::W);
        }
    }
    for (int32_t c = 0; c < n; c++) {
        fetch(c);
        V b[D];
        KVEDGE_UNROLL
        for (int j = 0; j < D; j++) {
            b[j] = load_as<T>(v.data + c * v.stride, (size_t) (i + j * V::W));
        }
        KVEDGE_UNROLL
        for (int r = 0; r < M; r++) {
            const V a = V::set1(p.row(r)[c]).kept();
            KVEDGE_UNROLL
            for (int j = 0; j < D; j++) {
                acc[r][j] = V::fma(a, b[j], acc[r][j]);
            }
        }
    }
    KVEDGE_UNROLL
    for (int r = 0; r < M; r++) {
        KVEDGE_UNROLL
        for (int j = 0; j < D; j++) {
            acc[r][j].store(o.row(r) + i + j * V::W);
        }
    }
}

// Splits d columns into parts of D vectors, then of half as many and so on, and calls f(number of vectors as an IntN) for each part. i:
// where a part begins; afterwards the first column that is left.
template <int D, class F> inline void each_columns(int32_t d, int32_t & i, const F & f) {
    for (; i + D * V::W <= d; i += D * V::W) {
        f(IntN<D>());
    }
    if constexpr (D > 1) {
        each_columns<D / 2>(d, i, f);
    }
}

template <Type T>
KVEDGE_APART void rows_axpy_t(FloatIn p, int32_t m, Rows v, int32_t n, int32_t d, FloatOut o, const uint8_t * next) {
    constexpr int32_t B = 64;  // rows of V, as in rows_dot_t; every block of rows reads and writes all sums
    for (int32_t c = 0; c < n; c += B) {
        const int32_t w     = n - c < B ? n - c : B;
        const Rows    vc    = v.from(c);
        PrefetchShare share = { later(next, (size_t) c * v.stride), 0, (m + MOST_ROWS - 1) / MOST_ROWS };
        split_rows(m, [&](int32_t r, auto rows) {
            constexpr int M = decltype(rows)::value, D = columns(M, V::AD);
            const FloatIn  pr = p.at(r, c);
            const FloatOut  to = o.at(r);
            int32_t       i  = 0;
            each_columns<D>(d, i, [&](auto wide) {
                constexpr int    N    = decltype(wide)::value;
                constexpr size_t STEP = N * vector_bytes<T>();
                const uint8_t *  at   = share.of(i / (N * V::W), (size_t) (i / V::W * w) * vector_bytes<T>());
                axpy_micro<T, M, N>(pr, vc, i, w, to, [at](int32_t row) {
                    if (at) {
                        fetch_step<STEP>(at, (size_t) row);
                    }
                });
            });
            for (; !is_quantised(T) && i < d; i++) {
                for (int32_t k = 0; k < M; k++) {
                    for (int32_t j = 0; j < w; j++) {
                        to.row(k)[i] = scalar_fma(pr.row(k)[j], scalar_load(T, vc.data + j * v.stride, (size_t) i), to.row(k)[i]);
                    }
                }
            }
            share.pass++;
        });
    }
}

}  // namespace
}  // namespace kvedge
