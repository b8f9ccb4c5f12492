// Read access to the rows of a measuring operation (../own.h: OWN_POINTS, OWN_DEVIATION, OWN_SUM, OWN_LENGTHS).

#pragma once

#include "own.h"

#include <cstdint>
#include <cstring>
#include <vector>

struct OwnRows {
    const ggml_tensor *rows[2], *list;  // rows: keys, values; list: row of each token
    int                heads, n;        // KV heads; tokens

    explicit OwnRows(const ggml_tensor * dst)
        : rows{ dst->src[0], dst->src[1] }, list(dst->src[5]), heads(dst->op_params[OWN_KIND + 1]), n((int) list->ne[0]) {}

    int d(int of) const { return (int) rows[of]->ne[0]; }  // of: 0 for keys, 1 for values

    std::vector<float> read(int of, int head, int token) const {  // a token's key or value in f32
        const ggml_tensor * x  = rows[of];
        const int64_t       at = ((const int32_t *) list->data)[(list->ne[1] > 1 ? (int64_t) head * n : 0) + token];
        const char *        row = (const char *) x->data + (size_t) at * x->nb[1] + (x->ne[2] > 1 ? (size_t) head * x->nb[2] : 0);
        std::vector<float>  out((size_t) x->ne[0]);
        if (x->type == GGML_TYPE_F32) {
            std::memcpy(out.data(), row, out.size() * sizeof(float));
        } else {
            ggml_get_type_traits(x->type)->to_float(row, out.data(), x->ne[0]);
        }
        return out;
    }
};
