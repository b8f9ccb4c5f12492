// Entropy: a layer's share grows with how widely text and images look at each other in the layer (MEDA, Wan et al. 2025).

#include "system/threads.h"
#include "primitives/entropy.h"
#include "primitives/share.h"

#include <algorithm>
#include <cmath>

namespace kvedge {

namespace {

enum { ATTENTION };

const Param PARAMS[] = {
    setting::words("attention", "cross,full", "whose entropy: cross (text on images and back) or full (the causal map)"),
    {},
};

constexpr double LEAST = 0.01;  // share of a layer

void observes(const double * params, Observation & to) {
    to.entropy = true;
    to.queries = to.queries || params[ATTENTION] == 0;
}

// Returns the text queries and the image keys; without from_text the image queries and the text keys.
CrossAttention cross_attention(const AllocateInput & in, bool from_text) {
    const auto     spans = in.view->queries(0);  // the queries of other layers belong to the same tokens
    CrossAttention out;
    auto           span = spans.begin();
    for (size_t i = 0; i < (size_t) in.n_tokens; i++) {
        const int32_t token = in.tokens[i];
        if ((in.image[i] != 0) == from_text) {
            out.keys.push_back((int32_t) i);
            continue;
        }
        while (span != spans.end() && token >= span->first + span->n) {
            span++;
        }
        if (span != spans.end() && token >= span->first) {
            out.queries.push_back(token);
            out.unseen.push_back((int32_t) out.keys.size());
        }
    }
    return out;
}

// Returns for each layer the mean over the query heads of the entropy per text query plus the entropy per image query.
std::vector<double> cross_entropies(const AllocateInput & in, const CrossAttention & text, const CrossAttention & image) {
    struct Task {
        int32_t                layer, head;
        const CrossAttention * cross;
        double                 mean;  // per query
    };
    std::vector<Task> tasks;
    for (size_t l = 0; l < in.shapes->size(); l++) {
        for (int32_t h = 0; h < (*in.shapes)[l].n_heads_kv; h++) {
            tasks.push_back({ (int32_t) l, h, &text, 0.0 });
            tasks.push_back({ (int32_t) l, h, &image, 0.0 });
        }
    }
    parallel_for(in.n_threads, (int32_t) tasks.size(), [&](int32_t i, int32_t) {
        Task &     task  = tasks[(size_t) i];
        const auto view  = in.view->head(task.layer, task.head);
        const auto spans = in.view->queries(task.layer);
        task.mean = attention_entropy((*in.shapes)[(size_t) task.layer], view, spans, task.head, *task.cross) /
                    (double) task.cross->queries.size();
    });
    std::vector<double> out(in.shapes->size(), 0.0);
    for (const Task & task : tasks) {
        out[(size_t) task.layer] += task.mean / (*in.shapes)[(size_t) task.layer].n_heads;
    }
    return out;
}

std::vector<double> full_entropies(const AllocateInput & in) {
    std::vector<double> out(in.shapes->size(), 0.0);
    const int32_t n = in.observed->n_entropies();
    for (size_t l = 0; l < in.shapes->size() && n > 0; l++) {
        for (double sum : in.observed->layer(l).entropy) {
            out[l] += sum / ((double) (*in.shapes)[l].n_heads * n);
        }
    }
    return out;
}

void allocate(const AllocateInput & in, std::vector<std::vector<int32_t>> & out) {
    const auto n_layers = (double) out.size();
    const auto text = cross_attention(in, true), image = cross_attention(in, false);
    const bool cross = in.params[ATTENTION] == 0 && !text.queries.empty() && !image.queries.empty();
    auto       share = cross ? cross_entropies(in, text, image) : full_entropies(in);
    // Queries that overflow half precision have no entropy: all layers then share evenly.
    if (std::any_of(share.begin(), share.end(), [](double e) { return !std::isfinite(e); })) {
        std::fill(share.begin(), share.end(), 0.0);
    }
    const double top   = *std::max_element(share.begin(), share.end());
    double       total = 0.0;
    for (double & e : share) {
        e = std::exp(e - top);
        total += e;
    }
    for (double & e : share) {
        e = std::clamp(e / total * n_layers * in.budget / in.n_tokens, LEAST, 1.0);
    }
    const auto counts = round_shares(share, (int64_t) in.budget * (int64_t) out.size(), in.n_tokens, std::max(1, in.fixed_recent));
    for (size_t l = 0; l < out.size(); l++) {
        out[l].assign((size_t) (*in.shapes)[l].n_heads_kv, (int32_t) counts[l]);
    }
}

}  // namespace

extern const Allocator allocator_entropy = { { "entropy", PARAMS, observes }, allocate };

}  // namespace kvedge
