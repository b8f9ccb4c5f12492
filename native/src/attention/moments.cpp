#include "attention/attention.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

constexpr double WHOLE_TURN = 6.283185307179586476925;

// Returns the rotary position of query token t for a pair of channels.
int32_t position(const AttendJob & job, const Rotation & rotation, int32_t t, size_t pair) {
    if (job.rotation_positions && !rotation.axes.empty()) {
        return job.rotation_positions[(size_t) rotation.axes[pair] * (size_t) job.n + (size_t) t];
    }
    return job.rows->contents().pos[(size_t) (job.rows->n_tokens() - job.n + t)];
}

// Writes the cosines and sines of the rotation of query tokens [first, first + n) to x.cos and x.sin [n][pairs].
void note_turns(const AttendJob & job, const Rotation & rotation, int32_t first, int32_t n, MomentsScratch & x) {
    const size_t pairs = rotation.angles.size();
    for (size_t t = 0; t < (size_t) n; t++) {
        for (size_t i = 0; i < pairs; i++) {
            const double whole = rotation.angles[i] * (double) position(job, rotation, first + (int32_t) t, i);
            const auto   angle = (float) (whole - WHOLE_TURN * std::nearbyint(whole / WHOLE_TURN));
            x.cos[t * pairs + i] = std::cos(angle);
            x.sin[t * pairs + i] = std::sin(angle);
        }
    }
}

// Writes to [d] = scale * from [d], without its rotary encoding: turned back by row t of x.cos and x.sin.
void turn_back(const Rotation & rotation, const MomentsScratch & x, size_t t, const float * from, float scale, int32_t d, float * to) {
    const size_t  pairs = rotation.angles.size();
    const float * cos   = x.cos + t * pairs;
    const float * sin   = x.sin + t * pairs;
    for (size_t i = 0; i < pairs; i++) {
        const float a = scale * from[rotation.first(i)], b = scale * from[rotation.second(i)];
        to[rotation.first(i)]  = a * cos[i] + b * sin[i];
        to[rotation.second(i)] = b * cos[i] - a * sin[i];
    }
    for (auto i = (int32_t) (2 * pairs); i < d; i++) {
        to[i] = scale * from[i];
    }
}

}  // namespace

void record_moments(const AttendJob & job, Observed & to, int32_t from, int32_t ith, int32_t nth, MomentsScratch & x) {
    const LayerShape & shape    = job.rows->shapes()[(size_t) job.layer];
    const Rotation &   rotation = to.rotation((size_t) job.layer);
    QueryMoments &     moments  = to.layer((size_t) job.layer).moments;
    const int32_t      first    = job.rows->n_tokens() - job.n;
    for (int32_t a = 0; ith == 0 && job.rotation_positions && a < PLACES * job.n; a++) {
        moments.note_position(job.rotation_positions[a]);
    }
    for (int32_t t = std::max(0, from - first); t < job.n; t += MomentsScratch::BLOCK) {
        const int32_t n = std::min(MomentsScratch::BLOCK, job.n - t);
        note_turns(job, rotation, t, n, x);
        for (int32_t h = ith; h < shape.n_heads; h += nth) {
            for (int32_t i = 0; i < n; i++) {
                const size_t  place = (size_t) (job.index ? job.index[t + i] : t + i);
                const float * row   = job.q + place * job.q_token + (size_t) h * job.q_head;
                turn_back(rotation, x, (size_t) i, row, job.scale, shape.d_k, x.x + (size_t) i * x.ld);
            }
            moments.add(h, x.x, x.ld, n, x.across, x.tile);
        }
    }
}

}  // namespace kvedge
