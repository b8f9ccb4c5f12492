// OWN_POINTS and OWN_DEVIATION (../cuda/highpass.cu describes them) on the CPU, in f32.

#include "own.h"

#include "ggml-cpu/vec.h"
#include "rows.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int ALIGNED = 32;  // the points' part of a matrix is padded to a multiple of 32 columns

struct Job : OwnRows {
    const ggml_tensor * matrix;
    int                 boxes, width, rank;

    explicit Job(const ggml_tensor * dst)
        : OwnRows(dst), matrix(dst->src[2]), boxes(dst->op_params[OWN_KIND + 2]), width(dst->op_params[OWN_KIND + 3]),
          rank(dst->op_params[OWN_KIND + 4]) {}

    int first(int box) const { return (int) ((int64_t) box * n / boxes); }
    int padded() const { return (rank + ALIGNED - 1) / ALIGNED * ALIGNED; }
    // Returns the index of a head's first channel: channels of the keys of all heads come first, then of the values.
    int64_t column(int of, int head) const { return (int64_t) (of == 1 ? heads * d(0) : 0) + (int64_t) head * d(of); }

    // Returns [width][d]: half of each row of a box minus the middle token's row, then zeros.
    std::vector<float> tile(int of, int head, int box) const {
        const auto         w = (size_t) d(of);
        std::vector<float> x((size_t) width * w, 0.0f);
        const auto         origin = read(of, head, n / 2);
        for (int t = first(box); t < first(box + 1); t++) {
            const auto row = read(of, head, t);
            for (size_t i = 0; i < w; i++) {
                x[(size_t) (t - first(box)) * w + i] = 0.5f * (row[i] - origin[i]);
            }
        }
        return x;
    }

    // Returns the matrix, stored in fragments (own.h), as [n_rows][columns].
    std::vector<float> numbers(int n_rows, int columns) const {
        std::vector<float> out((size_t) n_rows * (size_t) columns);
        const auto *       from = (const ggml_fp16_t *) matrix->data;
        for (size_t i = 0; i < out.size(); i++) {
            out[i] = ggml_fp16_to_fp32(from[fragment_at(i / (size_t) columns, i % (size_t) columns, (size_t) columns)]);
        }
        return out;
    }
};

}  // namespace

void kvedge_cpu_points(const ggml_compute_params * params, ggml_tensor * dst) {
    const Job  job(dst);
    const auto gather = job.numbers(job.padded(), job.width);
    for (int task = params->ith; task < 2 * job.heads * job.boxes; task += params->nth) {
        const int          of = task % 2, head = task / 2 % job.heads, box = task / 2 / job.heads, d = job.d(of);
        const auto         x = job.tile(of, head, box);
        std::vector<float> sum((size_t) d);
        for (int p = 0; p < job.rank; p++) {
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (int j = 0; j < job.width; j++) {
                ggml_vec_mad_f32(d, sum.data(), &x[(size_t) (j * d)], gather[(size_t) (p * job.width + j)]);
            }
            for (int i = 0; i < d; i++) {
                ((float *) dst->data)[(job.column(of, head) + i) * dst->ne[0] + box * job.rank + p] = sum[(size_t) i];
            }
        }
    }
}

void kvedge_cpu_deviation(const ggml_compute_params * params, ggml_tensor * dst) {
    const Job           job(dst);
    const ggml_tensor * others  = dst->src[3];
    const int           columns = job.width + (others ? job.padded() : 0);
    const auto          matrix  = job.numbers(job.width, columns);
    float               by;
    std::memcpy(&by, dst->op_params + OWN_KIND + 5, sizeof(by));
    for (int task = params->ith; task < job.heads * job.boxes; task += params->nth) {
        const int head = task % job.heads, box = task / job.heads, first = job.first(box), size = job.first(box + 1) - first;
        float *   deviation = (float *) dst->data + (int64_t) head * job.n + first;
        std::fill_n(deviation, size, 0.0f);
        for (int of = 0; of < 2; of++) {
            const int          d = job.d(of);
            auto               x = job.tile(of, head, box);
            std::vector<float> high((size_t) d);
            x.resize((size_t) (columns * d), 0.0f);
            for (int p = 0; others && p < job.rank; p++) {
                for (int i = 0; i < d; i++) {
                    x[(size_t) ((job.width + p) * d + i)] =
                        ((const float *) others->data)[(job.column(of, head) + i) * others->ne[0] + box * job.rank + p];
                }
            }
            float energy = 0.0f;
            for (int i = 0; i < size; i++) {
                std::fill(high.begin(), high.end(), 0.0f);
                ggml_vec_mad_f32(d, high.data(), &x[(size_t) (i * d)], by);
                for (int j = 0; j < columns; j++) {
                    ggml_vec_mad_f32(d, high.data(), &x[(size_t) (j * d)], -matrix[(size_t) (i * columns + j)]);
                }
                float square = 0.0f;
                ggml_vec_dot_f32(d, &square, 0, high.data(), 0, high.data(), 0, 1);
                square *= 4.0f;  // rows were halved
                deviation[i] += square / (float) d;
                energy += square;
            }
            ((float *) dst->data)[(int64_t) job.heads * job.n + (of * job.heads + head) * job.boxes + box] = energy;
        }
    }
}
