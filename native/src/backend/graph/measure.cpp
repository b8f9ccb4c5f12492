// What scorers want to know of pending rows, measured where they lie: one graph for all layers of a device, some heads of a
// layer at a time, so that its work memory stays small.

#include "backend/graph/highpass.h"
#include "backend/graph/looks.h"
#include "backend/graph/rows.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

namespace kvedge {

using T = ggml_tensor *;

namespace {

constexpr size_t NODES = 80;  // of a part, views and inputs included

bool runs(const ggml_tensor * node) {
    return node->op != GGML_OP_NONE && node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE && node->op != GGML_OP_PERMUTE &&
           node->op != GGML_OP_TRANSPOSE;
}

void hide(ggml_fp16_t * row, int32_t first, int32_t end) { std::fill(row + first, row + end, ggml_fp32_to_fp16(-INFINITY)); }

}  // namespace

// The graph of one device.
struct GraphRows::Measuring {
    // Heads of a group that are measured together, and what is measured of them.
    struct Part {
        size_t               layer;
        const Group *        group;
        size_t               first;  // of group->heads
        std::vector<int32_t> heads;
        int32_t              rows;  // N: of the longest
        T                    votes = nullptr;
        Directions           directions{};
        T squares[2] = {}, deviation[2] = {}, energy[2] = {};  // of keys, of values
    };
    // Lists of places that layers share.
    struct Places {
        int64_t slots;
        int32_t head, n_heads, rows;
        bool    by_kind;
        T       list;
    };

    Measuring(const GraphRows & rows, const MeasureJob & job, const std::vector<size_t> & layers);

    bool  asks_votes() const { return job.looks.votes != Looks::Votes::none && job.n_window > 0; }
    bool  asks_high() const { return job.looks.gamma >= 0.0 && n_kind > 0 && !filter.all_pass(); }
    void  plan_parts();
    void  make_inputs();
    void  make_part(Part & part);
    void  make_votes(Part & part, T keys);
    T     mask_of(const Part & part);
    T     places(const Part & part, int32_t rows, bool by_kind);
    T     wide(const Part & part, bool keys, int32_t rows, bool by_kind = false);
    T     result(T x);
    void  read(std::vector<Measures> & out) const;
    void  read_part(const Part & part, Measures & out) const;
    bool  even() const { return rows.even_; }
    const LayerShape & shape(const Part & part) const { return (*rows.shapes_)[part.layer]; }

    const GraphRows &           rows;
    const MeasureJob &          job;
    const std::vector<size_t> & layers;
    int32_t                     n_kind;  // tokens that anchor and deviation are of
    GraphHighPass               filter;
    Parcel                      parcel;
    std::vector<Part>           parts;
    std::vector<Places>         lists;
    std::vector<float>          scales;  // [layer] of the queries that are sent
    GgmlContext                 context;
    ggml_context *              c     = nullptr;
    ggml_cgraph *               graph = nullptr;
    std::vector<T>              queries, sinks;  // [layer]
    T mask = nullptr, weights = nullptr, counts = nullptr;
};

GraphRows::Measuring::Measuring(const GraphRows & rows, const MeasureJob & job, const std::vector<size_t> & layers)
    : rows(rows), job(job), layers(layers),
      n_kind(job.looks.by_kind ? (int32_t) std::count(job.kind, job.kind + job.n_tokens, (uint8_t) 1) : job.n_tokens),
      filter(n_kind, std::max(job.looks.gamma, 0.0)), parcel(rows.layers_[layers[0]].device) {
    plan_parts();
    const size_t nodes = NODES * (parts.size() + 1);
    context            = make_context(nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes, false));
    c                  = context.get();
    graph              = ggml_new_graph_custom(c, nodes, false);
    make_inputs();
    for (Part & part : parts) {
        make_part(part);
    }
}

// So many heads at a time that what exists of them takes a bounded share of what their rows do.
void GraphRows::Measuring::plan_parts() {
    constexpr size_t LEAST = 32 << 20, SHARE = 64;
    const size_t     bound = std::max(LEAST, (size_t) rows.bytes() / SHARE);
    for (const size_t l : layers) {
        const LayerShape & shape = (*rows.shapes_)[l];
        for (const Group & group : rows.layers_[l].groups) {
            size_t longest = 0;
            for (const int32_t head : group.heads) {
                longest = std::max(longest, even() ? (size_t) group.used[0] : rows.places_of(l, head).size());
            }
            const auto   d     = (size_t) std::max(shape.d_k, shape.d_v), G = (size_t) (shape.n_heads / shape.n_heads_kv);
            const size_t votes = asks_votes() ? longest * ((size_t) shape.d_k + 3 * (size_t) job.n_window * G) * sizeof(float) : 0;
            const size_t each  = std::max(votes, GraphHighPass::work_bytes(job.n_tokens, (int64_t) d));
            const bool   alone = !even() && !job.sinks.empty() && job.sinks[l];  // sinks leave no dimension for masks of heads
            const size_t n     = alone ? 1 : std::clamp(bound / each, (size_t) 1, group.heads.size());
            for (size_t first = 0; first < group.heads.size(); first += n) {
                Part part{};
                part.layer = l;
                part.group = &group;
                part.first = first;
                part.rows  = (int32_t) longest;
                part.heads.assign(group.heads.begin() + (std::ptrdiff_t) first,
                                  group.heads.begin() + (std::ptrdiff_t) std::min(first + n, group.heads.size()));
                parts.push_back(std::move(part));
            }
        }
    }
}

// What layers share, and the queries of each.
void GraphRows::Measuring::make_inputs() {
    const int32_t n = job.n_tokens, W = job.n_window;
    queries.resize(rows.layers_.size());
    sinks.resize(rows.layers_.size());
    scales.resize(rows.layers_.size());
    for (size_t i = 0; i < layers.size() && asks_votes(); i++) {
        const size_t       l     = layers[i];
        const LayerShape & shape = (*rows.shapes_)[l];
        queries[l] = ggml_new_tensor_3d(c, GGML_TYPE_F16, shape.d_k, (int64_t) 2 * W * (shape.n_heads / shape.n_heads_kv), shape.n_heads_kv);
        parcel.send<ggml_fp16_t>(queries[l], [&](ggml_fp16_t * to) {
            scales[l] = split_queries(job.queries[l].data(), W, shape.n_heads, shape.n_heads_kv, shape.d_k, to);
        });
        if (!job.sinks.empty() && job.sinks[l]) {
            sinks[l] = ggml_new_tensor_1d(c, GGML_TYPE_F32, shape.n_heads);
            parcel.send<float>(sinks[l], [&](float * to) { std::copy_n(job.sinks[l], shape.n_heads, to); });
        }
    }
    if (job.looks.votes == Looks::Votes::faded && W > 0) {
        weights = ggml_new_tensor_2d(c, GGML_TYPE_F32, n, W);
        parcel.send<float>(weights, [&](float * to) {
            for (int32_t r = 0; r < W; r++, to += n) {
                std::fill_n(to, std::max(0, n - W + r), (float) ((double) W * std::exp(-job.looks.fade * (double) (W - 1 - r))));
            }
        });
    }
    if (job.looks.by_kind && job.looks.anchor != Looks::Anchor::none) {
        counts = ggml_new_tensor_2d(c, GGML_TYPE_F32, 1, n);
        parcel.send<float>(counts, [&](float * to) { std::copy_n(job.kind, n, to); });
    }
    if (asks_high()) {
        filter.prepare(c, parcel);
    }
}

// Places of the last `rows` rows of each head of a part, those of a head with fewer behind its first row, which stands for the
// missing ones; or of the tokens of the kind.
T GraphRows::Measuring::places(const Part & part, int32_t n_rows, bool by_kind) {
    const int32_t head = part.heads[0], n_heads = (int32_t) part.heads.size(), n = by_kind ? n_kind : n_rows;
    const auto    known = std::find_if(lists.begin(), lists.end(), [&](const Places & x) {
        return even() && x.slots == part.group->slots && x.head == head && x.n_heads == n_heads && x.rows == n && x.by_kind == by_kind;
    });
    if (known != lists.end()) {
        return known->list;
    }
    T list = ggml_new_tensor_1d(c, GGML_TYPE_I32, (int64_t) n * n_heads);
    parcel.send<int32_t>(list, [&](int32_t * to) {
        for (const int32_t h : part.heads) {
            const auto all = rows.places_of(part.layer, h);
            for (int32_t t = 0; t < n_rows; t++) {
                if (!by_kind || job.kind[t]) {
                    *to++ = all[(size_t) std::max(0, (int32_t) all.size() - n_rows + t)];
                }
            }
        }
    });
    lists.push_back({ part.group->slots, head, n_heads, n, by_kind, list });
    return list;
}

// The last `rows` rows of the part's heads, or those of the kind: [d, n, heads] f32.
T GraphRows::Measuring::wide(const Part & part, bool keys, int32_t n_rows, bool by_kind) {
    T          from  = keys ? part.group->k : part.group->v;
    const auto heads = (int64_t) part.heads.size();
    if (even() && !by_kind) {
        const size_t at = part.first * from->nb[2] + (size_t) (part.group->used[0] - n_rows) * from->nb[1];
        T            x  = ggml_view_3d(c, from, from->ne[0], n_rows, heads, from->nb[1], from->nb[2], at);
        return from->type == GGML_TYPE_F32 ? ggml_cont(c, x) : ggml_cast(c, x, GGML_TYPE_F32);
    }
    T flat = ggml_view_2d(c, from, from->ne[0], from->ne[1] * from->ne[2], from->nb[1], 0);
    T list = places(part, n_rows, by_kind);
    return ggml_reshape_3d(c, ggml_get_rows(c, flat, list), from->ne[0], by_kind ? n_kind : n_rows, heads);
}

// Query r of W sees the rows up to its own; where heads are uneven, none of those that stand for missing ones.
T GraphRows::Measuring::mask_of(const Part & part) {
    const int32_t N = part.rows, W = job.n_window;
    if (even() && mask) {
        return mask;
    }
    T out = ggml_new_tensor_4d(c, GGML_TYPE_F16, N, W, 1, even() ? 1 : (int64_t) part.heads.size());
    parcel.send<ggml_fp16_t>(out, [&](ggml_fp16_t * to) {
        for (int64_t i = 0; i < out->ne[3]; i++) {
            const int32_t missing = even() ? 0 : N - (int32_t) rows.places_of(part.layer, part.heads[(size_t) i]).size();
            for (int32_t r = 0; r < W; r++, to += N) {
                std::fill_n(to, N, ggml_fp32_to_fp16(0.0f));
                hide(to, 0, missing);
                hide(to, N - W + r + 1, N);
            }
        }
    });
    mask = even() ? out : nullptr;
    return out;
}

T GraphRows::Measuring::result(T x) {
    parcel.fetch(x);
    ggml_set_output(x);
    ggml_build_forward_expand(graph, x);
    return x;
}

void GraphRows::Measuring::make_votes(Part & part, T keys) {
    const LayerShape & s     = shape(part);
    const int64_t      G     = s.n_heads / s.n_heads_kv, heads = (int64_t) part.heads.size();
    T                  q     = queries[part.layer];
    // a group's heads may be any of the layer's, but those of a part follow each other where all lie together
    const bool         apart = part.heads.back() - part.heads.front() != (int32_t) heads - 1;
    T                  own   = nullptr;
    for (int64_t i = 0; i < heads; i += apart ? 1 : heads) {
        T some = ggml_view_3d(c, q, q->ne[0], q->ne[1], apart ? 1 : heads, q->nb[1], q->nb[2], (size_t) part.heads[(size_t) i] * q->nb[2]);
        own    = own ? ggml_concat(c, own, some, 2) : some;
    }
    T sink = sinks[part.layer];
    sink   = sink ? ggml_view_1d(c, sink, G * heads, (size_t) (part.heads[0] * G) * sizeof(float)) : nullptr;
    part.votes = result(vote(c, keys, { own, mask_of(part), weights, sink, job.n_window, G, job.n_tokens, scales[part.layer], s.softcap,
                                        job.looks.votes == Looks::Votes::largest }));
}

void GraphRows::Measuring::make_part(Part & part) {
    const Looks & looks = job.looks;
    const int32_t n     = job.n_tokens;
    T             keys  = asks_votes() ? wide(part, true, part.rows) : nullptr;
    if (keys) {
        make_votes(part, keys);
    }
    const auto pending = [&]() { return keys = keys && keys->ne[1] == n ? keys : wide(part, true, n); };
    if (looks.anchor != Looks::Anchor::none) {
        const Directions found = directions(c, pending(), counts, looks.anchor == Looks::Anchor::unit);
        part.directions        = { result(found.sum), result(found.products) };
    }
    const bool some = looks.by_kind && n_kind < n;
    for (size_t i = 0; i < 2; i++) {
        const bool of_keys = i == 0, norms = of_keys ? looks.key_norms : looks.value_norms, total = asks_high() && !looks.by_kind;
        if (!norms && !asks_high()) {
            continue;
        }
        T rows = !norms && some ? nullptr : of_keys ? pending() : wide(part, false, n);
        T sums = norms || total ? squares(c, rows) : nullptr;
        if (norms) {
            part.squares[i] = result(sums);
        }
        if (total) {
            part.energy[i] = result(ggml_sum_rows(c, ggml_reshape_1d(c, sums, ggml_nelements(sums))));
        }
        if (asks_high()) {
            part.deviation[i] = result(filter.deviation(c, some ? wide(part, of_keys, n, true) : rows));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// What comes back

void GraphRows::Measuring::read_part(const Part & part, Measures & out) const {
    const auto n     = (size_t) job.n_tokens;
    const auto heads = part.heads.size();
    const auto d     = (size_t) shape(part).d_k;
    const auto each  = [&](T x, auto & to, double factor) {
        for (size_t i = 0; x && i < heads; i++) {
            const float * from = parcel.values(x) + i * n;
            const auto    at   = to.begin() + (std::ptrdiff_t) ((size_t) part.heads[i] * n);
            std::transform(from, from + n, at, [factor](float v) { return v * factor; });
        }
    };
    const double share = 1.0 / std::max(n_kind, 1);
    each(part.votes, out.votes, 1.0);
    each(part.squares[0], out.key_squares, 1.0);
    each(part.squares[1], out.value_squares, 1.0);
    each(part.directions.products, out.cosines, share);
    for (size_t i = 0; part.directions.sum && i < heads; i++) {
        const float * sum    = parcel.values(part.directions.sum) + i * d;
        double        square = 0.0;
        for (size_t k = 0; k < d; k++) {
            square += (double) sum[k] * share * (double) sum[k] * share;
        }
        out.anchor_squares[(size_t) part.heads[i]] = square;
    }
    for (const T deviation : part.deviation) {
        for (size_t i = 0; deviation && i < heads; i++) {
            const float * from = parcel.values(deviation) + i * (size_t) n_kind;
            float *       at   = out.deviation.data() + (size_t) part.heads[i] * n;
            for (size_t t = 0; t < n; t++) {
                at[t] += !job.looks.by_kind || job.kind[t] ? *from++ : 0.0f;
            }
        }
    }
}

void GraphRows::Measuring::read(std::vector<Measures> & out) const {
    const int32_t n = job.n_tokens, W = job.n_window;
    for (const size_t l : layers) {
        const auto heads = (size_t) (*rows.shapes_)[l].n_heads_kv, all = heads * (size_t) n;
        const auto sized = [&](bool wanted) { return Bulk<float>(wanted ? all : 0, 0.0f); };
        const bool anchored = job.looks.anchor != Looks::Anchor::none;
        out[l] = { sized(job.looks.votes != Looks::Votes::none), sized(job.looks.key_norms), sized(job.looks.value_norms), Bulk<double>(anchored ? all : 0),
                   std::vector<double>(anchored ? heads : 0, 0.0), sized(job.looks.gamma >= 0.0), 0.0 };
    }
    for (const Part & part : parts) {
        read_part(part, out[part.layer]);
    }
    for (const size_t l : layers) {
        double all[2] = {}, high[2] = {};
        for (const Part & part : parts) {
            for (int i = 0; part.layer == l && part.energy[i] && i < 2; i++) {
                const size_t  count = part.heads.size() * (size_t) n_kind;
                const float * from  = parcel.values(part.deviation[i]);
                all[i] += (double) *parcel.values(part.energy[i]);
                high[i] += std::accumulate(from, from + count, 0.0) * (double) (i == 0 ? shape(part).d_k : shape(part).d_v);
            }
        }
        for (int i = 0; i < 2; i++) {
            out[l].high += all[i] > 0.0 ? high[i] / all[i] : 0.0;
        }
        if (job.looks.votes != Looks::Votes::faded) {
            continue;
        }
        const auto heads = (size_t) (*rows.shapes_)[l].n_heads_kv;
        double     later = 0.0;  // weight of the queries behind t
        for (int32_t t = n - 1, r = W - 1; t >= 0; t--) {
            for (size_t h = 0; h < heads; h++) {
                out[l].votes[h * (size_t) n + (size_t) t] /= (float) std::max(later, 1.0);
            }
            later += r >= 0 ? std::exp(-job.looks.fade * (double) (W - 1 - r)) : 0.0;
            r--;
        }
    }
}

// What no device measures; empty: there is no such thing.
std::string GraphRows::unmeasured(const MeasureJob & job) const {
    const auto kind = job.looks.by_kind ? std::count(job.kind, job.kind + job.n_tokens, (uint8_t) 1) : job.n_tokens;
    if (form_.storage.quantised()) {
        return "scores of quantised rows";
    }
    if (job.looks.gamma >= 0.0 && !GraphHighPass::takes((int32_t) kind, job.looks.gamma)) {
        return "a high pass of " + std::to_string(kind) + " tokens";
    }
    for (const Layer & layer : layers_) {
        for (const Group & group : layer.groups) {
            if (std::any_of(group.biases.begin(), group.biases.end(), [](const auto & x) { return !x.empty(); })) {
                return "scores of rows with biases";
            }
        }
    }
    return "";
}

AwayRows::Outcome GraphRows::measure_on(Inputs & inputs, const std::vector<size_t> & layers, const MeasureJob & job, std::vector<Measures> & out) {
    Measuring  graph(*this, job, layers);
    const auto device = inputs.device;
    const auto end    = [&](Outcome outcome, const std::string & why) {
        inputs.worker.give_back();
        problem_ = outcome == Outcome::done ? "" : std::string("device ") + ggml_backend_dev_name(device) + " " + why;
        return outcome;
    };
    if (const char * operation = lacking(device, graph.graph)) {
        return end(Outcome::lacking, std::string("lacks ") + operation);
    }
    inputs.worker.give_back();
    if (!graph.parcel.allocate() || !inputs.worker.make_room(device, graph.graph, n_threads_)) {
        return end(Outcome::full, "has no memory to measure rows");
    }
    graph.parcel.upload();
    if (!inputs.worker.compute(graph.graph)) {
        return end(Outcome::failed, "failed to measure rows");
    }
    graph.parcel.download();
    for (int i = 0; i < ggml_graph_n_nodes(graph.graph); i++) {
        work.operations += runs(ggml_graph_node(graph.graph, i)) ? 1 : 0;
    }
    work.to_device += graph.parcel.sent_bytes();
    work.to_host += graph.parcel.fetched_bytes();
    graph.read(out);
    return end(Outcome::done, "");
}

AwayRows::Outcome GraphRows::measure(const MeasureJob & job, std::vector<Measures> & out) {
    const int64_t     start = ggml_time_us();
    const std::string what  = unmeasured(job);
    out.resize(layers_.size());
    for (size_t i = 0; i < inputs_.size(); i++) {
        std::vector<size_t> layers;
        for (size_t l = 0; l < layers_.size(); l++) {
            if (layers_[l].device && layers_[l].inputs == i) {
                layers.push_back(l);
            }
        }
        if (layers.empty() || !job.looks.any()) {
            continue;
        }
        if (!what.empty()) {
            problem_ = std::string("device ") + ggml_backend_dev_name(inputs_[i].device) + " does without " + what;
            return Outcome::lacking;
        }
        const Outcome outcome = measure_on(inputs_[i], layers, job, out);
        if (outcome != Outcome::done) {
            return outcome;
        }
    }
    work.measure_us += ggml_time_us() - start;
    return Outcome::done;
}

}  // namespace kvedge
