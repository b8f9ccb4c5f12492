// Watched attention of decoded tokens: the C interface, and its memory.

#include "glue/calls.h"

#include <algorithm>
#include <new>

using namespace kvedge;

bool TokenWeights::reserve(const Store & store, bool every_layer) try {
    const auto & shapes = store.shapes();
    weights.resize(every_layer ? shapes.size() : 1);
    rows.resize(weights.size(), 0);
    for (size_t l = 0; l < shapes.size(); l++) {
        const size_t at   = every_layer ? l : 0;
        int32_t      need = 0;
        for (int32_t h = 0; h < shapes[l].n_heads_kv; h++) {
            need = std::max(need, store.head_length((int32_t) l, h));
        }
        const auto heads = (size_t) shapes[l].n_heads;
        if (need > rows[at] || heads * (size_t) rows[at] > weights[at].size()) {
            const int32_t grown = std::max(need + need / 4, rows[at]);  // more tokens follow one by one
            weights[at]         = std::vector<float>(heads * (size_t) grown);
            rows[at]            = grown;
        }
    }
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

uint64_t TokenWeights::bytes() const {
    uint64_t n = before.capacity() * sizeof(double);
    for (const auto & w : weights) {
        n += w.capacity() * sizeof(float);
    }
    return n;
}

extern "C" int32_t kvedge_query_heads(const kvedge_cache * kv, int32_t i) {
    return asked(kv, -1, [&] { return kv->layers.holds(i) ? kv->layers.shapes[(size_t) i].n_heads : -1; });
}

extern "C" kvedge_status kvedge_watch(kvedge_cache * kv, bool on, kvedge_error * err) {
    return claimed(kv, true, "kvedge_watch: cache is NULL", "watch attention", err, [&] {
        kv->sequences.watching = on;
        for (auto & [id, state] : kv->sequences.all) {
            if (!on) {
                state.weights = {};
            }
        }
        return ok(err);
    });
}

extern "C" kvedge_status kvedge_attention(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t query_head, float * out, int32_t n_out, kvedge_error * err) {
    return claimed(kv, out, "kvedge_attention: cache or out is NULL", "copy the attention", err, [&] {
        if (!kv->layers.holds(i) || query_head < 0 || query_head >= kv->layers.shapes[(size_t) i].n_heads) {
            return fail(err, KVEDGE_E_ARGUMENT, "kvedge_attention: the layer or query head does not exist");
        }
        const SequenceState * found = kv->sequences.find(seq_id);
        if (!found) {
            return fail(err, KVEDGE_E_ARGUMENT, "kvedge_attention: sequence %d holds no tokens", seq_id);
        }
        const SequenceState & state = *found;
        if (!state.weights.valid) {
            return fail(err, KVEDGE_E_STATE,
                        "kvedge_attention: the last decode of sequence %d was not a single watched token; call kvedge_watch before you "
                        "decode one token", seq_id);
        }
        const LayerShape & shape = kv->layers.shapes[(size_t) i];
        const int32_t      n     = state.seq->rows.head_length(i, query_head / (shape.n_heads / shape.n_heads_kv));
        if (const auto status = check_room("kvedge_attention", (size_t) n, "weights", n_out, err); status != KVEDGE_OK) {
            return status;
        }
        const auto row = (size_t) state.weights.rows[(size_t) i];
        std::copy_n(state.weights.weights[(size_t) i].begin() + (std::ptrdiff_t) ((size_t) query_head * row), n, out);
        return ok(err);
    });
}
