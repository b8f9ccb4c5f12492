// Helpers that make sequences of random rows and read rows back.

#pragma once

#include "kernels/kernels.h"
#include "store/store.h"
#include "check.h"
#include "sequence/sequence.h"

#include <cstdint>
#include <random>
#include <vector>

namespace kvedge {

inline std::mt19937 rng(11);

inline std::vector<float> random_floats(size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float>              x(n);
    for (auto & v : x) {
        v = normal(rng);
    }
    return x;
}

inline void store(Sequence & seq, const std::vector<float> & k, const std::vector<float> & v, int32_t n) {
    const LayerShape & s     = seq.rows.shapes()[0];
    const Storage      plain = seq.rows.storage().plain();
    for (int32_t t = 0; t < n; t++) {
        const auto at = seq.rows.place_from_end(t, n);
        for (int32_t h = 0; h < s.n_heads_kv; h++) {
            kernels().from_f32(plain.k, k.data() + (size_t) ((t * s.n_heads_kv + h) * s.d_k), k_row(at, 0, h), (size_t) s.d_k);
            kernels().from_f32(plain.v, v.data() + (size_t) ((t * s.n_heads_kv + h) * s.d_v), v_row(at, 0, h), (size_t) s.d_v);
        }
    }
}

inline void append(Sequence & seq, int32_t n) {
    const LayerShape &   s = seq.rows.shapes()[0];
    std::vector<int32_t> pos((size_t) n);
    for (int32_t i = 0; i < n; i++) {
        pos[(size_t) i] = seq.rows.n_tokens() + i;
    }
    CHECK(seq.rows.append(n, pos.data(), false));
    store(seq, random_floats((size_t) (n * s.n_heads_kv * s.d_k)), random_floats((size_t) (n * s.n_heads_kv * s.d_v)), n);
}

// Reads all rows of a KV head of layer 0 in f32.
inline void rows_of(const Store & store, int32_t head, std::vector<float> & k, std::vector<float> & v) {
    const LayerShape & s = store.shapes()[0];
    k.clear();
    v.clear();
    each_segment(store, 0, head, [&](const Segment & seg) {
        const size_t at_k = k.size(), at_v = v.size();
        k.resize(at_k + (size_t) (seg.n * s.d_k));
        v.resize(at_v + (size_t) (seg.n * s.d_v));
        kernels().widen(seg.k, seg.n, s.d_k, k.data() + at_k, (size_t) s.d_k);
        kernels().widen(seg.v, seg.n, s.d_v, v.data() + at_v, (size_t) s.d_v);
    });
}

}  // namespace kvedge
