// Scores of rows, by which a decode policy chooses the row to drop. A score lies in the same list as the row's token, so that
// both are moved and dropped together.

#include "store/store.h"

#include <algorithm>

namespace kvedge {

void score_pending(Store & store, const std::function<const double *(size_t layer, size_t head)> & of) {
    auto &       blocks       = store.mutable_contents().blocks;
    const size_t pending_from = store.contents().pending_from, n_layers = store.shapes().size();
    for (size_t b = pending_from; b < blocks.size(); b++) {  // takes all memory first, so that it cannot fail half-way
        for (size_t l = 0; l < n_layers; l++) {
            blocks[b].loosen(l);
            for (HeadList & head : blocks[b].layers[l].heads) {
                head.scores.reserve(blocks[b].length());
            }
        }
    }
    size_t first = 0;  // number of pending rows before the block
    for (size_t b = pending_from; b < blocks.size(); b++) {
        const size_t n = blocks[b].length();
        for (size_t l = 0; l < n_layers; l++) {
            auto & heads = blocks[b].layers[l].heads;
            for (size_t h = 0; h < heads.size(); h++) {
                const double * from = of(l, h) + first;
                heads[h].scores.assign(from, from + n);
            }
        }
        first += n;
    }
}

void add_scores(Store & store, int32_t layer, int32_t head, int32_t n, const float * weights, size_t ld, int32_t group) {
    auto &  blocks = store.mutable_contents().blocks;
    int32_t at     = 0;
    for (size_t b = 0; b < blocks.size() && at < n; b++) {
        auto &        heads  = blocks[b].layers[(size_t) layer].heads;
        const int32_t length = blocks[b].rows(layer, head);
        if (!heads.empty() && !heads[(size_t) head].scores.empty()) {
            double *      scores = heads[(size_t) head].scores.data();
            const int32_t rows   = std::min(length, n - at);
            for (int32_t r = 0; r < rows; r++) {
                double sum = 0.0;
                for (int32_t g = 0; g < group; g++) {
                    sum += (double) weights[(size_t) g * ld + (size_t) (at + r)];
                }
                scores[r] += sum / group;
            }
        }
        at += length;
    }
}

template <class S, class F> static void each_scores(S & blocks, const F & visit) {
    for (auto & block : blocks) {
        for (auto & layer : block.layers) {
            for (auto & head : layer.heads) {
                visit(head.scores);
            }
        }
    }
}

void copy_scores(const Store & store, std::vector<double> & to) {
    to.clear();
    each_scores(store.contents().blocks, [&](const auto & scores) { to.insert(to.end(), scores.begin(), scores.end()); });
}

void put_back_scores(Store & store, const std::vector<double> & from) noexcept {
    size_t at = 0;
    each_scores(store.mutable_contents().blocks, [&](auto & scores) {
        const size_t n = std::min(scores.size(), from.size() - at);
        std::copy_n(from.begin() + (std::ptrdiff_t) at, n, scores.begin());
        at += n;
    });
}

void read_scores(const Store & store, int32_t layer, int32_t head, double * out) {
    for (const Block & block : store.contents().blocks) {
        const auto & heads = block.layers[(size_t) layer].heads;
        if (heads.empty()) {
            out = std::fill_n(out, block.length(), 0.0);
            continue;
        }
        const HeadList & h = heads[(size_t) head];
        out = std::copy(h.scores.begin(), h.scores.end(), out);
        out = std::fill_n(out, h.tokens.size() - h.scores.size(), 0.0);
    }
}

uint64_t score_bytes(const Store & store) {
    uint64_t n = 0;
    for (const Block & block : store.contents().blocks) {
        for (const auto & layer : block.layers) {
            for (const auto & head : layer.heads) {
                n += head.scores.capacity() * sizeof(double);
            }
        }
    }
    return n;
}

}  // namespace kvedge
