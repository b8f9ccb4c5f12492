// Selects the pending rows to keep: computes scores and budgets, then chooses rows.

#include "plan/custom.h"
#include "compress/job.h"
#include "compress/projection.h"
#include "compress/select.h"
#include "system/threads.h"
#include "primitives/measure.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace kvedge {

namespace {

// Returns 1 for each image token. tokens: indices of the pending tokens.
std::vector<uint8_t> pending_image(const Sequence & seq, const std::vector<int32_t> & tokens) {
    std::vector<uint8_t> image;
    image.reserve(tokens.size());
    for (int32_t t : tokens) {
        image.push_back(seq.rows.contents().image[(size_t) t]);
    }
    return image;
}

// The pending tokens of a sequence, as stages see them.
class SequenceView : public PendingView {
  public:
    explicit SequenceView(const Sequence & seq) : seq_(seq) {}
    HeadView               head(int32_t layer, int32_t head) const override { return seq_.rows.view(layer, head); }
    std::vector<QuerySpan> queries(int32_t layer) const override { return seq_.observed.queries.of((size_t) layer); }

  private:
    const Sequence & seq_;
};

using ScoreFunction = void (*)(const ScoreInput & in, float * out);

// The tokens of a layer's pending rows, and 1 for each image token: [T], or [Hkv * T] if `differs` (the heads hold different tokens).
struct LayerTokens {
    const uint8_t * image;
    const int32_t * tokens;
    bool            differs;
    int32_t         n_threads;  // threads for work within the layer
};

LayerTokens layer_tokens_of(const Job & job, size_t l) {
    return { job.pending.image_of(l, 0), job.pending.tokens_of(l, 0), !job.pending.head_image.empty(), job.n_threads };
}

Projections & projections_of(const Sequence & seq) {
    if (!seq.projections) {
        throw StageFailure("the plan needs the output projections of the layers, but they are not set; call kvedge_plan_set_projection");
    }
    return *seq.projections;
}

// Returns [Hkv * T] the pending tokens of all heads of a layer.
std::vector<int32_t> tokens_of_heads(const Sequence & seq, size_t l) {
    std::vector<int32_t> out;
    for (int32_t h = 0; h < seq.rows.shapes()[l].n_heads_kv; h++) {
        const auto tokens = pending_tokens(seq.rows, (int32_t) l, h);
        out.insert(out.end(), tokens.begin(), tokens.end());
    }
    return out;
}

const float * sinks_of(const Sequence & seq, size_t l) {
    const auto & sinks = seq.observed.layer(l).window.sinks;
    return sinks.empty() ? nullptr : sinks.data();
}

// Returns the measures that the scorer and the allocator need. image [n]; n_tokens: pending tokens of every head.
WantedMeasures wanted_measures_of(const kvedge_plan & plan, const uint8_t * image, size_t n, int32_t n_tokens) {
    const bool images = std::any_of(image, image + n, [](uint8_t one) { return one != 0; });
    WantedMeasures out;
    if (plan.scorer->wanted_measures) {
        out = plan.scorer->wanted_measures(plan.params[KVEDGE_STAGE_SCORER], images);
    }
    const auto by_variation = plan.allocator->by_variation;
    const bool asked        = by_variation && by_variation(plan.params[KVEDGE_STAGE_ALLOCATOR], n_tokens, kvedge_plan_budget(&plan, n_tokens));
    out.variation = asked && !plan.profiles[KVEDGE_STAGE_ALLOCATOR] && out.by_kind && out.gamma >= 0.0;
    return out;
}

// Returns the scores [Hkv * T] of a layer by `score`. known: the measures of the layer; if empty, they are measured and stored there.
Bulk<float> run_scorer(
    const Sequence & seq, const kvedge_plan & plan, LayerTokens tokens, size_t l, ScoreFunction score, Measures & known,
    Spectrum * spectrum) {
    const int32_t      n_tokens = seq.rows.pending_length();
    const SequenceView view(seq);
    ScoreInput         in{};
    in.view     = &view;
    in.shape    = seq.rows.shapes()[l];
    in.layer    = (int32_t) l;
    in.n_layers = (int32_t) seq.rows.shapes().size();
    in.n_tokens = n_tokens;
    in.params   = plan.params[KVEDGE_STAGE_SCORER];
    in.image    = tokens.image;
    in.heads    = tokens.differs ? tokens.image : nullptr;
    in.tokens   = tokens.tokens;
    in.self     = plan.scorer;
    in.profile  = plan.profiles[KVEDGE_STAGE_SCORER].get();
    in.spectrum = spectrum;
    const Observed & seen = seq.observed;
    in.observed           = &seen;
    Bulk<float> window;
    if (seen.have().window > 0) {
        const int32_t asked = plan_observes(plan).window;  // fewer than gathered if the plan was set later
        in.n_window = asked > 0 ? std::min(asked, window_length(seq)) : window_length(seq);
        window      = known.empty() ? seen.layer(l).window.last(seq.rows.n_tokens(), in.n_window) : Bulk<float>();
        in.window_q = window.data();
        in.sinks    = sinks_of(seq, l);
    }
    if (seen.have().moments >= 0) {
        in.next_position = std::max(seq.rows.contents().pos.back() + 1, seen.layer(l).moments.next_position());
    }
    Bulk<float> lengths;
    if (plan_observes(plan).apart) {
        lengths    = projections_of(seq).lengths(view, l, in.shape, Critical::l2, tokens.n_threads);
        in.lengths = lengths.data();
    }
    if (plan.scorer->wanted_measures && known.empty()) {
        const size_t n = (size_t) n_tokens * (tokens.differs ? (size_t) in.shape.n_heads_kv : 1);
        known          = measure_rows(in, wanted_measures_of(plan, tokens.image, n, n_tokens));
    }
    in.measures = &known;
    Bulk<float> scores((size_t) seq.rows.shapes()[l].n_heads_kv * (size_t) n_tokens);
    score(in, scores.data());
    return scores;
}

bool by_attention(const kvedge_plan & plan) {
    return plan.allocator->by_attention && plan.allocator->by_attention(plan.params[KVEDGE_STAGE_ALLOCATOR]);
}

// Returns the places of the kept queries of pending tokens. tokens: indices of all pending tokens, ascending.
std::vector<QueryPlace> kept_queries(const Sequence & seq, const std::vector<int32_t> & tokens) {
    const auto              spans = seq.observed.queries.of(0);  // all layers keep the queries of the same tokens
    std::vector<QueryPlace> out;
    size_t                  i = 0;
    for (int32_t token : tokens) {
        while (i < spans.size() && token >= spans[i].first + spans[i].n) {
            i++;
        }
        if (i < spans.size() && token >= spans[i].first) {
            out.push_back({ i, token - spans[i].first });
        }
    }
    return out;
}

// Returns the attention part of the scores, of one layer or all (ALL_LAYERS). Empty if the allocator does not need it or the
// scorer has no Scorer::attention.
Scores attention_scores(Job & job, int32_t layer) {
    const ScoreFunction score = by_attention(job.plan) ? job.plan.scorer->attention : nullptr;
    Scores              out(score ? job.seq.rows.shapes().size() : 0);
    const auto          one = [&](size_t l) {
        out[l] = run_scorer(job.seq, job.plan, layer_tokens_of(job, l), l, score, job.measures[l], nullptr);
    };
    if (layer != ALL_LAYERS && score) {
        one((size_t) layer);
        return out;
    }
    parallel_for(own_thread_only(*job.plan.scorer) ? 1 : job.n_threads, (int32_t) out.size(), [&](int32_t l, int32_t) { one((size_t) l); });
    return out;
}

}  // namespace

int32_t window_length(const Sequence & seq) {
    const Observed & seen = seq.observed;
    return seen.have().window > 0 ? std::min({ seen.have().window, seq.rows.n_tokens() - seen.window_from(), seq.rows.pending_length() }) : 0;
}

Job make_job(Sequence & seq, const kvedge_plan & plan, int32_t n_threads, bool scored) {
    Job          job(seq, plan, std::max(1, n_threads), scored, seq.rows.pending_length());
    const size_t n = seq.rows.shapes().size();
    if (pending_differs(seq.rows)) {
        for (size_t l = 0; l < n; l++) {
            job.pending.head_tokens.push_back(tokens_of_heads(seq, l));
            job.pending.head_image.push_back(pending_image(seq, job.pending.head_tokens[l]));
        }
    } else {
        job.pending.tokens = pending_tokens(seq.rows);
        job.pending.image  = pending_image(seq, job.pending.tokens);
    }
    if (plan.reducer->queries && seq.observed.have().queries) {
        job.fit.places = kept_queries(seq, job.pending.tokens);
    }
    job.fit.spans.resize(n);
    job.spectra.resize(n);
    job.scores.resize(n);
    job.measures.resize(n);
    job.kept.resize(n);
    job.out.sources.resize(n);
    for (const LayerShape & shape : seq.rows.shapes()) {
        job.counts.emplace_back((size_t) shape.n_heads_kv, job.pending.n);
    }
    if (plan.scorer->reserve) {
        job.reserve.resize(n);
    }
    if (plan.critical != Critical::none) {
        job.weights.resize(n);
    }
    return job;
}

Bulk<float> scores_of(const Sequence & seq, const kvedge_plan & plan, size_t layer) {
    const bool differs = pending_differs(seq.rows);
    const auto tokens  = differs ? tokens_of_heads(seq, layer) : pending_tokens(seq.rows);
    const auto image   = pending_image(seq, tokens);
    Measures   measures;
    return run_scorer(seq, plan, { image.data(), tokens.data(), differs, 1 }, layer, plan.scorer->score, measures, nullptr);
}

bool on_device(const Job & job, size_t layer) { return job.device_rows && job.device_rows->holds(layer); }

bool measure_on_devices(Job & job) {
    const Sequence & seq    = job.seq;
    const auto       T      = (size_t) job.pending.n;
    const size_t     layers = seq.rows.shapes().size();
    MeasureJob       request;
    request.wanted   = wanted_measures_of(job.plan, job.pending.image.data(), T, job.pending.n);
    request.n_tokens = job.pending.n;
    if (!job.device_rows || !request.wanted.any()) {
        return true;
    }
    const auto kind = kind_of(job.pending.image.data(), job.pending.n);
    request.kind    = kind.data();
    if (request.wanted.votes != WantedMeasures::Votes::none) {
        request.n_window = window_length(seq);
        const bool kept = job.device_rows->keeps_window(request.n_window);
        request.queries.resize(kept ? 0 : layers);
        request.sinks.resize(layers, nullptr);
        for (size_t l = 0; l < layers && !kept; l++) {
            if (on_device(job, l)) {
                request.queries[l] = seq.observed.layer(l).window.last(seq.rows.n_tokens(), request.n_window);
                request.sinks[l]   = sinks_of(seq, l);
            }
        }
    }
    return job.device_rows->measure(request, job.measures) == DeviceRows::Outcome::done;
}

void score_layer(Job & job, size_t l) {
    Measures & measures = job.measures[l];
    job.scores[l] = run_scorer(job.seq, job.plan, layer_tokens_of(job, l), l, job.plan.scorer->score, measures, &job.spectra[l]);
    if (job.plan.scorer->reserve) {
        job.reserve[l] = run_scorer(job.seq, job.plan, layer_tokens_of(job, l), l, job.plan.scorer->reserve, measures, nullptr);
    }
    job.spectra[l].variation = std::move(measures.variation);
    Measures left;  // only the votes, from which Scorer::attention computes scores for the allocator
    left.votes = std::move(measures.votes);
    measures   = by_attention(job.plan) ? std::move(left) : Measures();
}

void score_all(Job & job) {
    // with output projections, layers run one at a time with all threads, so that only one W_O is in memory
    const bool    by_layer  = own_thread_only(*job.plan.scorer) || plan_projects(job.plan);
    const int32_t n_threads = by_layer ? 1 : job.n_threads;
    parallel_for(n_threads, (int32_t) job.scores.size(), [&](int32_t l, int32_t) { score_layer(job, (size_t) l); });
}

void allocate(Job & job, int32_t layer) {
    const kvedge_plan & plan   = job.plan;
    const int32_t       budget = kvedge_plan_budget(&plan, job.pending.n);
    if (budget >= job.pending.n) {
        return;
    }
    const double * params    = plan.params[KVEDGE_STAGE_ALLOCATOR];
    const Scores   attention = attention_scores(job, layer);
    const int32_t  recent    = std::min(budget, plan_recent(plan, job.pending.n, budget));
    const SequenceView view(job.seq);
    AllocateInput      in{};
    in.n_tokens       = job.pending.n;
    in.budget         = budget;
    in.recent         = recent;
    in.scores         = &job.scores;
    in.shapes         = &job.seq.rows.shapes();
    in.view           = &view;
    in.n_threads      = job.n_threads;
    in.params         = params;
    in.image          = job.pending.image_of(0, 0);
    in.self           = plan.allocator;
    in.profile        = plan.profiles[KVEDGE_STAGE_ALLOCATOR].get();
    in.spectra        = &job.spectra;
    in.fixed_recent   = plan.recent_auto ? 0 : recent;
    in.attention      = attention.empty() ? nullptr : &attention;
    in.largest_budget = job.largest_budget;
    in.layer          = layer;
    in.tokens         = job.pending.tokens.empty() ? nullptr : job.pending.tokens.data();
    in.observed       = &job.seq.observed;
    plan.allocator->allocate(in, job.counts);
}

// Keeps `most` of the rows kept[from, to): the best by score or, without scores, evenly spaced rows.
static void limit_rows(std::vector<int32_t> & kept, size_t from, size_t to, size_t most, const float * scores) {
    if (to - from <= most) {
        return;
    }
    std::vector<int32_t> rows(kept.begin() + (std::ptrdiff_t) from, kept.begin() + (std::ptrdiff_t) to);
    if (scores) {
        std::nth_element(rows.begin(), rows.begin() + (std::ptrdiff_t) most, rows.end(),
                         [&](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
        rows.resize(most);
        std::sort(rows.begin(), rows.end());
    } else {
        for (size_t i = 0; i < most; i++) {
            rows[i] = rows[(2 * i + 1) * rows.size() / (2 * most)];
        }
        rows.resize(most);
    }
    kept.erase(std::copy(rows.begin(), rows.end(), kept.begin() + (std::ptrdiff_t) from), kept.begin() + (std::ptrdiff_t) to);
}

// Applies the limits to the kept rows of a head. scores [T], or NULL.
static void limit_head(Job & job, size_t l, size_t h, const float * scores) {
    auto &          kept   = job.kept[l][h];
    const int32_t * tokens = job.pending.tokens_of(l, h);
    for (size_t i = 0; job.limits && i < job.limits->size(); i++) {
        const TokenLimit & limit = (*job.limits)[i];
        const auto         at    = [&](int32_t token) {
            return (size_t) (std::lower_bound(kept.begin(), kept.end(), token, [&](int32_t row, int32_t t) { return tokens[row] < t; }) - kept.begin());
        };
        limit_rows(kept, at(limit.first), at(limit.last), (size_t) limit.most, scores);
    }
}

static void select_head(Job & job, size_t l, size_t h) {
    const auto    at      = h * (size_t) job.pending.n;
    const float * first   = job.reserve.empty() ? nullptr : job.reserve[l].data() + at;
    const float * weights = job.weights.empty() ? nullptr : job.weights[l].data() + at;
    const float * scores  = job.scores[l].data() + at;
    const auto    choose  = [&](int32_t count) {
        job.kept[l][h] = select_tokens(job.plan, job.pending.n, count, job.pending.image_of(l, h), scores, first, weights);
        limit_head(job, l, h, scores);
        return (int32_t) job.kept[l][h].size();
    };
    // With a budget in pairs, the head keeps more rows without a limit until it has `wanted` rows. With a ratio it keeps fewer rows.
    const int32_t wanted = job.counts[l][h];
    if (choose(wanted) < wanted && job.limits && !job.limits->empty() && job.plan.budget_ratio <= 0.0) {
        int32_t few = wanted, enough = job.pending.n;
        while (enough - few > 1) {
            const int32_t middle = few + (enough - few) / 2;
            (choose(middle) < wanted ? few : enough) = middle;
        }
        choose(enough);
    }
}

void select_layer(Job & job, size_t l) {
    job.kept[l].resize(job.counts[l].size());
    for (size_t h = 0; h < job.counts[l].size(); h++) {
        select_head(job, l, h);
    }
}

// Call for one layer at a time: each call holds the layer's W_O in memory.
void weigh_layer(Job & job, size_t l, int32_t n_threads) {
    if (job.weights.empty()) {
        return;
    }
    const SequenceView view(job.seq);
    const LayerShape & shape = job.seq.rows.shapes()[l];
    job.weights[l]           = Bulk<float>((size_t) shape.n_heads_kv * (size_t) job.pending.n);
    projections_of(job.seq).weigh(view, l, shape, job.plan.critical, n_threads, job.weights[l]);
}

void select_all(Job & job) {
    score_all(job);
    allocate(job, ALL_LAYERS);
    for (size_t l = 0; l < job.weights.size(); l++) {
        weigh_layer(job, l, job.n_threads);
    }
    std::vector<std::pair<size_t, size_t>> heads;
    for (size_t l = 0; l < job.kept.size(); l++) {
        job.kept[l].resize(job.counts[l].size());
        for (size_t h = 0; h < job.counts[l].size(); h++) {
            heads.emplace_back(l, h);
        }
    }
    parallel_for(job.n_threads, (int32_t) heads.size(), [&](int32_t i, int32_t) { select_head(job, heads[(size_t) i].first, heads[(size_t) i].second); });
}

void grant_layer(Job & job, size_t l, int32_t count) { job.counts[l].assign(job.counts[l].size(), count); }

void keep_layer(Job & job, size_t l) {
    std::vector<int32_t> all((size_t) job.pending.n);
    std::iota(all.begin(), all.end(), 0);
    job.kept[l].assign((size_t) job.seq.rows.shapes()[l].n_heads_kv, all);
    for (size_t h = 0; h < job.kept[l].size(); h++) {
        limit_head(job, l, h, nullptr);
    }
}

}  // namespace kvedge
