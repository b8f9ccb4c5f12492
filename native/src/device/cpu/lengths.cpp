// OWN_SUM and OWN_LENGTHS (../cuda/lengths.cu describes them) on the CPU.

#include "own.h"

#include "ggml-cpu/vec.h"
#include "rows.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr float SHORTEST = 1e-12f;

float dot(const std::vector<float> & a, const float * b) {
    float sum = 0.0f;
    ggml_vec_dot_f32((int) a.size(), &sum, 0, a.data(), 0, b, 0, 1);
    return sum;
}

float inverse(const std::vector<float> & row) { return 1.0f / std::max(std::sqrt(dot(row, row.data())), SHORTEST); }

}  // namespace

void kvedge_cpu_sum(const ggml_compute_params * params, ggml_tensor * dst) {
    const OwnRows       rows(dst);
    const int           parts = dst->op_params[OWN_KIND + 2], unit = dst->op_params[OWN_KIND + 3];
    const ggml_tensor * counts = dst->src[3];
    for (int head = params->ith; head < rows.heads; head += params->nth) {
        float * sum = (float *) dst->data + (int64_t) head * parts * rows.d(0);  // the first part gets all rows, the others 0
        std::fill_n(sum, (int64_t) parts * rows.d(0), 0.0f);
        for (int t = 0; t < rows.n; t++) {
            const auto row = rows.read(0, head, t);
            ggml_vec_mad_f32(rows.d(0), sum, row.data(), (counts ? ((const float *) counts->data)[t] : 1.0f) * (unit ? inverse(row) : 1.0f));
        }
    }
}

void kvedge_cpu_lengths(const ggml_compute_params * params, ggml_tensor * dst) {
    const OwnRows rows(dst);
    const int     parts = dst->op_params[OWN_KIND + 2], how = dst->op_params[OWN_KIND + 3], d = rows.d(0);
    const int64_t all = (int64_t) rows.n * rows.heads;
    float *       out = (float *) dst->data;
    const auto    next = [&](bool wanted, int64_t n) {
        float * at = wanted ? out : nullptr;
        out += wanted ? n : 0;
        return at;
    };
    float * const squares[2] = { next(how & KEY_SQUARES, all), next(how & VALUE_SQUARES, all) };
    float * const products = next(how & PRODUCTS, all), *sums = next(how & PRODUCTS, (int64_t) rows.heads * d);
    float * const energies = next(how & ENERGIES, (int64_t) 2 * rows.heads * parts);
    for (int head = params->ith; head < rows.heads; head += params->nth) {
        for (int p = 0; sums && p < parts; p++) {
            const float * from = (const float *) dst->src[3]->data + ((int64_t) head * parts + p) * d;
            for (int i = 0; i < d; i++) {
                sums[head * d + i] = (p > 0 ? sums[head * d + i] : 0.0f) + from[i];
            }
        }
        for (int of = 0; of < 2; of++) {
            float energy = 0.0f;
            for (int t = 0; t < rows.n; t++) {
                const auto  row    = rows.read(of, head, t);
                const float square = dot(row, row.data());
                energy += square;
                if (squares[of]) {
                    squares[of][(int64_t) head * rows.n + t] = square;
                }
                if (products && of == 0) {
                    products[(int64_t) head * rows.n + t] = dot(row, sums + head * d) * inverse(row);
                }
            }
            for (int p = 0; energies && p < parts; p++) {
                energies[((int64_t) of * rows.heads + head) * parts + p] = p == 0 ? energy : 0.0f;
            }
        }
    }
}
