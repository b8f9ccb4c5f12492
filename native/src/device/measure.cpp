// Measures pending rows for scorers on the rows' devices. One graph covers all layers of a device; it handles some KV heads of a layer
// at a time, so that its work memory stays small.

#include "device/measuring.h"
#include "system/threads.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace kvedge {

using T = ggml_tensor *;

namespace {

constexpr size_t NODES = 128;  // most graph nodes of a part, views and inputs included
constexpr size_t STEP  = 64;   // rows of uneven heads are padded to a multiple of STEP, so that masks of parts are aligned

// Factors that bring queries into the range of half precision: RING_FACTOR for the prompt graphs' queries, which may reach 2^18, and
// SENT_FACTOR for the host's queries, which are scaled for the logits already.
constexpr float RING_FACTOR = 0.25f, SENT_FACTOR = 4.0f;

std::vector<int32_t> tokens_of_kind(const MeasureJob & job) {
    std::vector<int32_t> out;
    for (int32_t t = 0; t < job.n_tokens; t++) {
        if (!job.wanted.by_kind || job.kind[t]) {
            out.push_back(t);
        }
    }
    return out;
}

void hide(ggml_fp16_t * row, int32_t first, int32_t end) { std::fill(row + first, row + end, ggml_fp32_to_fp16(-INFINITY)); }

// ---------------------------------------------------------------------------------------------------------
// Operations on some KV heads of a layer, whose rows are [d, T, heads] f32. Some devices round the inputs of matrix products to half
// precision, so the inputs here are exact in half precision. Products with a single column, and sums, are not rounded.

// The inputs of vote(): the queries of the window, and the keys that they see.
struct VoteInputs {
    Halves        queries;  // [d, G * W, heads]: the queries of a KV head's G query heads
    T             mask;     // [N, W] or [N, W, 1, heads] f16
    T             weights;  // [T, W] f32 weight of a query's vote for a token; NULL: equal weights
    T             sinks;    // [G * heads] f32 or NULL
    int64_t       n_window, group;  // W, G
    int64_t       n_tokens;         // T: votes are for the last T of N rows
    float         scale, softcap;   // scale: factor of the products with the queries; softcap 0: no cap
    bool          largest;          // take the largest over query heads, not their mean
};

// Returns the mean or the maximum (how) of each `count` consecutive rows of x [n, rows, ...].
T over_rows(ggml_context * c, T x, ggml_op_pool how, int64_t count) {
    return ggml_pool_2d(c, x, how, 1, (int) count, 1, (int) count, 0, 0);
}

// Returns the votes [T, 1, heads] for keys [d, N, heads]: the mean over queries, then the mean or the maximum over query heads.
T vote(ggml_context * c, T keys, const VoteInputs & in) {
    const int64_t N = keys->ne[1], heads = keys->ne[2], W = in.n_window, G = in.group;
    T             logits = ggml_add(c, product(c, keys, in.queries.high), product(c, keys, in.queries.low));
    float         scale  = in.scale;
    if (in.softcap != 0.0f) {
        logits = ggml_tanh(c, ggml_scale(c, logits, scale / in.softcap));
        scale  = in.softcap;
    }
    // ggml needs the query heads on dimension 2 for sinks, and the KV heads on dimension 3 for a mask of each KV head
    logits    = in.sinks ? ggml_reshape_3d(c, logits, N, W, G * heads) : ggml_reshape_4d(c, logits, N, W, G, heads);
    T weights = ggml_soft_max_ext(c, logits, in.mask, scale, 0.0f);
    if (in.sinks) {
        ggml_soft_max_add_sinks(weights, in.sinks);
    }
    const size_t row  = weights->nb[1], before = (size_t) (N - in.n_tokens) * sizeof(float);
    T            seen = ggml_view_3d(c, weights, in.n_tokens, W, G * heads, row, (size_t) W * row, before);
    if (in.weights) {
        seen = ggml_mul(c, seen, in.weights);
    } else if (before > 0) {
        seen = ggml_cont(c, seen);
    }
    seen = ggml_reshape_3d(c, seen, in.n_tokens, W * G, heads);
    T mean = over_rows(c, seen, GGML_OP_POOL_AVG, in.largest ? W : W * G);
    return in.largest && G > 1 ? over_rows(c, mean, GGML_OP_POOL_MAX, G) : mean;
}

// Splits x f32 times a factor into two parts that are exact in half precision.
Halves split(ggml_context * c, T x, float factor) {
    x      = ggml_scale(c, x, factor);
    T high = ggml_cast(c, ggml_cast(c, x, GGML_TYPE_F16), GGML_TYPE_F32);
    return { high, ggml_cast(c, ggml_cast(c, ggml_sub(c, x, high), GGML_TYPE_F16), GGML_TYPE_F32) };
}

// Returns the mean direction of keys [d, T, heads]. counts [T]: 1 or 0 f32; NULL: all keys count. unit: add up normalised keys.
Directions directions(ggml_context * c, T keys, T counts, bool unit) {
    constexpr float SHORTEST = 1e-12f;  // a key that is shorter has no direction
    const int64_t   n = keys->ne[1], d = keys->ne[0], heads = keys->ne[2];
    T               units   = ggml_l2_norm(c, keys, SHORTEST);
    T               columns = ggml_cont(c, ggml_transpose(c, unit ? units : keys));
    T sum = counts ? ggml_mul_mat(c, ggml_reshape_2d(c, columns, n, d * heads), counts) : ggml_sum_rows(c, columns);
    return { sum, product(c, units, ggml_reshape_3d(c, sum, d, 1, heads)) };
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// The graph of one device

GraphRows::Measuring::Measuring(const GraphRows & rows, const MeasureJob & job, const DeviceTotals & on, T ring, bool own)
    : rows(rows), slots(rows.slots_), job(job), on(on), own(own), ring(ring), of_kind(tokens_of_kind(job)),
      filter((int32_t) of_kind.size(), std::max(job.wanted.gamma, 0.0), own), transfer(on.device, on.worker) {
    plan_parts();
    builder = std::make_unique<GraphBuilder>(NODES * (parts.size() + 1));
    c       = builder->context.get();
    make_inputs();
    for (Part & part : parts) {
        make_part(part);
    }
}

// Returns the bytes of work memory for one KV head of N rows.
size_t GraphRows::Measuring::work_bytes(const LayerShape & s, size_t N) const {
    // number of f32 copies of the rows: original, transposed, filtered
    const double copies = asks_high() ? 3.0 : job.wanted.anchor != WantedMeasures::Anchor::none ? 2.5 : 2.0;
    const double n = job.n_tokens, d = std::max(s.d_k, s.d_v), G = s.n_heads / s.n_heads_kv;
    const double votes = asks_votes() ? (double) N * ((reads_half() ? 0.0 : s.d_k) + 3.0 * job.n_window * G) : 0.0;
    const bool   others = job.wanted.key_norms || job.wanted.value_norms || copies > 2.0;
    // kvedge's operations: the points of all boxes before and after the product with far_
    const double most = own ? (asks_high() ? 0.5 * n * d : 1.0) : others ? copies * n * d : 1.0;
    return (size_t) (std::max(votes, most) * sizeof(float));
}

// Divides the KV heads into parts. The work memory of a part is a small share of the rows; more parts would mean more operations.
void GraphRows::Measuring::plan_parts() {
    constexpr uint64_t LEAST = 16 << 20, MOST = 48 << 20, SHARE = 16;
    const size_t       bound = (size_t) std::clamp(rows.bytes() / SHARE, LEAST, MOST);
    for (const size_t l : on.layers) {
        const LayerShape & shape = (*slots.shapes)[l];
        for (const Group & group : slots.layers[l].groups) {
            size_t longest = 0;
            for (const int32_t head : group.heads) {
                longest = std::max(longest, even() ? (size_t) group.used[0] : slots.places_of(l, head).size());
            }
            const bool   alone  = !even() && !job.sinks.empty() && job.sinks[l];  // with sinks ggml cannot have a mask for each head
            const size_t heads  = group.heads.size();
            const size_t a_time = alone ? 1 : std::clamp(bound / work_bytes(shape, longest), (size_t) 1, heads);
            const size_t n      = (heads + (heads + a_time - 1) / a_time - 1) / ((heads + a_time - 1) / a_time);
            for (size_t first = 0; first < heads; first += n) {
                Part part{};
                part.layer = l;
                part.group = &group;
                part.first = first;
                part.rows  = even() ? (int32_t) longest : (int32_t) ((longest + STEP - 1) / STEP * STEP);
                part.heads.assign(group.heads.begin() + (std::ptrdiff_t) first,
                                  group.heads.begin() + (std::ptrdiff_t) std::min(first + n, heads));
                parts.push_back(std::move(part));
            }
        }
    }
}

// Makes the inputs that all layers share.
void GraphRows::Measuring::make_inputs() {
    const int32_t n = job.n_tokens, W = job.n_window;
    if (asks_votes()) {
        halves = split(c, from_ring() ? ring : sent_queries(), from_ring() ? RING_FACTOR : SENT_FACTOR);
    }
    if (job.wanted.votes == WantedMeasures::Votes::faded && W > 0) {
        weights = ggml_new_tensor_2d(c, GGML_TYPE_F32, n, W);
        transfer.send<float>(weights, [this, n, W](float * to, int32_t) {
            for (int32_t place = 0; place < W; place++, to += n) {
                const int32_t r = row_at(place), before = std::max(0, n - W + r);  // the query votes for tokens [0, before)
                std::fill_n(to, before, (float) ((double) W * std::exp(-job.wanted.fade * (double) (W - 1 - r))));
                std::fill(to + before, to + n, 0.0f);
            }
        });
    }
    if (job.wanted.by_kind && job.wanted.anchor != WantedMeasures::Anchor::none) {
        counts = ggml_new_tensor_1d(c, GGML_TYPE_F32, n);
        transfer.send<float>(counts, [this, n](float * to, int32_t) { std::copy_n(job.kind, n, to); });
    }
    if (asks_high()) {
        filter.prepare(c, transfer);
    }
}

// Sends the host's queries [W][H][d_k] of each layer, in the layout that the prompt's graphs leave on the device.
T GraphRows::Measuring::sent_queries() {
    T all = ggml_new_tensor_1d(c, GGML_TYPE_F32, (int64_t) on.query * job.n_window);
    transfer.send<float>(all, [this](float * to, int32_t i) {
        const size_t       l = on.layers[(size_t) i], W = (size_t) job.n_window;
        const LayerShape & s = (*slots.shapes)[l];
        const auto         d = (size_t) s.d_k, heads = (size_t) s.n_heads;
        to += slots.layers[l].query_at * W;
        for (size_t h = 0; h < heads; h++) {
            for (size_t w = 0; w < W; w++, to += d) {
                std::copy_n(job.queries[l].data() + (w * heads + h) * d, d, to);
            }
        }
    }, (int32_t) on.layers.size());
    return all;
}

// Returns the places of the last n_rows rows of each KV head of a part; a shorter head repeats its first row in front. filtered: the
// places of the rows in the filter's order instead.
T GraphRows::Measuring::places(const Part & part, int32_t n_rows, bool filtered) {
    const int32_t head = part.heads[0], n_heads = (int32_t) part.heads.size();
    const int32_t n    = filtered ? (int32_t) filter.order().size() : n_rows;
    const auto    known = std::find_if(lists.begin(), lists.end(), [&](const Places & x) {
        return even() && x.slots == part.group->slots && x.head == head && x.n_heads == n_heads && x.rows == n &&
               x.filtered == filtered;
    });
    if (known != lists.end()) {
        return known->list;
    }
    T list = ggml_new_tensor_1d(c, GGML_TYPE_I32, (int64_t) n * n_heads);
    transfer.send<int32_t>(list, [this, &part, n_rows, n, filtered](int32_t * to, int32_t) {
        for (const int32_t h : part.heads) {
            const auto    all   = slots.places_of(part.layer, h);
            const int32_t first = (int32_t) all.size() - (filtered ? job.n_tokens : n_rows);
            for (int32_t t = 0; t < n; t++) {
                *to++ = all[(size_t) std::max(0, first + (filtered ? of_kind[(size_t) filter.order()[(size_t) t]] : t))];
            }
        }
    });
    lists.push_back({ part.group->slots, head, n_heads, n, filtered, list });
    return list;
}

// Returns a copy [d, rows, heads] f32 of the rows in places().
T GraphRows::Measuring::gathered(const Part & part, bool keys, int32_t n_rows, bool filtered) {
    const auto heads = (int64_t) part.heads.size();
    T          from  = keys ? part.group->k : part.group->v;
    T          list  = places(part, n_rows, filtered);
    return ggml_reshape_3d(c, ggml_get_rows(c, flat(c, from), list), from->ne[0], list->ne[0] / heads, heads);
}

// Returns the last n_rows rows of the part's KV heads: [d, n_rows, heads] f32.
T GraphRows::Measuring::wide(const Part & part, bool keys, int32_t n_rows) {
    if (!even()) {
        return gathered(part, keys, n_rows, false);
    }
    T x = lying(part, keys, n_rows);
    return x->type == GGML_TYPE_F32 ? ggml_cont(c, x) : ggml_cast(c, x, GGML_TYPE_F32);
}

// Returns a view of the last n_rows rows of the part's KV heads in their storage type. Even heads only.
T GraphRows::Measuring::lying(const Part & part, bool keys, int32_t n_rows) const {
    T            from = keys ? part.group->k : part.group->v;
    const size_t at   = part.first * from->nb[2] + (size_t) (part.group->used[0] - n_rows) * from->nb[1];
    return ggml_view_3d(c, from, from->ne[0], n_rows, (int64_t) part.heads.size(), from->nb[1], from->nb[2], at);
}

// Returns the queries [d, G * W, heads] of the part's KV heads from x, one of `halves`.
T GraphRows::Measuring::queries_of(const Part & part, T x) {
    const LayerShape & s    = shape(part);
    const int64_t      W    = job.n_window, R = from_ring() ? rows.queries.window() : W, G = s.n_heads / s.n_heads_kv, d = s.d_k;
    const size_t       head = (size_t) (R * d) * sizeof(float), at = slots.layers[part.layer].query_at * (size_t) R * sizeof(float);
    const auto         of   = [&](int32_t first, int64_t n) {
        T some = ggml_view_4d(c, x, d, W, G, n, (size_t) d * sizeof(float), head, (size_t) G * head, at + (size_t) (first * G) * head);
        return ggml_reshape_3d(c, W == R ? some : ggml_cont(c, some), d, W * G, n);
    };
    if (part.heads.back() - part.heads.front() + 1 == (int32_t) part.heads.size()) {
        return of(part.heads[0], (int64_t) part.heads.size());
    }
    T out = nullptr;
    for (const int32_t h : part.heads) {
        out = out ? ggml_concat(c, out, of(h, 1), 2) : of(h, 1);
    }
    return out;
}

// Returns the mask of the window: query r of W sees the rows up to its own row, which is row N - W + r. All parts share one mask, as
// long as the longest part. Uneven heads add their biases, and -inf for the padding in front of shorter heads.
T GraphRows::Measuring::mask_of(const Part & part) {
    const int32_t N = part.rows, W = job.n_window;
    if (!mask) {
        int32_t most = 0;
        for (const Part & one : parts) {
            most = std::max(most, one.rows);
        }
        mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, most, W);
        transfer.send<ggml_fp16_t>(mask, [this, most, W](ggml_fp16_t * to, int32_t) {
            for (int32_t place = 0; place < W; place++, to += most) {
                std::fill_n(to, most, ggml_fp32_to_fp16(0.0f));
                hide(to, most - W + row_at(place) + 1, most);
            }
        });
    }
    if (even()) {
        return mask;
    }
    const auto heads = (int64_t) part.heads.size();
    T          own   = ggml_new_tensor_4d(c, GGML_TYPE_F16, N, 1, 1, heads);
    transfer.send<ggml_fp16_t>(own, [this, &part, N](ggml_fp16_t * to, int32_t i) {
        const auto biases = part.group->biases_of(part.first + (size_t) i);
        to += (size_t) i * (size_t) N;
        hide(to, 0, N - (int32_t) biases.size());
        ggml_fp32_to_fp16_row(biases.data(), to + N - biases.size(), (int64_t) biases.size());
    }, (int32_t) heads);
    T seen = ggml_view_2d(c, mask, N, W, mask->nb[1], (size_t) (mask->ne[0] - N) * sizeof(ggml_fp16_t));
    return ggml_add(c, ggml_repeat_4d(c, own, N, W, 1, heads), seen);
}

T GraphRows::Measuring::result(T x) {
    transfer.fetch(x);
    ggml_set_output(x);
    builder->add(x);
    return x;
}

void GraphRows::Measuring::make_votes(Part & part, T keys) {
    const LayerShape &  s      = shape(part);
    const int32_t       W      = job.n_window, G = s.n_heads / s.n_heads_kv;
    const auto          heads  = (int64_t) part.heads.size();
    const float         factor = from_ring() ? RING_FACTOR / rows.scales_[part.layer] : SENT_FACTOR;
    const float * const sink   = job.sinks.empty() ? nullptr : job.sinks[part.layer];
    const Halves        q      = { queries_of(part, halves.high), queries_of(part, halves.low) };
    T                   sinks  = sink ? ggml_new_tensor_1d(c, GGML_TYPE_F32, G * heads) : nullptr;
    if (sinks) {
        transfer.send<float>(sinks, [&part, sink, G](float * to, int32_t) {
            for (const int32_t head : part.heads) {
                to = std::copy_n(sink + head * G, G, to);
            }
        });
    }
    const bool       largest = job.wanted.votes == WantedMeasures::Votes::largest;
    const VoteInputs in      = { q, mask_of(part), weights, sinks, W, G, job.n_tokens, 1.0f / factor, s.softcap, largest };
    part.votes               = result(vote(c, keys, in));
}

void GraphRows::Measuring::make_part(Part & part) {
    const WantedMeasures & wanted = job.wanted;
    const int32_t n     = job.n_tokens;
    const auto    all   = [&]() { return reads_half() ? lying(part, true, part.rows) : wide(part, true, part.rows); };
    T             keys  = asks_votes() ? all() : nullptr;
    if (keys) {
        make_votes(part, keys);
    }
    if (own) {
        make_own(part);
        return;
    }
    const auto pending = [&]() { return keys = keys && keys->ne[1] == n ? keys : wide(part, true, n); };
    if (wanted.anchor != WantedMeasures::Anchor::none) {
        const Directions found = directions(c, pending(), counts, wanted.anchor == WantedMeasures::Anchor::unit);
        part.directions        = { result(found.sum), result(found.products) };
    }
    for (size_t i = 0; i < 2; i++) {
        const bool of_keys = i == 0, norms = of_keys ? wanted.key_norms : wanted.value_norms, total = asks_high() && !wanted.by_kind;
        if (!norms && !asks_high()) {
            continue;
        }
        T sums = norms || total ? squares(c, of_keys ? pending() : wide(part, false, n)) : nullptr;
        if (norms) {
            part.squares[i] = result(sums);
        }
        if (total) {
            part.energy[i] = result(ggml_sum_rows(c, ggml_reshape_1d(c, sums, ggml_nelements(sums))));
        }
        part.deviation[i] = asks_high() ? filter.deviation(c, gathered(part, of_keys, n, true)) : nullptr;
        if (part.deviation[i] && (total || wanted.variation)) {
            result(part.deviation[i]);
        }
    }
    if (asks_high() && wanted.by_kind && !wanted.variation) {  // only the sum of keys and values is needed
        part.deviation[0] = result(ggml_add(c, part.deviation[0], part.deviation[1]));
        part.deviation[1] = nullptr;
    }
}

// ---------------------------------------------------------------------------------------------------------
// Results

void GraphRows::Measuring::read_part(const Part & part, Measures & out, Energy & energy) const {
    const auto n     = (size_t) job.n_tokens;
    const auto heads = part.heads.size();
    const auto & s   = shape(part);
    const auto d     = (size_t) s.d_k;
    const auto each  = [&](T x, auto & to, double factor) {
        for (size_t i = 0; x && i < heads; i++) {
            const float * from = transfer.values(x) + i * n;
            const auto    at   = to.begin() + (std::ptrdiff_t) ((size_t) part.heads[i] * n);
            std::transform(from, from + n, at, [factor](float v) { return v * factor; });
        }
    };
    const double share = 1.0 / (double) std::max(of_kind.size(), (size_t) 1);
    each(part.votes, out.votes, 1.0);
    if (own) {
        read_own(part, out, energy);
        return;
    }
    each(part.squares[0], out.key_squares, 1.0);
    each(part.squares[1], out.value_squares, 1.0);
    each(part.directions.products, out.cosines, share);
    for (size_t i = 0; part.directions.sum && i < heads; i++) {
        const float * sum    = transfer.values(part.directions.sum) + i * d;
        double        square = 0.0;
        for (size_t k = 0; k < d; k++) {
            square += (double) sum[k] * share * (double) sum[k] * share;
        }
        out.anchor_squares[(size_t) part.heads[i]] = square;
    }
    const double       width[2] = { (double) s.d_k, (double) s.d_v };
    std::vector<float> sums(of_kind.size()), own(of_kind.size());
    for (size_t of = 0; of < 2; of++) {
        energy.all[of] += part.energy[of] ? (double) *transfer.values(part.energy[of]) : 0.0;
    }
    for (size_t i = 0; part.deviation[0] && i < heads; i++) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (size_t of = 0; of < 2 && part.deviation[of]; of++) {
            std::fill(own.begin(), own.end(), 0.0f);
            energy.high[of] += filter.add(transfer.values(part.deviation[of]) + i * filter.order().size(), own.data()) * width[of];
            std::transform(own.begin(), own.end(), sums.begin(), sums.begin(), std::plus<float>());
        }
        if (job.wanted.variation) {  // own now holds the values' deviations
            out.variation[(size_t) part.heads[i]] = mean_root(own);
        }
        for (size_t t = 0; t < sums.size(); t++) {
            out.deviation[(size_t) part.heads[i] * n + (size_t) of_kind[t]] = sums[t];
        }
    }
}

void GraphRows::Measuring::read_layer(size_t l, Measures & out) const {
    const int32_t n = job.n_tokens, W = job.n_window;
    const auto    heads = (size_t) (*slots.shapes)[l].n_heads_kv;
    const auto    sized = [&](bool wanted) { return Bulk<float>(wanted ? heads * (size_t) n : 0, 0.0f); };
    const bool    anchored = job.wanted.anchor != WantedMeasures::Anchor::none;
    out = { sized(job.wanted.votes != WantedMeasures::Votes::none), sized(job.wanted.key_norms),
            sized(job.wanted.value_norms),                          Bulk<double>(anchored ? heads * (size_t) n : 0),
            std::vector<double>(anchored ? heads : 0, 0.0),         sized(job.wanted.gamma >= 0.0), 0.0,
            std::vector<double>(job.wanted.variation ? heads : 0, 0.0) };
    Energy energy;
    for (const Part & part : parts) {
        if (part.layer == l) {
            read_part(part, out, energy);
        }
    }
    for (size_t of = 0; of < 2; of++) {
        out.high += energy.all[of] > 0.0 ? energy.high[of] / energy.all[of] : 0.0;
    }
    if (job.wanted.votes == WantedMeasures::Votes::faded) {
        double later = 0.0;  // total weight of the queries after token t
        for (int32_t t = n - 1, r = W - 1; r >= 0 && t >= 0; t--, r--) {
            later += std::exp(-job.wanted.fade * (double) (W - 1 - r));
        }
        const auto whole = (float) std::max(later, 1.0);
        for (size_t h = 0; h < heads; h++) {
            float * votes = out.votes.data() + h * (size_t) n;
            std::transform(votes, votes + std::max(0, n - W), votes, [whole](float v) { return v / whole; });
            later = 0.0;
            for (int32_t t = n - 1, r = W - 1; r >= 0 && t >= 0; t--, r--) {
                votes[t] /= (float) std::max(later, 1.0);
                later += std::exp(-job.wanted.fade * (double) (W - 1 - r));
            }
        }
    }
}

// Returns what devices cannot measure in this job, for a message; NULL: nothing.
static const char * unmeasured(const Slots & slots, const MeasureJob & job) {
    if (job.n_window > job.n_tokens) {
        return "with a window that is longer than the prompt";
    }
    if (slots.form.storage.quantised()) {
        return "of quantised rows";
    }
    return nullptr;
}

DeviceRows::Outcome GraphRows::measure_on(size_t device, const MeasureJob & job, std::vector<Measures> & out) {
    DeviceTotals & on = slots_.devices[device];
    const auto built  = [&](bool own) { return std::make_unique<Measuring>(*this, job, on, queries.queries(device), own); };
    const bool half   = slots_.form.storage.k != Type::f32 && slots_.form.storage.v == slots_.form.storage.k && !job.wanted.variation;
    auto       kept   = built(own && half && has_own(on.device));
    if (kept->own && lacking(on.device, kept->builder->graph)) {
        kept = built(false);
    }
    Measuring &   graph  = *kept;
    ggml_cgraph * cgraph = graph.builder->graph;
    const auto    end    = [&](Outcome outcome, const char * why, const char * which = "") {
        on.worker->give_back_memory();
        return fail(outcome, on.device, why, which);
    };
    if (const char * operation = lacking(on.device, cgraph)) {
        return end(Outcome::lacking, "cannot compute operation ", operation);
    }
    on.worker->give_back_memory();  // frees the work memory of earlier graphs
    if (!graph.transfer.allocate() || !on.worker->make_room(on.device, cgraph, slots_.n_threads)) {
        return end(Outcome::full, "has no memory to compute scores");
    }
    graph.transfer.upload(slots_.n_threads);
    if (!on.worker->compute(cgraph)) {
        return end(Outcome::failed, "failed to compute scores");
    }
    graph.transfer.download(slots_.n_threads);
    work.operations += operations_of(cgraph);
    work.to_device += graph.transfer.sent_bytes();
    work.to_host += graph.transfer.fetched_bytes();
    parallel_for(slots_.n_threads, (int32_t) on.layers.size(), [&](int32_t i, int32_t) {
        graph.read_layer(on.layers[(size_t) i], out[on.layers[(size_t) i]]);
    });
    on.worker->give_back_memory();
    problem_.clear();
    return Outcome::done;
}

DeviceRows::Outcome GraphRows::measure(const MeasureJob & job, std::vector<Measures> & out) {
    const int64_t start = ggml_time_us();
    const char *  what  = unmeasured(slots_, job);
    out.resize(slots_.layers.size());
    for (size_t i = 0; i < slots_.devices.size() && job.wanted.any() && job.n_tokens > 0; i++) {
        const Outcome outcome = what ? fail(Outcome::lacking, slots_.devices[i].device, "cannot compute scores ", what)
                                     : measure_on(i, job, out);
        if (outcome != Outcome::done) {
            return outcome;
        }
    }
    work.measure_us += ggml_time_us() - start;
    return Outcome::done;
}

}  // namespace kvedge
