// Basic structs of the library: the shape of a layer, the storage types, and views of rows of keys and values in host memory.

#pragma once

#include "rows/types.h"

#include <vector>

namespace kvedge {

// Rows of one head. Row r starts at data + r * stride bytes. Grouped types: each group of GROUP rows has GROUP * stride bytes, the
// first group starts at data, and its first `skip` rows do not count.
struct Rows {
    const uint8_t * data;
    size_t          stride;
    Type            type;
    int32_t         skip = 0;

    Rows from(int32_t row) const {  // returns the rows without the first `row` rows
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
    float   softcap = 0.0f;  // softcap of the logits; 0: none
};

// The storage types of keys and values.
struct Storage {
    Type k = Type::f16, v = Type::f16;

    bool quantised() const { return is_quantised(k) || is_quantised(v); }
    // Returns the types of new rows, before they are quantised.
    Storage plain() const { return { plain_type(k), plain_type(v) }; }
};

// Consecutive rows of one head in host memory.
struct Segment {
    Rows          k, v;
    int32_t       n;
    const float * bias = nullptr;  // [n] added to the rows' logits after the softcap, before the softmax; NULL: all 0

    Segment part(int32_t first, int32_t count) const {
        return { k.from(first), v.from(first), count, bias ? bias + first : nullptr };
    }
};

// Return the bytes of a key row, and of a value row.
inline size_t row_k(const LayerShape & s, Type t) { return row_bytes(t, s.d_k); }
inline size_t row_v(const LayerShape & s, Type t) { return row_bytes(t, s.d_v); }

// The rows of one KV head in token order. Valid until a row of the sequence is written or dropped.
struct HeadView {
    std::vector<Segment> old;      // rows that are not pending
    std::vector<Segment> pending;  // rows for the next compression
    int32_t              n_old = 0, n_pending = 0;
};

// One query of one query head.
struct QueryRow {
    uint8_t * q;     // [d_k] in half precision, scaled for the logits
    uint8_t * seen;  // a SoftmaxRow: the query's attention to pending keys of the other modality (text or image)
};
constexpr size_t SEEN_BYTES = 3 * sizeof(float);

// Kept queries of consecutive tokens, in one layer. data: [H][room] queries, then [H][room] SoftmaxRows.
struct QuerySpan {
    int32_t   first, n;  // index of the first token, number of tokens
    int32_t   room;      // number of tokens that the memory was laid out for
    uint8_t * data;

    QueryRow row(const LayerShape & shape, int32_t i, int32_t query_head) const {  // the query of the span's i-th token
        const size_t size = row_k(shape, Type::f16), at = (size_t) query_head * (size_t) room + (size_t) i;
        return { data + at * size, data + (size_t) shape.n_heads * (size_t) room * size + at * SEEN_BYTES };
    }
};

}  // namespace kvedge
