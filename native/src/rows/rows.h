// Rows of keys and values as the whole library knows them: the shape of a layer, and views of rows that lie in the host's
// memory.

#pragma once

#include "rows/types.h"

#include <vector>

namespace kvedge {

// Rows of one head: row r starts at data + r * stride bytes. Of a grouped type: a group of GROUP rows takes GROUP * stride
// bytes, the first begins at data, and its first `skip` rows are not meant.
struct Rows {
    const uint8_t * data;
    size_t          stride;
    Type            type;
    int32_t         skip = 0;

    Rows from(int32_t row) const {  // without the first `row` rows
        if (!is_grouped(type)) {
            return { data + (size_t) row * stride, stride, type, 0 };
        }
        const int32_t at = skip + row;
        return { data + (size_t) (at / GROUP) * GROUP * stride, stride, type, at % GROUP };
    }
};

struct LayerShape {
    int32_t il;          // layer number in the model
    int32_t n_heads;     // H
    int32_t n_heads_kv;  // Hkv
    int32_t d_k, d_v;
    float   softcap = 0.0f;  // of the logits, 0: none
};

// What keys and values are stored as.
struct Storage {
    Type k = Type::f16, v = Type::f16;

    bool quantised() const { return is_quantised(k) || is_quantised(v); }
    // What new rows are stored as until they are quantised.
    Storage plain() const { return { plain_type(k), plain_type(v) }; }
};

// Consecutive rows of one head, in the host's memory.
struct Segment {
    Rows          k, v;
    int32_t       n;
    const float * bias = nullptr;  // [n] natural logarithms, added to the rows' finished logits before the softmax; NULL: all 0

    Segment part(int32_t first, int32_t count) const {
        return { k.from(first), v.from(first), count, bias ? bias + first : nullptr };
    }
};

// Bytes of a key row and of a value row.
inline size_t row_k(const LayerShape & s, Type t) { return row_bytes(t, s.d_k); }
inline size_t row_v(const LayerShape & s, Type t) { return row_bytes(t, s.d_v); }

// The rows of one KV head in token order. Lasts until a row of its sequence is written or dropped.
struct HeadView {
    std::vector<Segment> old;      // compressed before
    std::vector<Segment> pending;  // what the next compression looks at
    int32_t              n_old = 0, n_pending = 0;
};

// One query of one head.
struct QueryRow {
    uint8_t * q;     // [d_k] in half precision, scaled as for the logits
    uint8_t * seen;  // a SoftmaxRow: what it saw of the other modality's pending keys
};
constexpr size_t SEEN_BYTES = 3 * sizeof(float);

// Kept queries of consecutive tokens, of one layer: [H][room] queries, then as many SoftmaxRows.
struct QuerySpan {
    int32_t   first, n;  // token index of the first, number of tokens
    int32_t   room;      // tokens that there were when the memory was laid out
    uint8_t * data;

    QueryRow row(const LayerShape & shape, int32_t i, int32_t query_head) const {  // of the span's i-th token
        const size_t size = row_k(shape, Type::f16), at = (size_t) query_head * (size_t) room + (size_t) i;
        return { data + at * size, data + (size_t) shape.n_heads * (size_t) room * size + at * SEEN_BYTES };
    }
};

}  // namespace kvedge
