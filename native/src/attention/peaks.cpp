// Peaks: the largest attention of any query to a row, for scorer replay.

#include "attention/tile.h"
#include "kernels/kernels.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

// Returns the number of peak rows per KV head: 1, or one for each query head of its group.
int32_t peak_rows(const AttendJob & job, const Tile & tile) { return job.seen->layer((size_t) job.layer).peaks.each > 1 ? tile.group : 1; }

// Raises the peaks of the pending rows [first, first + n) to at least highest [n]. part: the peak row of the KV head.
void pour_peaks(const AttendJob & job, const Tile & tile, int32_t part, int32_t first, int32_t n, const float * highest) {
    Peaks &       peaks = job.seen->layer((size_t) job.layer).peaks;
    const int32_t row   = tile.head * peak_rows(job, tile) + part;
    float *       to    = peaks.highest.data() + (size_t) row * (size_t) peaks.capacity + first;
    job.locks[tile.head].lock();
    for (int32_t c = 0; c < n; c++) {
        to[c] = std::max(to[c], highest[c]);
    }
    job.locks[tile.head].unlock();
}

// highest [n] = max(highest, a * x).
void take_highest(float a, const float * x, float * highest, size_t n) {
    for (size_t c = 0; c < n; c++) {
        highest[c] = std::max(highest[c], a * x[c]);
    }
}

}  // namespace

void add_peaks(const AttendJob & job, const Tile & tile, Scratch & x) {
    const int32_t first = tile.n_keys - job.rows->pending_length();
    const int32_t last  = std::min(tile.n_visible, job.replay ? first + job.replay->n_context : tile.n_keys);
    if (last <= first) {
        return;
    }
    const int32_t parts = peak_rows(job, tile);
    for (int32_t part = 0; part < parts; part++) {
        std::fill(x.sum + first, x.sum + last, 0.0f);
        for (int32_t r = part; r < tile.rows; r += parts) {
            take_highest(x.len[r], x.s + (size_t) r * tile.stride + first, x.sum + first, (size_t) (last - first));
        }
        pour_peaks(job, tile, part, 0, last - first, x.sum + first);
    }
}

// Raises one peak row of the chunk by the tile's query rows part, part + parts, ... Each query row gets a separate softmax over only
// the sinks, the chunk and the replay's rows; x.mean holds these logits side by side.
static void add_part_of_chunk(const AttendJob & job, const Tile & tile, int32_t part, int32_t parts, Scratch & x) {
    const Kernels &     kn    = kernels();
    const ReplayScope & scope = *job.replay;
    const int32_t       old = tile.n_keys - job.rows->pending_length(), sinks = std::min(scope.sinks, scope.first);
    const auto          n = (size_t) (scope.last - scope.first);
    std::fill(x.sum, x.sum + n, 0.0f);
    for (int32_t r = part; r < tile.rows; r += parts) {
        const float * s     = x.s + (size_t) r * tile.stride;
        const int32_t seen  = visible(job, tile, tile.t0 + r / tile.group);
        float *       chunk = std::copy(s + old, s + old + sinks, x.mean);
        float *       own   = std::copy(s + old + scope.first, s + old + scope.last, chunk);
        float *       end   = std::copy(s + old + scope.n_context, s + seen, own);
        const auto    all   = (size_t) (end - x.mean);
        if (job.softcap != 0.0f) {
            kn.softcap(x.mean, all, job.softcap);
        }
        float top  = kn.max(x.mean, all);
        float sink = 0.0f;
        if (job.sinks) {
            const float logit = job.sinks[tile.head * tile.group + r % tile.group];
            top               = std::max(top, logit);
            sink              = std::exp(logit - top);
        }
        const float sum = kn.exp_sum(x.mean, all, top);
        take_highest(1.0f / (sum + sink), chunk, x.sum, n);
    }
    pour_peaks(job, tile, part, scope.first, (int32_t) n, x.sum);
}

void add_chunk_peaks(const AttendJob & job, const Tile & tile, Scratch & x) {
    const int32_t parts = peak_rows(job, tile);
    for (int32_t part = 0; part < parts; part++) {
        add_part_of_chunk(job, tile, part, parts, x);
    }
}

}  // namespace kvedge
