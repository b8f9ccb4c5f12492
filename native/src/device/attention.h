// Builds attention over rows on a device from ggml operations, and answers which forms of attention a device supports.

#pragma once

#include "device/tensors.h"
#include "rows/rows.h"

namespace kvedge {

// The tensors of one layer while a graph is built. All n tokens belong to one sequence; q and k are position-encoded.
struct GraphLayer {
    ggml_context * ctx;
    ggml_tensor *  q;  // [d_k, H, n]
    ggml_tensor *  k;  // [d_k, Hkv, n]
    ggml_tensor *  v;  // [d_v, Hkv, n]
    ggml_tensor *  sinks;  // [H] or NULL
    float          scale, softcap;
};

// Returns softmax(mask + scale * q k^T) [slots, n, H, ...] f32 of q [d, n, H, ...] and k [d, slots, Hkv, ...]. softcap 0: no cap.
ggml_tensor * attention_weights(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * mask, float scale, float softcap);

// Returns the attention output [d_v, heads, n, groups], by flash attention where the device supports flash attention.
// q [d_k, n, heads, groups], k and v [d, rows, KV heads, groups], mask [rows, n, 1, groups] f16.
ggml_tensor * attention_over(const GraphLayer & in, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask,
                             ggml_backend_dev_t device);

// Returns the ggml type of a storage type. GGML_TYPE_COUNT: ggml has no equal type.
ggml_type ggml_type_of(Type type);

// Returns whether a device attends to rows of these types. Quantised rows need flash attention and one type for keys and values.
bool attends_to(ggml_backend_dev_t device, const Storage & storage, int64_t d_k, int64_t d_v);

// Returns whether the device's backend may have kvedge's operations (own.h). Ask ggml_backend_dev_supports_op for each operation.
bool has_own(ggml_backend_dev_t device);

// Returns whether a device has OWN_RAGGED (own.h), attention over KV heads of different lengths, for rows of these types. A CUDA
// backend that was built without kvedge has no OWN_RAGGED.
bool has_ragged(ggml_backend_dev_t device, const LayerShape & shape, const Storage & storage);

// Returns whether a device has the ggml operations by which several tokens attend over KV heads of different lengths.
bool reads_several(ggml_backend_dev_t device);

// Returns whether a device belongs to another machine (ggml's RPC backend).
bool is_far(ggml_backend_dev_t device);

// Returns whether several threads may copy to and from a device at the same time.
bool copies_at_once(ggml_backend_dev_t device);

}  // namespace kvedge
