// OWN_NEAREST (own.h) on the CPU: rows and products in f32.

#include "own.h"

#include "ggml-cpu/vec.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Job {
    const ggml_tensor * rows;
    const int32_t *     kept;
    ggml_tensor *       out;
    float               reach;

    void widen(int32_t row, float * to) const {
        const char * from = (const char *) rows->data + (size_t) row * rows->nb[1];
        ggml_get_type_traits(rows->type)->to_float(from, to, rows->ne[0]);
    }
    float product(const float * a, const float * b) const {
        float out = 0.0f;
        ggml_vec_dot_f32((int) rows->ne[0], &out, 0, a, 0, b, 0, 1);
        return out;
    }
};

// Finds the nearest kept row for evicted rows ith, ith + nth, ... of a head. head: the entries of NearestHead.
void find_nearest(const Job & job, const int32_t * head, int ith, int nth) {
    const auto         d = (size_t) job.rows->ne[0], n_kept = (size_t) head[NEAREST_KEPT];
    const int32_t *    kept = job.kept + head[NEAREST_KEPT_AT];
    std::vector<float> keys(n_kept * d), own(n_kept), key(d);
    for (size_t j = 0; j < n_kept; j++) {
        job.widen(kept[j], &keys[j * d]);
        own[j] = job.product(&keys[j * d], &keys[j * d]);
    }
    size_t next = 0;  // index of the next kept row
    for (int32_t i = 0, row = head[NEAREST_FIRST]; i < head[NEAREST_EVICTED]; i++, row++) {
        for (; next < n_kept && kept[next] == row; next++) {
            row++;
        }
        if (i % nth != ith) {
            continue;
        }
        job.widen(row, key.data());
        const float square = job.product(key.data(), key.data());
        float       best   = -INFINITY;
        int32_t     target = -1;
        for (size_t j = 0; j < n_kept; j++) {
            const float x     = job.product(key.data(), &keys[j * d]);
            const float score = job.reach > 0.0f ? x - 0.5f * own[j] : own[j] > 0.0f ? x / std::sqrt(own[j]) : -INFINITY;
            target            = score > best ? (int32_t) j : target;
            best              = score > best ? score : best;
        }
        const bool    far   = job.reach > 0.0f;
        const bool    known = std::isfinite(square) && (far ? square - 2.0f * best <= job.reach * job.reach * square : square > 0.0f);
        const int32_t at    = head[NEAREST_AT] + i;
        if (job.out->type == GGML_TYPE_I16) {
            ((int16_t *) job.out->data)[at] = (int16_t) (known ? target : -1);
        } else {
            ((int32_t *) job.out->data)[at] = known ? target : -1;
        }
        if (job.out->ne[1] == 2) {
            ((float *) job.out->data)[job.out->ne[0] + at] = best / std::sqrt(square);
        }
    }
}

}  // namespace

void kvedge_cpu_nearest(const ggml_compute_params * params, ggml_tensor * dst) {
    Job job{ dst->src[0], (const int32_t *) dst->src[3]->data, dst, 0.0f };
    std::memcpy(&job.reach, dst->op_params + OWN_KIND + 1, sizeof(float));
    GGML_ASSERT(job.rows->type == GGML_TYPE_F16 || job.rows->type == GGML_TYPE_BF16);
    for (int64_t h = 0; h < dst->src[5]->ne[1]; h++) {
        find_nearest(job, (const int32_t *) dst->src[5]->data + h * NEAREST_HEAD, params->ith, params->nth);
    }
}
