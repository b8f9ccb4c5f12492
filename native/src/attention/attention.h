// Attention of new tokens over a sequence's stored rows, split into independent tasks for any number of threads.
//
// prefill: a task computes a tile of query rows against all their keys at once. The tile's logits (rows x keys) fit a core's
//   cache, so the softmax is exact in one pass, and its column sums (H2O, LOOK-M eq. 4) cost one addition per logit. The
//   attention matrix of the whole prompt never exists.
// decode: up to DECODE_ROWS query rows. A task reads each block of keys once for as many query rows as fit. The keys of a head
//   are split over several tasks if there are fewer heads than threads.

#pragma once

#include "system/pages.h"
#include "observe/observed.h"
#include "store/store.h"

#include <atomic>
#include <vector>

namespace kvedge {

class SpinLock {
  public:
    void lock() {
        while (flag_.test_and_set(std::memory_order_acquire)) {
        }
    }
    void unlock() { flag_.clear(std::memory_order_release); }

  private:
    std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};

// A request to store the rows of the last n tokens of the sequence in one layer.
struct StoreJob {
    Store *         rows;
    int32_t         layer, n;
    const float *   k;  // row of token i, head h: k + index(i) * k_token + h * k_head floats
    size_t          k_token, k_head;
    const float *   v;  // row of token i, head h: v + index(i) * v_token + h * v_head floats
    size_t          v_token, v_head;
    const int32_t * index;  // [n] place of token i in k and v; NULL: place i
};

// Stores the share of thread ith of nth.
void store_task(const StoreJob & job, int32_t ith, int32_t nth);

// The rows that a replay looks at (kvedge_replay_begin). Row 0 is the first pending row.
struct ReplayScope {
    int32_t first, last;  // rows [first, last) of the chunk
    int32_t sinks;        // number of first rows that belong to the scope, too
    int32_t n_context;    // number of rows before the replay's rows
    bool    within;       // the softmax covers only sinks, chunk and the replay's rows; else all rows
};

// A request to compute the attention of n query tokens in one layer.
struct AttendJob {
    const Store * rows;
    int32_t       layer;
    int32_t       n;       // query tokens: the last n tokens of the sequence, whose rows are already stored
    bool          causal;  // false: every query sees all stored rows

    const float *   q;  // row of query token i, head h: q + index(i) * q_token + h * q_head floats
    size_t          q_token, q_head;
    float *         out;  // output of d_v floats: out + index(i) * out_token + h * out_head floats
    size_t          out_token, out_head;
    const int32_t * index;  // [n] place of query token i in q and out; NULL: place i

    const int32_t * rotation_positions;  // [axis][n] rotary positions of the query tokens (M-RoPE); NULL: the positions in the store

    float         scale;
    float         softcap;  // 0: none
    const float * sinks;    // [H] logits of attention sinks, or NULL

    // wanted: quantities to gather; seen: has room for them. The decode path gathers only column sums, for a single token,
    // and needs `weights` for that. locks: [Hkv] guards of `seen` and `scored`.
    Observation wanted;
    Observed *  seen;
    SpinLock *  locks;
    const ReplayScope * replay;  // scope of the query tokens; NULL: no replay

    // Decode path with n = 1: receives the softmax weights [H][weights_row] of the rows of each query head's KV head, in token
    // order. NULL: not wanted.
    float * weights;
    size_t  weights_row;

    bool as_alone;  // decode path: each token's output has the same bits as if the token came alone

    // The store whose row scores grow by the attention of the query tokens; NULL: none. Decode path (n = 1, with `weights`): all
    // rows. Prefill (with sums and locks): the rows that are not pending.
    Store * scored;
};

// Working memory of one thread.
class Scratch {
  public:
    // Takes memory for any layer of these shapes with n_keys stored rows. False: no memory.
    bool   reserve(const std::vector<LayerShape> & shapes, int32_t n_keys);
    void   release() { memory_ = Pages(); }
    size_t bytes() const { return memory_.size(); }

    int32_t rows  = 0;  // query rows per tile
    size_t  s_row = 0;  // floats per row of logits
    float * s     = nullptr;  // [rows][s_row]
    float * panel = nullptr;  // packed keys of one block
    float * vals  = nullptr;  // [BLOCK][pad16(d_v)]
    float * q     = nullptr;  // [rows][d_k]
    float * o     = nullptr;  // [rows][pad16(d_v)]
    float * sum   = nullptr;  // [s_row], also columns[column::sums]
    float * mean  = nullptr;  // [s_row]
    float * len   = nullptr;  // [rows] 1 / softmax denominator

    std::array<float *, column::count> columns{};  // [s_row] each

  private:
    Pages memory_;
};

// Copies the last queries of the job to the layer's query window; thread ith of nth copies its share.
void record_window(const AttendJob & job, Observed & to, int32_t ith, int32_t nth);

// Adds the queries of token `from` and later tokens to the moments of their heads: scaled, and without their rotary encoding.
// Thread ith of nth adds its share of the heads.
void record_moments(const AttendJob & job, Observed & to, int32_t from, int32_t ith, int32_t nth, MomentsScratch & scratch);

int32_t prefill_tasks(const AttendJob & job, const Scratch & scratch);
void    prefill_task(const AttendJob & job, int32_t task, Scratch & scratch);

// Partial results of a decode whose keys are split over several tasks.
class DecodePartials {
  public:
    bool reserve(const std::vector<LayerShape> & shapes, int32_t n_tokens, int32_t n_threads);
    void start(int32_t n_heads_kv);  // before each decode; not thread-safe

    std::vector<float>                      data;
    std::unique_ptr<std::atomic<int32_t>[]> done;  // [Hkv] number of finished splits
    int32_t                                 n_done = 0;
    int32_t                                 splits_max = 1;
};

constexpr int32_t DECODE_ROWS = 256;  // largest number of query rows (tokens x group) for which the decode path is faster

int32_t decode_splits(const AttendJob & job, int32_t n_threads);
int32_t decode_tasks(const AttendJob & job, int32_t n_splits);
void    decode_task(const AttendJob & job, int32_t task, int32_t n_splits, DecodePartials & partials);

}  // namespace kvedge
