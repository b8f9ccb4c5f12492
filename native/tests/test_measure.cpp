// Compares measurements of rows on a device with measurements of the same rows on the host.
//
//   test_measure [DEVICE [N]]    DEVICE: a name or HOST:PORT; default: the CPU, through ggml graphs. N: every Nth case, with every Nth set of measures

#include "device/graph_rows.h"
#include "kernels/kernels.h"
#include "store/store.h"
#include "check.h"
#include "sequence/sequence.h"
#include "plan/stages.h"
#include "device.h"
#include "ggml-backend.h"
#include "primitives/dct.h"
#include "primitives/window.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>
#include <vector>

using namespace kvedge;

namespace {

struct Case {
    int32_t H, Hkv, d_k, d_v, n_old, T, W;
    Type    type;
    bool    uneven = false;  // KV heads have different numbers of old rows
    bool    sinks  = false;
    float   softcap = 0.0f;
    bool    ggml    = false;  // use ggml operations only
};

constexpr int32_t LAYERS = 2;
constexpr double  GAMMA  = 0.2;

std::mt19937 rng(3);

std::vector<float> normal(size_t n) {
    std::normal_distribution<float> one;
    std::vector<float>              x(n);
    std::generate(x.begin(), x.end(), [&] { return one(rng); });
    return x;
}

// Writes rows with a large mean, a slow drift, and a few outliers.
void write_rows(Sequence & seq, int32_t n, bool keys) {
    const auto & shapes = seq.rows.shapes();
    for (int32_t l = 0; l < LAYERS; l++) {
        const LayerShape & s = shapes[(size_t) l];
        const int32_t      d = keys ? s.d_k : s.d_v;
        for (int32_t h = 0; h < s.n_heads_kv; h++) {
            const auto mean = normal((size_t) d), drift = normal((size_t) d);
            for (int32_t t = 0; t < n; t++) {
                auto        row  = normal((size_t) d);
                const float far  = rng() % 100 == 0 ? 6.0f : 1.0f;
                const float slow = std::sin(7.0f * (float) t / (float) n);
                for (size_t i = 0; i < row.size(); i++) {
                    row[i] = 2.0f * mean[i] + slow * drift[i] + far * row[i];
                }
                const auto at = seq.rows.place_from_end(t, n);
                kernels().from_f32(seq.rows.storage().k, row.data(), keys ? k_row(at, l, h) : v_row(at, l, h), row.size());
            }
        }
    }
}

void append(Sequence & seq, int32_t n) {
    std::vector<int32_t> pos((size_t) n);
    for (int32_t i = 0; i < n; i++) {
        pos[(size_t) i] = seq.rows.n_tokens() + i;
    }
    CHECK(seq.rows.append(n, pos.data(), false));
    write_rows(seq, n, true);
    write_rows(seq, n, false);
}

class View : public PendingView {
  public:
    explicit View(const Sequence & seq) : seq_(seq) {}
    HeadView               head(int32_t layer, int32_t head) const override { return seq_.rows.view(layer, head); }
    std::vector<QuerySpan> queries(int32_t) const override { return {}; }

  private:
    const Sequence & seq_;
};

// Returns the pending keys or values of a KV head, [T][d].
std::vector<std::vector<float>> pending(const HeadView & view, bool keys, int32_t d) {
    std::vector<std::vector<float>> out;
    for (const Segment & seg : view.pending) {
        for (int32_t r = 0; r < seg.n; r++) {
            out.emplace_back((size_t) d);
            kernels().widen((keys ? seg.k : seg.v).from(r), 1, d, out.back().data(), (size_t) d);
        }
    }
    return out;
}

double dot(const std::vector<double> & a, const std::vector<float> & b) {
    double sum = 0.0;
    for (size_t i = 0; i < a.size(); i++) {
        sum += a[i] * (double) b[i];
    }
    return sum;
}

double length(const std::vector<float> & x) { return std::sqrt(dot({ x.begin(), x.end() }, x)); }

// Returns the host's measurements of one layer.
Measures expected(const Sequence & seq, const MeasureJob & job, int32_t layer) {
    const View         view(seq);
    const LayerShape & s = seq.rows.shapes()[(size_t) layer];
    const auto         T = (size_t) job.n_tokens, all = (size_t) s.n_heads_kv * T;
    ScoreInput         in{};
    in.view     = &view;
    in.shape    = s;
    in.layer    = layer;
    in.n_tokens = job.n_tokens;
    in.window_q = job.queries.empty() ? nullptr : job.queries[(size_t) layer].data();
    in.n_window = job.n_window;
    in.sinks    = job.sinks.empty() ? nullptr : job.sinks[(size_t) layer];
    Measures out;
    for (auto * x : { &out.votes, &out.key_squares, &out.value_squares, &out.deviation }) {
        x->assign(all, 0.0f);
    }
    out.cosines.assign(all, 0.0);
    const std::vector<uint8_t> kind(job.wanted.by_kind ? job.kind : nullptr, job.wanted.by_kind ? job.kind + T : nullptr);
    const auto                 counts = [&](size_t t) { return kind.empty() || kind[t] != 0; };
    const auto                 n = (double) (kind.empty() ? (std::ptrdiff_t) T : std::count(kind.begin(), kind.end(), 1));
    for (int32_t h = 0; h < s.n_heads_kv; h++) {
        const HeadView head  = view.head(layer, h);
        const size_t   at    = (size_t) h * T;
        if (job.wanted.votes == WantedMeasures::Votes::faded) {
            faded_votes(in, head, h, job.wanted.fade, out.votes.data() + at);
        } else if (job.wanted.votes != WantedMeasures::Votes::none) {
            const auto how = job.wanted.votes == WantedMeasures::Votes::largest ? GroupReduction::max : GroupReduction::mean;
            window_attention(in, head, h, how, out.votes.data() + at);
        }
        const auto          k = pending(head, true, s.d_k), v = pending(head, false, s.d_v);
        std::vector<double> mean((size_t) s.d_k);
        for (size_t t = 0; t < T; t++) {
            out.key_squares[at + t]   = (float) (length(k[t]) * length(k[t]));
            out.value_squares[at + t] = (float) (length(v[t]) * length(v[t]));
            const double by = job.wanted.anchor == WantedMeasures::Anchor::unit ? length(k[t]) : 1.0;
            for (size_t i = 0; i < mean.size() && counts(t); i++) {
                mean[i] += (double) k[t][i] / n / by;
            }
        }
        for (size_t t = 0; t < T; t++) {
            out.cosines[at + t] = (dot(mean, k[t]) / length(k[t]));
        }
        out.anchor_squares.push_back(dot(mean, { mean.begin(), mean.end() }));
    }
    if (job.wanted.gamma >= 0.0 && n > 0) {
        const HighPass filter((int32_t) n, job.wanted.gamma);
        if (kind.empty()) {
            out.high = filter.measure(view, layer, s, out.deviation.data());
        }
        HighPass::Work work;
        for (int32_t h = 0; h < s.n_heads_kv && !kind.empty(); h++) {
            std::vector<float> some((size_t) n, 0.0f);
            out.variation.push_back(filter.add_deviation(view.head(layer, h), s, kind.data(), some.data(), work));
            for (size_t t = 0, i = 0; t < T; t++) {
                out.deviation[(size_t) h * T + t] = kind[t] ? some[i++] : 0.0f;
            }
        }
    }
    return out;
}

template <class X> void same(const char * what, const X & found, const X & wanted, double tolerance) {
    double most = 0.0, worst = 0.0;
    CHECK(found.size() == wanted.size());
    for (size_t i = 0; i < found.size(); i++) {
        const double far = std::fabs((double) found[i] - (double) wanted[i]);
        most  = std::max(most, std::fabs((double) wanted[i]));
        worst = std::isfinite(far) ? std::max(worst, far) : INFINITY;
    }
    if (!(worst <= tolerance * most)) {
        std::fprintf(stderr, "%s: error %g of the largest\n", what, worst / most);
        failures()++;
    }
}

void check_looks(const Case & c, Sequence & seq, const MeasureJob & job, ggml_backend_dev_t device) {
    std::vector<Measures> wanted;
    for (int32_t l = 0; l < LAYERS; l++) {
        wanted.push_back(expected(seq, job, l));
    }
    uint64_t                         stamps = 0;
    std::vector<ggml_backend_dev_t>  devices((size_t) LAYERS, device);
    GraphRows                        rows(seq.rows.shapes(), devices, { seq.rows.storage(), c.uneven }, stamps);
    CHECK(rows.load(seq.rows, 2) && rows.even() != c.uneven && rows.reserve({ 1, 1, 0, {}, 0, 1 }, 2));
    rows.own = !c.ggml;
    std::vector<Measures> found;
    const auto            outcome = rows.measure(job, found);
    CHECK(outcome == DeviceRows::Outcome::done);
    if (outcome != DeviceRows::Outcome::done) {
        std::fprintf(stderr, "%s\n", rows.problem().text());
        CHECK(rows.fetch(seq.rows, 2));
        return;
    }
    // GPUs multiply f32 with less precision; kvedge's operations multiply in half precision
    const bool   gpu  = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_GPU, half = c.type != Type::f32 && !c.ggml;
    const double most = gpu || (half && job.wanted.gamma > 0.5) ? 1e-3 : half ? 3e-4 : 1e-5;  // error of the high pass
    for (size_t l = 0; l < (size_t) LAYERS; l++) {
        const Measures & a = found[l], & b = wanted[l];
        const bool       far = job.wanted.gamma >= 0.0, anchored = job.wanted.anchor != WantedMeasures::Anchor::none;
        same("votes", a.votes, job.wanted.votes == WantedMeasures::Votes::none ? Bulk<float>() : b.votes, gpu ? 4e-4 : 2e-6);
        same("norms of keys", a.key_squares, job.wanted.key_norms ? b.key_squares : Bulk<float>(), 1e-6);
        same("norms of values", a.value_squares, job.wanted.value_norms ? b.value_squares : Bulk<float>(), 1e-6);
        same("cosines", a.cosines, anchored ? b.cosines : Bulk<double>(), 2e-6);
        same("deviation", a.deviation, far ? b.deviation : Bulk<float>(), 2.0 * most);
        CHECK(close_to(a.high, b.high, most) && (a.high > 0.0) == (far && job.wanted.gamma < 1.0 && c.T > 1 && !job.wanted.by_kind));
        same("variation", a.variation, job.wanted.variation ? b.variation : std::vector<double>(), most);
        CHECK(a.anchor_squares.size() == (anchored ? b.anchor_squares.size() : 0));
        for (size_t h = 0; h < a.anchor_squares.size(); h++) {
            CHECK(std::fabs(a.anchor_squares[h] / b.anchor_squares[h] - 1.0) < 1e-5);
        }
    }
    CHECK(rows.fetch(seq.rows, 2));
}

// first, every: which of the wanted measures to try.
void check_case(const Case & c, ggml_backend_dev_t device, size_t first, size_t every) {
    std::vector<LayerShape> shapes;
    for (int32_t l = 0; l < LAYERS; l++) {
        shapes.push_back({ l, c.H, c.Hkv, c.d_k, c.d_v, c.softcap });
    }
    Sequence seq(shapes, Storage{ c.type, c.type });
    if (c.n_old > 0) {
        append(seq, c.n_old);
        seq.close_pending();
        for (int32_t l = 0; l < LAYERS && c.uneven; l++) {
            for (int32_t h = 0; h < c.Hkv; h++) {
                for (int32_t i = 0; i < c.n_old * (h % 2) / 2 + 3 * h + l; i++) {
                    drop_row(seq.rows, l, h, i / 2);
                }
            }
        }
    }
    for (Block & block : seq.rows.mutable_contents().blocks) {
        for (BlockLayer & layer : block.layers) {
            for (size_t h = 1; h < layer.heads.size(); h++) {  // gives rows biases, as merges do
                layer.heads[h].biases.resize(layer.heads[h].tokens.size());
                for (float & bias : layer.heads[h].biases) {
                    bias = (float) (rng() % 4) / 2.0f;
                }
            }
        }
    }
    append(seq, c.T);
    std::vector<float>   sinks = normal((size_t) c.H);
    std::vector<uint8_t> kind((size_t) c.T);
    for (int32_t t = 0; t < c.T; t++) {
        kind[(size_t) t] = t % 7 != 2 && (t < c.T - 5 || c.T == 1);
    }
    MeasureJob job{};
    job.n_tokens = c.T;
    job.kind     = kind.data();
    job.n_window = c.W;
    for (int32_t l = 0; l < LAYERS; l++) {
        auto q = normal((size_t) (c.W * c.H * c.d_k));
        for (float & x : q) {
            x *= 0.5f / std::sqrt((float) c.d_k);
        }
        job.queries.emplace_back(q.begin(), q.end());
        job.sinks.push_back(c.sinks ? sinks.data() : nullptr);
    }
    using V = WantedMeasures::Votes;
    using A = WantedMeasures::Anchor;
    const WantedMeasures wanted[] = {
        { V::mean, 0.0, false, false, A::none, -1.0, false },   { V::largest, 0.0, true, false, A::mean, -1.0, false },
        { V::faded, 0.15, false, true, A::unit, GAMMA, true }, { V::none, 0.0, false, true, A::unit, GAMMA, false },
        { V::mean, 0.0, true, true, A::none, 1.0, false },      { V::faded, 0.0, false, false, A::mean, 0.0, true },
        { V::none, 0.0, true, false, A::none, 0.7, false },     { V::none, 0.0, false, true, A::unit, GAMMA, true, true },
    };
    for (size_t i = first; i < std::size(wanted); i += every) {
        job.wanted = wanted[i];
        check_looks(c, seq, job, device);
    }
}

}  // namespace

int main(int argc, char ** argv) {
    const auto   device = device_named(argc > 1 ? argv[1] : "CPU");
    const size_t every  = argc > 2 ? (size_t) std::max(1, std::atoi(argv[2])) : 1;
    if (!device) {
        return 1;
    }
    const Case cases[] = {
        { 1, 1, 64, 64, 0, 1, 1, Type::f16 },           { 4, 2, 80, 96, 7, 263, 32, Type::bf16 },
        { 2, 1, 256, 256, 30, 401, 8, Type::f16, true }, { 2, 2, 64, 64, 0, 600, 8, Type::f16, false, false, 0.0f, true },
        { 4, 4, 64, 64, 0, 37, 8, Type::f32 },         { 8, 2, 64, 32, 0, 700, 24, Type::f16 },
        { 8, 2, 32, 64, 50, 131, 16, Type::f32, true }, { 4, 4, 64, 64, 900, 257, 32, Type::f16, true, true },
        { 8, 4, 64, 64, 900, 77, 32, Type::f16, true },
        { 6, 2, 64, 64, 45, 200, 40, Type::f16, false, true, 20.0f }, { 2, 2, 128, 128, 0, 1500, 32, Type::f16 },
        { 4, 2, 64, 64, 10, 120, 8, Type::bf16 },       { 8, 8, 64, 64, 0, 5003, 8, Type::f16 },  // in two parts
    };
    for (size_t i = 0; i < std::size(cases); i += every) {
        check_case(cases[i], device, i / every % every, every);
    }
    return failures() == 0 ? 0 : 1;
}
