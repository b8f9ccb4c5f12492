// kvedge-replay.h - a second pass over a prompt, which scorer "replay" goes by. Included by kvedge.h, whose conventions hold.
//
// KVzip (Kim et al. 2025, arXiv:2505.23416): when a prompt was read, the model reads a request to repeat it, and the prompt
// again, in chunks; a KV pair matters as much as the largest attention that a query of that pass pays to it. With
// scorer.source = prompt, the default, the prompt's own queries are those, and nothing has to be called. With instruction
// and repeat the program brings the pass, since it knows texts and images:
//
//     llama_decode(ctx, prompt);                                        // n tokens, that end at position p - 1
//     kvedge_replay_chunk chunk = { 0, n, n_template, n_request + n };
//     kvedge_replay_begin(kv, 0, &chunk, &err);
//     llama_decode(ctx, request_and_prompt_again);                      // positions p and so on
//     kvedge_replay_end(kv, 0, &err);                                   // they are gone, the next token is at p again
//     kvedge_compress(kv, 0, &err);

#include "kvedge.h"  // before the guard: kvedge-arrays.h comes first

#ifndef KVEDGE_REPLAY_H
#define KVEDGE_REPLAY_H

#ifdef __cplusplus
extern "C" {
#endif

// What a chunk of the pass is about. Tokens count from the first one since the last compression.
typedef struct kvedge_replay_chunk {
    int32_t first, last;  // the tokens [first, last)
    int32_t sinks;        // first tokens, such as those of a chat template, which are kept before all others, as far as there
                          // is room, and are in the scope of every chunk
    int32_t n_tokens;     // that follow, to be read for their queries alone
} kvedge_replay_chunk;

// The n_tokens that sequence seq_id is sent next, in batches of any size, are a chunk of the pass. Their logits may be asked
// for. With scorer.scope = chunk the attention of their queries is shared out among the sinks, the chunk and the replay's
// tokens themselves, else among all. Chunks come in their order: each begins where the one before ended or earlier, the
// first at 0, which begins the pass anew.
// Errors: KVEDGE_E_STATE (no tokens to go by, a chunk that is not ended or that leaves tokens out, a stream),
// KVEDGE_E_ARGUMENT (numbers that do not fit), KVEDGE_E_UNSUPPORTED (the plan's scorer asks for no pass, or tokens of this
// model cannot be taken back: recurrent layers), KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_replay_begin(
    kvedge_cache * kv, int32_t seq_id, const kvedge_replay_chunk * chunk, kvedge_error * err);

// Takes the tokens since kvedge_replay_begin out of the sequence, and of llama.cpp's own memory. If as many came as were
// announced, the chunk counts; else, as where llama_decode failed or was stopped, it may be begun again. Until then the
// sequence cannot be compressed or saved. Does nothing where no chunk was begun. A layer that llama.cpp keeps itself and
// that sees a window only must hold all cells (llama_context_params.swa_full).
// Errors: KVEDGE_E_STATE, KVEDGE_E_MEMORY.
KVEDGE_API kvedge_status kvedge_replay_end(kvedge_cache * kv, int32_t seq_id, kvedge_error * err);

// Whether a plan's scorer asks for the pass. False for NULL.
KVEDGE_API bool kvedge_plan_replays(const kvedge_plan * plan);

// The pass over plain arrays. The tokens of its chunks lie one after the other.
typedef struct kvedge_replay {
    int32_t                     n_tokens, n_chunks;  // R, the sum of the chunks' n_tokens
    const float *               q;       // [L][H][R][d]    queries, at positions T, T + 1 and so on in each chunk
    const float *               k;       // [L][Hkv][R][d]  keys likewise
    const kvedge_replay_chunk * chunks;  // [n_chunks]
} kvedge_replay;

// As kvedge_compress_arrays_by, scored by the pass where the plan's scorer asks for one. Without a pass the prompt's own
// queries stand in for it; so they do in kvedge_compress_arrays_by. replay NULL: none.
// Errors: those of kvedge_compress_arrays_by; KVEDGE_E_ARGUMENT also for chunks that do not fit the prompt.
KVEDGE_API kvedge_status kvedge_compress_arrays_replayed(
    const kvedge_plan * plan, const kvedge_arrays * in, const kvedge_replay * replay, const kvedge_options * options,
    kvedge_result ** out, kvedge_error * err);

#ifdef __cplusplus
}
#endif

#endif  // KVEDGE_REPLAY_H
