// kvedge-inspect.h - what a cache holds: its memory, lengths, tokens, rows, attention and scores, for meters, pictures and
// research. Included by kvedge.h, whose conventions hold.

#ifndef KVEDGE_INSPECT_H
#define KVEDGE_INSPECT_H

#include "kvedge.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvedge_stats {
    size_t   struct_size;        // set by the caller to sizeof(kvedge_stats) before the call
    int32_t  n_layers;           // layers that kvedge stores (the model may have more)
    int32_t  n_heads_kv;         // KV heads of the first of them
    int32_t  n_tokens;           // tokens of the sequence so far, compressed ones included
    int32_t  n_image_tokens;     // of those, tokens that came as embeddings
    int32_t  n_compressions;     // compressions of the sequence so far
    int32_t  n_pending;          // tokens added since the last compression; of a bounded answer, those in blocks not yet packed;
                                 // of a stream, KV pairs that each head holds
    uint64_t bytes;              // bytes of the sequence's key and value buffers, biases of rows included, that exist now
    uint64_t index_bytes;        // bytes of its token indices and positions
    uint64_t score_bytes;        // bytes of column sums, of scores, of watched attention, of queries kept for allocator
                                 // entropy and reducer match, of the mean and covariance of queries, and of the largest attention of each token, that exist now
    uint64_t before_bytes;       // `bytes` right before the last compression (the full cache, for a first turn)
    uint64_t after_bytes;        // `bytes` right after it
    uint64_t peak_bytes;         // largest value of bytes + index_bytes + score_bytes so far
    int64_t  compress_us;        // wall time of the last compression, microseconds
    uint64_t device_bytes;       // of `bytes`, those that lie on devices
    int32_t  n_unfitted;         // heads that reducer match left as reducer evict does in the last compression: fewer queries of
                                 // the prompt were kept than rows are to be fitted to them
    int32_t  n_scant;            // heads that it fitted to fewer than twice as many queries as rows
    // of the last compression, where rows lay on devices; else 0:
    uint64_t device_fetched_bytes;  // bytes that came from devices
    uint64_t device_sent_bytes;     // bytes that went to them
    int64_t  device_operations;     // operations of the graphs that ran there
    int64_t  device_measure_us;     // microseconds of each step: what scorers look at is measured there,
    int64_t  device_choose_us;      // the host chooses,
    int64_t  device_gather_us;      // kept rows are gathered there,
    int64_t  device_merge_us;       // evicted rows join them there,
    int64_t  device_upload_us;      // and what the host computed is sent
    int32_t  device_compressed;     // 1: rows on devices were compressed there; 0: on the host, or none lay there
    int32_t  unused;
} kvedge_stats;

KVEDGE_API kvedge_status kvedge_get_stats(const kvedge_cache * kv, int32_t seq_id, kvedge_stats * out, kvedge_error * err);

// Model layer number of stored layer i (0 <= i < n_layers), or -1.
KVEDGE_API int32_t kvedge_layer_id(const kvedge_cache * kv, int32_t i);

// Name, as ggml has it, of the device on which the rows of layer i lie ("CUDA0", "RPC0"); NULL: on the host, or no such layer.
// Static storage.
KVEDGE_API const char * kvedge_layer_device(const kvedge_cache * kv, int32_t i);

// Why the last compression of the sequence took place on the host although rows lay on a device: the device and the operation
// that it lacks, or the stage that has no graph. NULL: it did not, or no such sequence. Valid until the sequence changes.
KVEDGE_API const char * kvedge_device_problem(const kvedge_cache * kv, int32_t seq_id);

// KV pairs that stored layer i, KV head `head` holds now for the sequence; -1 if there is none such.
KVEDGE_API int32_t kvedge_head_length(const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head);

// Original token index (0 = first token of the sequence) of every KV pair of stored layer i, KV head `head`, ascending,
// into out[0 .. n-1] with n = kvedge_head_length. Errors: KVEDGE_E_ARGUMENT (no such layer, head or sequence; n_out < n).
KVEDGE_API kvedge_status kvedge_head_tokens(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, int32_t * out, int32_t n_out, kvedge_error * err);

// Query heads of stored layer i (H); query head h reads KV head h / (H / Hkv). -1: no such layer.
KVEDGE_API int32_t kvedge_query_heads(const kvedge_cache * kv, int32_t i);

// Switches watching on or off (off after kvedge_attach): whether the attention of tokens that are decoded one by one is
// kept for kvedge_attention. Costs H floats per layer and stored row while it is on (counted in score_bytes), nothing
// while it is off.
KVEDGE_API kvedge_status kvedge_watch(kvedge_cache * kv, bool on, kvedge_error * err);

// What the sequence's last token paid to each stored KV pair: the softmax weights of query head `query_head` of stored
// layer i over the rows of its KV head, that token's own row included, into out[0 .. n-1] with n = kvedge_head_length, in
// the order of kvedge_head_tokens. They add up to 1, with attention sinks (logits without a row, gpt-oss) to less.
// Errors: KVEDGE_E_ARGUMENT (no such sequence, layer or head; n_out < n), KVEDGE_E_STATE (the last tokens of the sequence
// came several at a time or unwatched, or rows were removed or compressed since).
KVEDGE_API kvedge_status kvedge_attention(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t query_head, float * out, int32_t n_out, kvedge_error * err);

// Query heads H, KV heads Hkv and head sizes of stored layer i. Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_layer_shape(
    const kvedge_cache * kv, int32_t i, int32_t * n_heads, int32_t * n_heads_kv, int32_t * d_k, int32_t * d_v, kvedge_error * err);

// Keys [n][d_k] and values [n][d_v] of stored layer i, KV head `head`, in float32, n = kvedge_head_length, in the order of
// kvedge_head_tokens. n_out: rows that fit k and v. Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_head_rows(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, float * k, float * v, int32_t n_out, kvedge_error * err);

// What is added to the logits of the KV pairs of stored layer i, KV head `head`: natural logarithms, after a soft cap and before
// the softmax, so that a pair stands for e^bias pairs. 0 for pairs that stand for themselves. Into out[0 .. n-1] with
// n = kvedge_head_length, in the order of kvedge_head_tokens. A plan with "reducer.bias" = "mass" makes them: ln of 1 + the pairs
// that were merged into one (four bytes each, counted in kvedge_stats.bytes). Errors: KVEDGE_E_ARGUMENT.
KVEDGE_API kvedge_status kvedge_head_biases(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, int32_t head, float * out, int32_t n_out, kvedge_error * err);

// Scores [Hkv][kvedge_stats.n_pending] that the plan's scorer gives to the tokens of stored layer i that were added since the last
// compression, without compressing. n_out: floats that fit `out`. Errors: KVEDGE_E_ARGUMENT, KVEDGE_E_STATE (nothing is pending,
// or the plan was set after the prompt and its scorer saw too little), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_pending_scores(
    const kvedge_cache * kv, int32_t seq_id, int32_t i, float * out, int32_t n_out, kvedge_error * err);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_INSPECT_H
