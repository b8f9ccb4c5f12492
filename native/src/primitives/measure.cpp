#include "primitives/measure.h"

#include "kernels/kernels.h"
#include "primitives/dct.h"
#include "primitives/window.h"

#include <algorithm>
#include <cmath>
#include <memory>

namespace kvedge {

namespace {

// Calls visit(row [d], t) for a head's pending keys or values, in float32.
template <class F> void each_row(const HeadView & view, bool values, size_t d, const F & visit) {
    std::vector<float> row(d);
    int32_t            t = 0;
    for (const Segment & seg : view.pending) {
        const Rows & rows = values ? seg.v : seg.k;
        for (int32_t r = 0; r < seg.n; r++, t++) {
            kernels().widen(rows.from(r), 1, (int32_t) d, row.data(), d);
            visit(row.data(), t);
        }
    }
}

// Writes the squared length of each row to out [T].
void squares(const HeadView & view, bool values, int32_t d, float * out) {
    each_row(view, values, (size_t) d, [&](const float * row, int32_t t) { out[t] = kernels().dot(row, row, (size_t) d); });
}

// Writes out [T]; returns the squared length of the mean direction. counts [T]: 1 for the tokens in the mean; NULL: all.
double cosines(
    const HeadView & view, const LayerShape & shape, int32_t n_tokens, WantedMeasures::Anchor anchor, const uint8_t * counts, double * out) {
    constexpr int32_t   CHUNK = 64;  // directions that are summed in float32 before the sum goes on in double
    const Kernels &     kn = kernels();
    const auto          d = (size_t) shape.d_k;
    const auto          n = (double) (counts ? std::count(counts, counts + n_tokens, (uint8_t) 1) : n_tokens);
    std::vector<float>  inverse((size_t) n_tokens), part(d, 0.0f);
    std::vector<double> center(d, 0.0);
    each_row(view, false, d, [&](const float * row, int32_t t) {
        const double norm   = std::sqrt((double) kn.dot(row, row, d));
        inverse[(size_t) t] = norm > 0.0 ? (float) (1.0 / norm) : 0.0f;
        if (!counts || counts[t]) {
            kn.axpy(anchor == WantedMeasures::Anchor::unit ? inverse[(size_t) t] : 1.0f, row, part.data(), d);
        }
        if (t % CHUNK == CHUNK - 1 || t + 1 == n_tokens) {
            for (size_t i = 0; i < d; i++) {
                center[i] += (double) part[i] / n;
                part[i] = 0.0f;
            }
        }
    });
    const std::vector<float> mean_direction(center.begin(), center.end());
    each_row(view, false, d, [&](const float * row, int32_t t) {
        out[t] = (double) inverse[(size_t) t] * (double) kn.dot(row, mean_direction.data(), d);
    });
    double square = 0.0;
    for (double c : center) {
        square += c * c;
    }
    return square;
}

// How far the tokens of a kind are from a smooth curve through them. Heads with equally many of these tokens share the filter.
class Deviation {
  public:
    explicit Deviation(double gamma) : gamma_(gamma) {}

    // Writes out [T], 0 for other tokens; returns how the values vary.
    double operator()(const HeadView & view, const LayerShape & shape, const std::vector<uint8_t> & kind, float * out) {
        const auto n = (size_t) std::count(kind.begin(), kind.end(), (uint8_t) 1);
        if (!filter_ || n != n_) {
            filter_ = std::make_unique<HighPass>((int32_t) n, gamma_);
            n_      = n;
        }
        std::vector<float> some(n, 0.0f);
        const double variation = filter_->add_deviation(view, shape, kind.data(), some.data(), work_);
        for (size_t t = 0, i = 0; t < kind.size(); t++) {
            out[t] = kind[t] ? some[i++] : 0.0f;
        }
        return variation;
    }

  private:
    double                    gamma_;
    std::unique_ptr<HighPass> filter_;
    size_t                    n_ = 0;
    HighPass::Work            work_;
};

void vote(const ScoreInput & in, const WantedMeasures & wanted, const HeadView & view, int32_t head, float * out) {
    if (wanted.votes == WantedMeasures::Votes::faded) {
        faded_votes(in, view, head, wanted.fade, out);
    } else {
        window_attention(in, view, head, wanted.votes == WantedMeasures::Votes::mean ? GroupReduction::mean : GroupReduction::max, out);
    }
}

}  // namespace

std::vector<uint8_t> kind_of(const uint8_t * image, int32_t n_tokens) {
    const bool           images = std::any_of(image, image + n_tokens, [](uint8_t one) { return one != 0; });
    std::vector<uint8_t> kind((size_t) n_tokens);
    std::transform(image, image + n_tokens, kind.begin(), [images](uint8_t one) { return !images || one != 0; });
    return kind;
}

Measures measure_rows(const ScoreInput & in, const WantedMeasures & wanted) {
    const auto   T = (size_t) in.n_tokens, n = (size_t) in.shape.n_heads_kv;
    const size_t all = n * T;
    const bool   anchored = wanted.anchor != WantedMeasures::Anchor::none, deviates = wanted.gamma >= 0.0;
    Measures     out;
    Deviation    deviation(wanted.gamma);
    out.votes.resize(wanted.votes != WantedMeasures::Votes::none ? all : 0);
    out.key_squares.resize(wanted.key_norms ? all : 0);
    out.value_squares.resize(wanted.value_norms ? all : 0);
    out.cosines.resize(anchored ? all : 0);
    out.anchor_squares.resize(anchored ? n : 0);
    out.deviation.assign(deviates ? all : 0, 0.0f);
    for (size_t h = 0; h < n; h++) {
        const HeadView             view = in.view->head(in.layer, (int32_t) h);
        const size_t               at   = h * T;
        const uint8_t *            image = in.heads ? in.heads + at : in.image;
        const std::vector<uint8_t> kind  = wanted.by_kind ? kind_of(image, in.n_tokens) : std::vector<uint8_t>();
        if (wanted.votes != WantedMeasures::Votes::none) {
            vote(in, wanted, view, (int32_t) h, out.votes.data() + at);
        }
        if (wanted.key_norms) {
            squares(view, false, in.shape.d_k, out.key_squares.data() + at);
        }
        if (wanted.value_norms) {
            squares(view, true, in.shape.d_v, out.value_squares.data() + at);
        }
        if (anchored) {
            out.anchor_squares[h] =
                cosines(view, in.shape, in.n_tokens, wanted.anchor, wanted.by_kind ? kind.data() : nullptr, out.cosines.data() + at);
        }
        if (deviates && wanted.by_kind) {
            out.variation.push_back(deviation(view, in.shape, kind, out.deviation.data() + at));
        }
    }
    if (deviates && !wanted.by_kind) {
        out.high = HighPass(in.n_tokens, wanted.gamma).measure(*in.view, in.layer, in.shape, out.deviation.data());
    }
    return out;
}

}  // namespace kvedge
