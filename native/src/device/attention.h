// Attention over rows on a device, as ggml's operations, and what devices have of it.

#pragma once

#include "device/tensors.h"
#include "rows/rows.h"

namespace kvedge {

// One layer, while a graph is built: tokens of one sequence only, position encoding applied.
struct GraphLayer {
    ggml_context * ctx;
    ggml_tensor *  q;  // [d_k, H, n]
    ggml_tensor *  k;  // [d_k, Hkv, n]
    ggml_tensor *  v;  // [d_v, Hkv, n]
    ggml_tensor *  sinks;  // [H] or NULL
    float          scale, softcap;
};

// softmax(mask + scale * q k^T) of q [d, n, H, ...] and k [d, slots, Hkv, ...]: [slots, n, H, ...] f32. softcap 0: none.
ggml_tensor * attention_weights(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * mask, float scale, float softcap);

// The attention itself: flash attention where the device has it. q [d_k, n, heads, groups], k and v [d, rows, KV heads, groups],
// mask [rows, n, 1, groups] f16. The result is [d_v, heads, n, groups].
ggml_tensor * attention_over(const GraphLayer & in, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask,
                             ggml_backend_dev_t device);

// ggml's type of plain or quantised rows; GGML_TYPE_COUNT: it has none.
ggml_type ggml_type_of(Type type);

// Whether a device attends to rows of these types: quantised ones take flash attention, keys and values of the same type.
bool attends_to(ggml_backend_dev_t device, const Storage & storage, int64_t d_k, int64_t d_v);

// Whether a device's module may have the operations of own.h; ask it for each.
bool has_own(ggml_backend_dev_t device);

// Whether a device has attention over heads of different lengths, of rows of these types (cuda/ragged.cu, cpu/ragged.cpp). A CUDA
// module of another build has none.
bool has_ragged(ggml_backend_dev_t device, const LayerShape & shape, const Storage & storage);

// Whether it has the operations with which several tokens attend over heads of different lengths.
bool reads_several(ggml_backend_dev_t device);

// Whether it is another machine's, behind a network.
bool is_far(ggml_backend_dev_t device);

// Whether several threads may copy from and to it at a time.
bool copies_at_once(ggml_backend_dev_t device);

}  // namespace kvedge
