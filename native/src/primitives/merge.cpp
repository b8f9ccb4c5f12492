#include "primitives/merge.h"

#include "kernels/kernels.h"
#include "system/threads.h"
#include "store/block.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace kvedge {

namespace {

constexpr int32_t TILE = 48;  // evicted rows compared with all kept rows at a time

float inverse_norm(const float * row, int32_t d) {
    const float sq = kernels().dot(row, row, (size_t) d);
    return sq > 0.0f ? 1.0f / std::sqrt(sq) : 0.0f;
}

// Parts of ReduceInput::scratch.
struct Space {
    float *      unit;     // [n_kept][d] kept keys: as they are for distances, else of unit length, or 0 for a zero key
    float *      packed;   // the same keys, packed
    float *      less;     // [n_kept] is subtracted from a key's products: half of its square for distances, else 0; infinity: no row joins
    float *      rows;     // [threads][TILE][d]
    float *      scores;   // [threads][TILE][row]
    MergeTargets merges;
    int32_t *    evicted;  // [T] rows to compare
    size_t       row;      // n_kept rounded up to whole panels
    size_t       floats;
};

Space lay_out(float * base, const ReduceSize & size) {
    const auto panel = (size_t) kernels().panel, d = (size_t) size.d_k, T = (size_t) size.n_tokens, n = (size_t) size.n_kept;
    Space      x{};
    x.row        = (n + panel - 1) / panel * panel;
    const auto take = [&](size_t count) {
        float * at = base ? base + x.floats : nullptr;
        x.floats += (count + 15) / 16 * 16;
        return at;
    };
    x.unit          = take(n * d);
    x.packed        = take(x.row * d);
    x.less          = take(n);
    x.rows          = take((size_t) size.n_threads * TILE * d);
    x.scores        = take((size_t) size.n_threads * TILE * x.row);
    x.merges        = { nullptr, take(T), nullptr };
    x.merges.target = (int32_t *) take(T);
    x.evicted       = (int32_t *) take(T);
    x.merges.self   = take(n);
    return x;
}

void pack_kept(const ReduceInput & in, bool by_distance, Space & x) {
    const auto d = (size_t) in.d_k;
    for (int32_t j = 0; j < in.n_kept; j++) {
        const float * row   = in.k + (size_t) in.kept[j] * d;
        const float   scale = by_distance ? 1.0f : inverse_norm(row, in.d_k);
        x.less[j]           = by_distance ? 0.5f * kernels().dot(row, row, d) : scale == 0.0f ? INFINITY : 0.0f;
        for (size_t i = 0; i < d; i++) {
            x.unit[(size_t) j * d + i] = scale == 0.0f ? 0.0f : row[i] * scale;  // not infinity times 0
        }
    }
    kernels().pack({ (const uint8_t *) x.unit, d * sizeof(float), Type::f32 }, in.n_kept, in.d_k, x.packed);
}

// Returns the index of the largest of n numbers, the lowest on ties.
int32_t largest(const float * s, int32_t n) {
    constexpr int32_t CHUNK = 128;
    const float       top   = kernels().max(s, (size_t) n);
    int32_t           at    = 0;
    while (at + CHUNK < n && kernels().max(s + at, CHUNK) < top) {
        at += CHUNK;
    }
    return (int32_t) (std::find(s + at, s + n - 1, top) - s);
}

// Finds the kept rows that n evicted rows join. rows, scores: of a worker. By distance: |a - b|^2 = |a|^2 - 2 (a.b - |b|^2 / 2).
void match_tile(const ReduceInput & in, float reach, const int32_t * evicted, int32_t n, const Space & x, float * rows, float * scores) {
    const auto d = (size_t) in.d_k;
    for (int32_t r = 0; r < n; r++) {
        const float * key   = in.k + (size_t) evicted[r] * d;
        const float   scale = reach > 0.0f ? 1.0f : inverse_norm(key, in.d_k);
        for (size_t i = 0; i < d; i++) {
            rows[(size_t) r * d + i] = key[i] * scale;
        }
    }
    kernels().gemm_qk({ rows, d }, n, x.packed, in.n_kept, in.d_k, { scores, x.row });
    for (int32_t r = 0; r < n; r++) {
        float *       s   = scores + (size_t) r * x.row;
        const float * key = rows + (size_t) r * d;
        for (int32_t j = 0; j < in.n_kept; j++) {
            s[j] -= x.less[j];
        }
        const int32_t best  = largest(s, in.n_kept);
        bool          found = s[best] > -INFINITY;
        if (reach > 0.0f) {
            const float own = kernels().dot(key, key, d);
            found           = in_reach(reach, own, s[best]);
        }
        x.merges.target[evicted[r]] = found ? best : -1;
        x.merges.share[evicted[r]]  = !found ? 0.0f : reach > 0.0f ? 1.0f : s[best];
    }
}

void match_all(const ReduceInput & in, float reach, const Space & x) {
    int32_t n = 0, next_kept = 0;
    std::fill(x.merges.target, x.merges.target + in.n_tokens, -1);
    for (int32_t t = 0; t < in.n_tokens; t++) {
        if (next_kept < in.n_kept && in.kept[next_kept] == t) {
            next_kept++;
        } else if (reach > 0.0f || inverse_norm(in.k + (size_t) t * (size_t) in.d_k, in.d_k) > 0.0f) {
            x.evicted[n++] = t;
        }
    }
    const auto tile = [&](int32_t i, int32_t worker) {
        const int32_t first = i * TILE;
        match_tile(in, reach, x.evicted + first, std::min(TILE, n - first), x, x.rows + (size_t) worker * TILE * (size_t) in.d_k,
                   x.scores + (size_t) worker * TILE * x.row);
    };
    parallel_for(in.n_threads, (n + TILE - 1) / TILE, std::ref(tile));  // a reference takes no memory
}

// Removes the target of a row that is less similar to it than the mean of all rows.
void drop_below_mean(int32_t n_tokens, const MergeTargets & x) {
    double  sum = 0.0;
    int32_t n   = 0;
    for (int32_t t = 0; t < n_tokens; t++) {
        sum += x.target[t] >= 0 ? (double) x.share[t] : 0.0;
        n += x.target[t] >= 0 ? 1 : 0;
    }
    for (int32_t t = 0; t < n_tokens; t++) {
        if (x.target[t] >= 0 && (double) x.share[t] < sum / n - 1e-6) {
            x.target[t] = -1;
        }
    }
}

}  // namespace

size_t merge_scratch(const ReduceSize & size) { return lay_out(nullptr, size).floats; }

float mass_of(const ReduceInput & in, bool mass, int32_t t) { return mass && in.bias ? std::exp(in.bias[t]) : 1.0f; }

float bias_of(float mass) { return std::min(std::log(mass), MOST_BIAS); }

MergeRule averaging(const double * params) {
    return { [](float own, float) { return own; }, [](float) { return 1.0f; }, false, has_mass(params[0]) };
}

void to_merge_factors(const ReduceInput & in, const MergeRule & rule, const MergeTargets & x, float * out_bias) {
    if (rule.above_mean) {
        drop_below_mean(in.n_tokens, x);
    }
    std::fill_n(x.self, in.n_kept, 0.0f);  // at first the mass that joins each row
    for (int32_t t = 0; t < in.n_tokens; t++) {
        if (x.target[t] >= 0) {
            x.self[x.target[t]] += mass_of(in, rule.mass, t);
        }
    }
    for (int32_t t = 0; t < in.n_tokens; t++) {
        if (x.target[t] >= 0) {
            const float total = x.self[x.target[t]] + mass_of(in, rule.mass, in.kept[x.target[t]]);
            x.share[t]        = mass_of(in, rule.mass, t) * rule.weight(x.share[t]) / total;
        }
    }
    for (int32_t j = 0; j < in.n_kept; j++) {
        const float merged = x.self[j], own = mass_of(in, rule.mass, in.kept[j]);
        x.self[j] = merged == 0.0f ? 1.0f : rule.self(own, merged) / (own + merged);
        if (rule.mass && merged > 0.0f) {
            out_bias[j] = bias_of(own + merged);
        }
    }
}

void merge_rows(const ReduceInput & in, const MergeRule & rule, const ReducedRows & out) {
    const Kernels & kn = kernels();
    const auto      dk = (size_t) in.d_k, dv = (size_t) in.d_v;
    Space           x = lay_out(in.scratch, { in.n_tokens, in.n_kept, in.d_k, in.d_v, 0, in.n_threads });
    pack_kept(in, rule.reach > 0.0f, x);
    match_all(in, rule.reach, x);
    to_merge_factors(in, rule, x.merges, out.bias);
    for (size_t j = 0; j < (size_t) in.n_kept; j++) {
        const auto  at   = (size_t) in.kept[j];
        const float self = x.merges.self[j];
        std::transform(in.k + at * dk, in.k + (at + 1) * dk, out.k + j * dk, [self](float a) { return self * a; });
        std::transform(in.v + at * dv, in.v + (at + 1) * dv, out.v + j * dv, [self](float a) { return self * a; });
    }
    for (size_t t = 0; t < (size_t) in.n_tokens; t++) {
        if (x.merges.target[t] >= 0) {
            const auto j = (size_t) x.merges.target[t];
            kn.axpy(x.merges.share[t], in.k + t * dk, out.k + j * dk, dk);
            kn.axpy(x.merges.share[t], in.v + t * dv, out.v + j * dv, dv);
        }
    }
}

}  // namespace kvedge
