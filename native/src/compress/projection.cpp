#include "compress/projection.h"

#include "kernels/kernels.h"
#include "plan/custom.h"
#include "system/error.h"
#include "system/threads.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvedge {

namespace {

constexpr int32_t TOKENS = 64;   // values per tile
constexpr int32_t MOST   = 4096;  // most layers and most heads of arrays
constexpr int32_t WIDEST = 1 << 20;  // largest width of the residual stream
constexpr int32_t WIDE   = 256;  // numbers of the residual stream per tile

size_t triangle(size_t n) { return n * (n + 1) / 2; }

// The part of W_O for one query head: [D] rows of d_v numbers.
struct HeadWeights {
    const float * data;
    size_t        ld;  // H * d_v
    int32_t       d, width;

    Rows rows(int32_t from) const { return { (const uint8_t *) (data + (size_t) from * ld), ld * sizeof(float), Type::f32 }; }
};

HeadWeights head_weights(const Bulk<float> & weights, const LayerShape & shape, int32_t head, int32_t width) {
    return { weights.data() + (size_t) head * (size_t) shape.d_v, (size_t) shape.n_heads * (size_t) shape.d_v, shape.d_v, width };
}

// Calls each(values [n][ld], n, t) for tiles of a head's pending values: rows [t, t + n).
template <class F> void each_values(const HeadView & view, int32_t d, std::vector<float> & values, const F & each) {
    const auto ld = (size_t) pad16(d);
    values.assign((size_t) TOKENS * ld, 0.0f);
    int32_t t = 0;
    for (const Segment & seg : view.pending) {
        for (int32_t r = 0; r < seg.n; r += TOKENS) {
            const int32_t n = std::min(TOKENS, seg.n - r);
            kernels().widen(seg.v.from(r), n, d, values.data(), ld);
            each(FloatIn{ values.data(), ld }, n, t);
            t += n;
        }
    }
}

// out [T] += sum over the D columns of |v W|. Packs each part of W only once and multiplies it with every tile of values.
void sum_lengths(const HeadView & view, const HeadWeights & weights, float * out) {
    const Kernels &    kn     = kernels();
    const auto         panels = (size_t) ((WIDE + kn.panel - 1) / kn.panel), lds = panels * (size_t) kn.panel;
    std::vector<float> packed(lds * (size_t) weights.d), products((size_t) TOKENS * lds), values;
    for (int32_t from = 0; from < weights.width; from += WIDE) {
        const int32_t n_wide = std::min(WIDE, weights.width - from);
        kn.pack(weights.rows(from), n_wide, weights.d, packed.data());
        each_values(view, weights.d, values, [&](FloatIn v, int32_t n, int32_t t) {
            kn.gemm_qk(v, n, packed.data(), n_wide, weights.d, { products.data(), lds });
            for (int32_t r = 0; r < n; r++) {
                const float * row   = products.data() + (size_t) r * lds;
                float         total = 0.0f;
                for (int32_t i = 0; i < n_wide; i++) {
                    total += std::fabs(row[i]);
                }
                out[t + r] += total;
            }
        });
    }
}

// Writes the lower triangle of the [d_v][d_v] matrix W W' to gram, row by row.
void gram_of(const HeadWeights & weights, float * gram) {
    const Kernels &     kn = kernels();
    const auto          d = (size_t) weights.d, ld = (size_t) pad16(weights.d);
    std::vector<float>  rows((size_t) WIDE * ld, 0.0f), columns(d * (size_t) WIDE), part(d * ld);
    std::vector<double> total(d * d, 0.0);
    for (int32_t from = 0; from < weights.width; from += WIDE) {
        const int32_t n = std::min(WIDE, weights.width - from);
        for (int32_t c = 0; c < n; c++) {
            const float * row = weights.data + (size_t) (from + c) * weights.ld;
            std::copy(row, row + d, rows.begin() + (std::ptrdiff_t) ((size_t) c * ld));
            for (size_t i = 0; i < d; i++) {
                columns[i * (size_t) WIDE + (size_t) c] = row[i];
            }
        }
        std::fill(part.begin(), part.end(), 0.0f);
        kn.gemm_pv({ columns.data(), (size_t) WIDE }, weights.d, n, { rows.data(), ld }, weights.d, part.data());
        for (size_t i = 0; i < d; i++) {
            for (size_t j = 0; j <= i; j++) {
                total[i * d + j] += (double) part[i * ld + j];
            }
        }
    }
    for (size_t i = 0; i < d; i++) {
        gram = std::transform(&total[i * d], &total[i * d] + i + 1, gram, [](double x) { return (float) x; });
    }
}

// Writes out [T] = sqrt(v G v') for the pending values v of a head. gram: the lower triangle of G.
void euclidean_lengths(const HeadView & view, const float * gram, int32_t size, float * out) {
    const Kernels &    kn = kernels();
    const auto         d = (size_t) size, ld = (size_t) pad16(size);
    std::vector<float> full(d * ld, 0.0f), products((size_t) TOKENS * ld), values;
    for (size_t i = 0; i < d; i++) {
        for (size_t j = 0; j <= i; j++) {
            full[i * ld + j] = full[j * ld + i] = gram[triangle(i) + j];
        }
    }
    each_values(view, size, values, [&](FloatIn v, int32_t n, int32_t t) {
        std::fill(products.begin(), products.end(), 0.0f);
        kn.gemm_pv(v, n, size, { full.data(), ld }, size, products.data());
        for (int32_t r = 0; r < n; r++) {
            out[t + r] = std::sqrt(std::max(0.0f, kn.dot(v.row(r), products.data() + (size_t) r * ld, d)));
        }
    });
}

// Returns T, the number of pending rows of the layer's first head (the same in all heads).
size_t pending_rows(const PendingView & view, size_t layer) {
    const HeadView head = view.head((int32_t) layer, 0);
    size_t         n    = 0;
    for (const Segment & seg : head.pending) {
        n += (size_t) seg.n;
    }
    return n;
}

}  // namespace

const Projections::Grams & Projections::grams(size_t layer, const LayerShape & shape, int32_t n_threads) {
    grams_.resize(std::max(grams_.size(), layer + 1));
    if (grams_[layer].empty()) {
        const size_t  each  = triangle((size_t) shape.d_v);
        const int32_t width = weights_->width(layer);
        Bulk<float>   read((size_t) width * (size_t) shape.n_heads * (size_t) shape.d_v);
        Grams         made((size_t) shape.n_heads * each);
        weights_->read(layer, n_threads, read.data());
        parallel_for(n_threads, shape.n_heads,
                     [&](int32_t h, int32_t) { gram_of(head_weights(read, shape, h, width), made.data() + (size_t) h * each); });
        grams_[layer] = std::move(made);
    }
    return grams_[layer];
}

Bulk<float> Projections::lengths(
    const PendingView & view, size_t layer, const LayerShape & shape, Critical norm, int32_t n_threads) {
    if (const auto why = weights_->unusable(layer, shape); !why.empty()) {
        throw StageFailure(why);
    }
    const int32_t      width = weights_->width(layer), group = shape.n_heads / shape.n_heads_kv;
    const size_t       T = pending_rows(view, layer), each = triangle((size_t) shape.d_v);
    Bulk<float>        lengths((size_t) shape.n_heads * T, 0.0f);
    if (norm == Critical::l2) {
        const Grams & of = grams(layer, shape, n_threads);
        parallel_for(n_threads, shape.n_heads, [&](int32_t h, int32_t) {
            euclidean_lengths(view.head((int32_t) layer, h / group), of.data() + (size_t) h * each, shape.d_v, lengths.data() + (size_t) h * T);
        });
    } else {
        Bulk<float> read((size_t) width * (size_t) shape.n_heads * (size_t) shape.d_v);
        weights_->read(layer, n_threads, read.data());
        parallel_for(n_threads, shape.n_heads, [&](int32_t h, int32_t) {
            sum_lengths(view.head((int32_t) layer, h / group), head_weights(read, shape, h, width), lengths.data() + (size_t) h * T);
        });
    }
    return lengths;
}

void Projections::weigh(
    const PendingView & view, size_t layer, const LayerShape & shape, Critical norm, int32_t n_threads, Bulk<float> & out) {
    const int32_t     group = shape.n_heads / shape.n_heads_kv;
    const Bulk<float> of    = lengths(view, layer, shape, norm, n_threads);
    const size_t      T     = out.size() / (size_t) shape.n_heads_kv;
    std::fill(out.begin(), out.end(), 0.0f);
    for (int32_t h = 0; h < shape.n_heads; h++) {
        for (size_t t = 0; t < T; t++) {
            out[(size_t) (h / group) * T + t] += of[(size_t) h * T + t] / (float) group;
        }
    }
}

uint64_t Projections::bytes() const {
    uint64_t out = 0;
    for (const Grams & g : grams_) {
        out += g.capacity() * sizeof(float);
    }
    return out;
}

kvedge_status check_projections(
    const kvedge_plan & plan, const std::vector<LayerShape> & shapes, const Projections * projections, kvedge_error * err) {
    if (const auto status = check_critical(plan, err); status != KVEDGE_OK || !plan_projects(plan)) {
        return status;
    }
    const bool        rule = plan.critical != Critical::none;
    const std::string who  = rule ? std::string("critical ") + name_of(plan.critical)
                                  : std::string("scorer.projected of scorer '") + plan.scorer->name + "'";
    if (!projections) {
        return fail(err, KVEDGE_E_ARGUMENT, "%s needs the output projection of the layers; call kvedge_plan_set_projection", who.c_str());
    }
    for (size_t l = 0; l < shapes.size(); l++) {
        if (const auto why = projections->weights().unusable(l, shapes[l]); !why.empty()) {
            return fail(err, KVEDGE_E_UNSUPPORTED, "%s needs the output projection of layer %d: %s; use %s", who.c_str(), shapes[l].il,
                        why.c_str(), rule ? "critical none" : "scorer.projected=false");
        }
    }
    return ok(err);
}

}  // namespace kvedge

using namespace kvedge;

extern "C" kvedge_status kvedge_plan_set_projection(
    kvedge_plan * plan, const float * values, int32_t n_layers, int32_t n_heads, int32_t d_v, int32_t width, kvedge_error * err) try {
    if (!plan) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_plan_set_projection: plan is NULL");
    }
    if (!values) {
        plan->projection.reset();
        return ok(err);
    }
    if (n_layers < 1 || n_heads < 1 || d_v < 1 || width < 1 || n_layers > MOST || n_heads > MOST || d_v > MAX_HEAD_SIZE || width > WIDEST) {
        return fail(err, KVEDGE_E_ARGUMENT, "kvedge_plan_set_projection: a dimension is out of range; use 1 to %d layers and heads, 1 to "
                    "%d numbers per head, and a width of 1 to %d", MOST, MAX_HEAD_SIZE, WIDEST);
    }
    const auto given = std::make_shared<GivenWeights>();
    given->n_layers  = n_layers;
    given->n_heads   = n_heads;
    given->d_v       = d_v;
    given->n_width   = width;
    const size_t across = (size_t) n_heads * (size_t) d_v, down = (size_t) width;
    given->values.resize((size_t) n_layers * across * down);
    for (size_t l = 0; l < (size_t) n_layers; l++) {
        for (size_t i = 0; i < across; i++) {
            for (size_t c = 0; c < down; c++) {
                const float x = *values++;
                if (!std::isfinite(x)) {
                    return fail(err, KVEDGE_E_ARGUMENT, "kvedge_plan_set_projection: a weight is NaN or infinite; pass finite weights");
                }
                given->values[(l * down + c) * across + i] = x;
            }
        }
    }
    plan->projection = given;
    return ok(err);
} catch (...) {
    return caught(err, "set the projection");
}
