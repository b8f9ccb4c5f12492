// Checks that biases and values fitted to queries are optimal, by the optimality conditions in double precision: with soft caps, rows
// with biases, more rows than a block, and a number of queries that is no multiple of a tile.

#include "check.h"
#include "primitives/fit.h"

#include <algorithm>
#include <random>
#include <vector>

using namespace kvedge;

namespace {

using Matrix = std::vector<std::vector<double>>;

struct Case {
    int32_t rows, kept, queries, d_k, d_v;
    float   softcap;
    bool    biased;
};

// A KV head with random rows and queries: z has the logits, outputs the attention over all rows, both in double precision.
struct Head {
    std::vector<float>   k, v, q, bias;
    std::vector<int32_t> kept;
    FitProblem           problem{};
    Matrix               z, outputs;
    std::vector<double>  top, mass;

    explicit Head(const Case & c) {
        std::mt19937                    random(7);
        std::normal_distribution<float> normal;
        const auto fill = [&](std::vector<float> & x, int32_t n, float scale) {
            x.resize((size_t) n);
            std::generate(x.begin(), x.end(), [&] { return scale * normal(random); });
        };
        fill(k, c.rows * c.d_k, 1.0f);
        fill(v, c.rows * c.d_v, 1.0f);
        fill(q, c.queries * c.d_k, 1.5f / std::sqrt((float) c.d_k));
        fill(bias, c.rows, 0.5f);
        constexpr int32_t FIRST = 3;  // token of row 0; `kept` has tokens
        for (int32_t j = 0; j < c.kept; j++) {
            kept.push_back(FIRST + j * c.rows / c.kept);
        }
        problem = { c.rows, FIRST, c.d_k, c.d_v, k.data(), v.data(), c.biased ? bias.data() : nullptr,
                    kept.data(), c.kept, q.data(), c.queries, c.softcap };
        attend(c);
    }

    void attend(const Case & c) {
        for (int32_t i = 0; i < c.queries; i++) {
            std::vector<double> row, out((size_t) c.d_v, 0.0);
            for (int32_t t = 0; t < c.rows; t++) {
                double x = 0.0;
                for (int32_t e = 0; e < c.d_k; e++) {
                    x += (double) q[(size_t) (i * c.d_k + e)] * (double) k[(size_t) (t * c.d_k + e)];
                }
                x = c.softcap != 0.0f ? (double) c.softcap * std::tanh(x / (double) c.softcap) : x;
                row.push_back(x + (c.biased ? (double) bias[(size_t) t] : 0.0));
            }
            top.push_back(*std::max_element(row.begin(), row.end()));
            double total = 0.0;
            for (int32_t t = 0; t < c.rows; t++) {
                const double w = std::exp(row[(size_t) t] - top.back());
                total += w;
                for (int32_t e = 0; e < c.d_v; e++) {
                    out[(size_t) e] += w * (double) v[(size_t) (t * c.d_v + e)];
                }
            }
            std::for_each(out.begin(), out.end(), [&](double & x) { x /= total; });
            mass.push_back(total);
            outputs.push_back(out);
            z.push_back(row);
        }
    }

    double value(size_t j, size_t e) const {
        return (double) v[(size_t) (kept[j] - problem.first) * (size_t) problem.d_v + e];
    }

    double logit(size_t i, size_t j) const { return z[i][(size_t) (kept[j] - problem.first)]; }
};

// Checks that no single weight can change within its bounds so that |M w - y| shrinks by much. The fit does few sweeps, so not exactly 0.
void check_weights(const Head & head, const std::vector<float> & logs, bool relative) {
    const size_t        n = head.z.size(), t = head.kept.size();
    std::vector<double> left(n), scale(n);
    for (size_t i = 0; i < n; i++) {
        scale[i] = relative ? 1.0 / head.mass[i] : 1.0;
        left[i]  = -scale[i] * head.mass[i];
        for (size_t j = 0; j < t; j++) {
            left[i] += scale[i] * std::exp(head.logit(i, j) - head.top[i] + (double) logs[j]);
        }
    }
    for (size_t j = 0; j < t; j++) {
        double slope = 0.0, size = 0.0;
        for (size_t i = 0; i < n; i++) {
            const double m = scale[i] * std::exp(head.logit(i, j) - head.top[i]);
            slope += m * left[i];
            size += m * scale[i] * head.mass[i];
        }
        const double low = logs[j] > -2.999f ? slope : 0.0, high = logs[j] < 2.999f ? slope : 0.0;
        CHECK(std::fabs((double) logs[j]) <= 3.001 && low <= 1e-2 * size && high >= -1e-2 * size);
    }
}

// Checks the condition of the fitted values C: X'(X C - Y) + penalty (C - V) = 0, with penalty = ridge * |X|^2.
void check_values(const Head & head, const std::vector<float> & logs, const std::vector<float> & values, double ridge) {
    const size_t n = head.z.size(), t = head.kept.size(), d = (size_t) head.problem.d_v;
    Matrix       x(n, std::vector<double>(t));
    std::vector<double> v(t, 1.0), u(n);
    for (size_t i = 0; i < n; i++) {
        double total = 0.0;
        for (size_t j = 0; j < t; j++) {
            total += x[i][j] = std::exp(head.logit(i, j) - head.top[i] + (double) logs[j]);
        }
        std::for_each(x[i].begin(), x[i].end(), [&](double & w) { w /= total; });
    }
    double norm = 0.0;
    for (int32_t turn = 0; turn < 300; turn++) {
        for (size_t i = 0; i < n; i++) {
            u[i] = 0.0;
            for (size_t j = 0; j < t; j++) {
                u[i] += x[i][j] * v[j];
            }
        }
        norm = 0.0;
        for (size_t j = 0; j < t; j++) {
            v[j] = 0.0;
            for (size_t i = 0; i < n; i++) {
                v[j] += x[i][j] * u[i];
            }
            norm += v[j] * v[j];
        }
        norm = std::sqrt(norm);
        std::for_each(v.begin(), v.end(), [&](double & w) { w /= norm; });
    }
    for (size_t e = 0; e < d; e++) {
        std::vector<double> left(n);
        for (size_t i = 0; i < n; i++) {
            left[i] = -head.outputs[i][e];
            for (size_t j = 0; j < t; j++) {
                left[i] += x[i][j] * (double) values[j * d + e];
            }
        }
        for (size_t j = 0; j < t; j++) {
            double slope = ridge * norm * ((double) values[j * d + e] - head.value(j, e)), size = std::fabs(slope);
            for (size_t i = 0; i < n; i++) {
                slope += x[i][j] * left[i];
                size += x[i][j] * std::fabs(head.outputs[i][e]);
            }
            CHECK(std::fabs(slope) <= 1e-3 * size + 1e-5);
        }
    }
}

void test_case(const Case & c) {
    const Head         head(c);
    std::vector<float> scratch(1 + Fit::floats({ c.rows, c.kept, c.d_k, c.d_v, c.queries, 1 }));
    for (int32_t way = 0; way < 4; way++) {
        std::vector<float> values((size_t) (c.kept * c.d_v)), logs((size_t) c.kept, 0.0f);
        Fit                fit(head.problem, scratch.data() + way % 2);  // aligned for floats, but for odd `way` not for doubles
        fit.attend();
        if (way < 2) {
            fit.weigh_rows(way == 1);
        } else if (way == 2) {
            fit.weigh_all();
        }
        CHECK(fit.solve(1e-3f, values.data()));
        fit.add_biases(logs.data());
        if (way < 2) {
            check_weights(head, logs, way == 1);
        }
        CHECK(way < 2 || std::all_of(logs.begin(), logs.end(), [&](float x) { return x == logs[0]; }));
        CHECK(way != 3 || logs[0] == 0.0f);
        check_values(head, logs, values, 1e-3);
    }
}

}  // namespace

int main() {
    for (const Case & c : { Case{ 40, 8, 64, 8, 8, 0.0f, false }, Case{ 40, 8, 64, 8, 8, 1.0f, true }, Case{ 90, 1, 33, 24, 40, 0.0f, true },
                            Case{ 200, 150, 301, 16, 24, 2.0f, false } }) {
        test_case(c);
    }
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
