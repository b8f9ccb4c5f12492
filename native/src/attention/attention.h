// Attention of new tokens over a sequence's stored rows, cut into independent tasks for any number of threads.
//
// prefill: a tile of query rows against all its keys at once. The tile's logits (rows x keys) fit a core's cache, so the
//   softmax is exact in one pass and its column sums (H2O, LOOK-M eq. 4) cost one addition per entry; the matrix of the
//   whole prompt never exists.
// decode: up to DECODE_ROWS query rows of an answer, block by block of the keys: a block is read once for as many
//   query rows as fit, and widened once for them if they are several. Split over keys when there are fewer heads than threads.

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

// New rows of a layer: of the last n tokens of the sequence.
struct StoreJob {
    Store *         rows;
    int32_t         layer, n;
    const float *   k;  // row of token i, head h: k + index(i) * k_token + h * k_head floats
    size_t          k_token, k_head;
    const float *   v;  // likewise
    size_t          v_token, v_head;
    const int32_t * index;  // [n] place of token i in k and v; NULL: i itself
};

// Thread ith of nth stores its share.
void store_task(const StoreJob & job, int32_t ith, int32_t nth);

// What the queries of a replay go by (kvedge_replay_begin). Rows are counted from the first pending one.
struct ReplayScope {
    int32_t first, last;  // the rows that the chunk is about
    int32_t sinks;        // first rows that are in its scope as well
    int32_t n_context;    // rows before those of the replay itself
    bool    within;       // attention is shared out among these and the replay's own rows; else among all
};

struct AttendJob {
    const Store * rows;
    int32_t       layer;
    int32_t       n;       // query tokens: the last n of the sequence, whose rows are stored already
    bool          causal;  // false: every query sees all stored rows

    const float *   q;  // row of query token i, head h: q + index(i) * q_token + h * q_head floats
    size_t          q_token, q_head;
    float *         out;  // likewise, d_v floats a row
    size_t          out_token, out_head;
    const int32_t * index;  // [n] place of query token i in q and out; NULL: i itself

    const int32_t * places;  // [axis][n] positions that turn the query tokens, where each has several; NULL: those of the rows

    float         scale;
    float         softcap;  // 0: none
    const float * sinks;    // [H] logits of attention sinks, or NULL

    // What is gathered of the attention, and where: there is room for it. The decode path gathers column sums alone, of a
    // single token, with weights. locks: [Hkv], guards all of it.
    Observation wanted;
    Observed *  seen;
    SpinLock *  locks;
    const ReplayScope * replay;  // that the query tokens belong to; NULL: none

    // Of a single query token (n = 1, decode path): [H][weights_row] softmax weights of the rows of each query head's KV
    // head, in token order; NULL: not wanted.
    float * weights;
    size_t  weights_row;

    bool as_alone;  // decode path: each token's output is rounded as if it were the only one

    // Whose rows' scores grow by what the query tokens pay to them: a single token (decode path, with weights) to all, a
    // prompt (prefill, with sums and locks) to the rows before the pending ones. NULL: nobody's.
    Store * scored;
};

// Working memory of one thread.
class Scratch {
  public:
    // For any layer of these shapes and n_keys stored rows. False: no memory.
    bool   reserve(const std::vector<LayerShape> & shapes, int32_t n_keys);
    void   release() { memory_ = Pages(); }
    size_t bytes() const { return memory_.size(); }

    int32_t rows  = 0;  // query rows of a tile
    size_t  s_row = 0;  // floats of a logit row
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

// Copies those of the job's queries that the windows hold into their rings; thread ith of nth does its share.
void record_window(const AttendJob & job, Observed & to, int32_t ith, int32_t nth);

// Adds those of the job's queries whose token is `from` or a later one, scaled and turned back, to the moments of their heads.
// Thread ith of nth does its share of the heads.
void record_moments(const AttendJob & job, Observed & to, int32_t from, int32_t ith, int32_t nth, MomentsScratch & scratch);

int32_t prefill_tasks(const AttendJob & job, const Scratch & scratch);
void    prefill_task(const AttendJob & job, int32_t task, Scratch & scratch);

// Partial results of a decode over several splits of the keys.
class DecodePartials {
  public:
    bool reserve(const std::vector<LayerShape> & shapes, int32_t n_tokens, int32_t n_threads);
    void start(int32_t n_heads_kv);  // before each decode; not thread-safe

    std::vector<float>                      data;
    std::unique_ptr<std::atomic<int32_t>[]> done;  // [Hkv] splits finished
    int32_t                                 n_done = 0;
    int32_t                                 splits_max = 1;
};


constexpr int32_t DECODE_ROWS = 256;  // query rows (tokens x group) up to which the decode path is the faster one

int32_t decode_splits(const AttendJob & job, int32_t n_threads);
int32_t decode_tasks(const AttendJob & job, int32_t n_splits);
void    decode_task(const AttendJob & job, int32_t task, int32_t n_splits, DecodePartials & partials);

}  // namespace kvedge
