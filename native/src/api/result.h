// The result of a compression of plain arrays (kvedge_result).

#pragma once

#include "compress/compress.h"

#include <memory>
#include <vector>

struct kvedge_result {
    int32_t                           d = 0;
    std::vector<kvedge::LayerShape>   shapes;
    std::unique_ptr<kvedge::Sequence> seq;
    kvedge::Scores                    scores;     // [layer][Hkv * T]
    std::vector<std::vector<float>>   attention;  // [layer][H * T * d]
    int32_t                           n_tokens = 0;

    struct Head {
        std::vector<int32_t> kept;
        std::vector<float>   k, v;
        std::vector<float>   biases;  // empty: all are 0
    };
    std::vector<std::vector<Head>> heads;  // [layer][Hkv]

    const Head * head(int32_t l, int32_t h) const {
        return l >= 0 && (size_t) l < heads.size() && h >= 0 && (size_t) h < heads[(size_t) l].size()
                   ? &heads[(size_t) l][(size_t) h]
                   : nullptr;
    }
};
