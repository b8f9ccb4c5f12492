// Rows of keys and values as the whole library knows them: their types, the shape of a layer, and views of rows that lie in
// the host's memory.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvedge {

// How rows of keys or values lie in memory. f16 and what follows up to f32 are plain numbers. Of the others:
//   q8_0, q4_0          llama.cpp's blocks: 32 values of a row, a half-precision scale d, then the codes; x = d * code
//   kivi4_v, kivi2_v    KIVI's values: 32 values of a row, scale and minimum in half precision, then codes without sign;
//                       x = scale * code + minimum
//   kivi4_k, kivi2_k    KIVI's keys: of GROUP rows, scale[d] and minimum[d] in half precision, one of each per channel,
//                       and then the codes of each row
// Codes of four bits: byte j of a block holds value j (low) and j + 16; of two bits: values j, j + 8, j + 16, j + 24.
enum class Type : int32_t { f16 = 0, bf16, f32, q8_0, q4_0, kivi4_v, kivi2_v, kivi4_k, kivi2_k };

constexpr int32_t GROUP = 32;  // values that share a scale

constexpr bool is_quantised(Type t) { return t > Type::f32; }
constexpr bool is_grouped(Type t) { return t == Type::kivi4_k || t == Type::kivi2_k; }  // rows share scales with others

constexpr size_t type_size(Type t) { return t == Type::f32 ? 4 : 2; }  // of a plain number

// Bytes of GROUP codes.
constexpr size_t code_bytes(Type t) {
    return t == Type::q8_0 ? 32 : t == Type::kivi2_v || t == Type::kivi2_k ? 8 : 16;
}

// Bytes of 32 values with what they need to be read: of a row's block, or of a row's share of a group.
constexpr size_t block_bytes(Type t) { return code_bytes(t) + (t == Type::q8_0 || t == Type::q4_0 ? 2 : 4); }

// Bytes of a row of d values; of a grouped type, of a row and its share of what the group has in common.
constexpr size_t row_bytes(Type t, int32_t d) {
    return is_quantised(t) ? (size_t) (d / GROUP) * block_bytes(t) : (size_t) d * type_size(t);
}

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
    Storage plain() const { return { is_quantised(k) ? Type::f16 : k, is_quantised(v) ? Type::f16 : v }; }
};

// Whether values are not quantised with their keys, but when newer tokens exist (KIVI).
inline bool values_wait(const Storage & t) { return t.v == Type::kivi4_v || t.v == Type::kivi2_v; }

// Consecutive rows of one head, in the host's memory.
struct Segment {
    Rows    k, v;
    int32_t n;
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
