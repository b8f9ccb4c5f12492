// The state of each sequence: rows, plan, second pass, bounded prompt, statistics.

#pragma once

#include "attention/attention.h"
#include "compress/bounded.h"
#include "compress/compress.h"
#include "device/graph_rows.h"
#include "glue/layers.h"
#include "kvedge.h"
#include "plan/plan.h"
#include "sequence/sequence.h"
#include "system/reason.h"
#include "system/spill.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace kvedge {

// Softmax weights of a token that is decoded alone: of every layer if attention is watched, else of the layer at work. Also the scores
// before the weights are added.
struct TokenWeights {
    bool                            valid = false;  // the weights cover all layers, and belong to the present rows
    std::vector<std::vector<float>> weights;        // [layer or 1][H * rows]
    std::vector<int32_t>            rows;           // [layer or 1] floats per query head
    std::vector<double>             before;         // scores of all rows before the last ubatch that adds to them

    // Makes room for the sequence's last token, whose row is stored already. False: no memory.
    bool     reserve(const Store & store, bool every_layer);
    uint64_t bytes() const;
};

// The announcement of kvedge_bound_prompt: the next batch of the sequence is a whole prompt.
struct BoundedRequest {
    std::vector<uint8_t> image;  // [n_tokens]
};

// A chunk of a second pass over the prompt (kvedge_replay_begin): the sequence's tokens from n_old on belong to the pass.
struct Replay {
    ReplayScope scope;
    int32_t     n_old;      // tokens of the sequence before the pass
    int32_t     announced;  // announced tokens of the pass
    bool        has_uncompressed_prompt, output;  // ContinuationState::has_uncompressed_prompt and prev_output before the pass
    bool        spoiled = false;  // tokens were removed during the pass, so that `scope` does not fit the rows
};

// Tokens of an answer that come several at once (kvedge_verify_begin): the sequence's tokens from n_old on.
struct Verification {
    int32_t announced;
    int32_t n_old;  // tokens of the sequence before the verification
    bool    whole       = false;  // SequenceState::seq is the whole sequence, and Whole::seq the compressed one
    std::shared_ptr<GraphRows> device = nullptr;  // the compressed sequence's rows on devices, if `whole`
    int32_t window_from = 0;      // first token of the whole sequence's observed window, before the verification
};

// The state after the compression of a prompt. Made before the compression, so that nothing can fail after it.
struct Answer {
    kvedge_plan                       plan{};
    std::vector<std::vector<int32_t>> kept;  // [layer][head] numbers of rows; empty: the plan bounds no answer

    Answer() = default;
    Answer(const kvedge_plan & by, const std::vector<LayerShape> & shapes);  // Throws std::bad_alloc.
};

// The whole sequence behind a compressed one (glue/keeping.h).
struct Whole {
    std::unique_ptr<Sequence>              seq;                     // all its tokens are pending; NULL: no whole rows
    std::vector<std::shared_ptr<SpillJob>> jobs;                    // rows that are being written to the file
    uint64_t                               compression_number = 0;
    int32_t                                n_read = 0;  // tokens that the compression chose from
    Reason                                 problem;  // why requested whole rows are missing; empty: not missing, or not requested

    Whole() = default;
    Whole(Whole &&) = default;
    Whole & operator=(Whole && other) noexcept;
    ~Whole();  // does not wait for rows that are being written

    uint64_t bytes() const;       // of rows and of their observations
    uint64_t file_bytes() const;  // of rows in the file
};

// State that every ubatch changes.
struct UbatchState {
    bool    has_uncompressed_prompt = false;  // a prompt was read since the last compression
    bool    prev_output             = false;  // logits of the last token were requested
    bool    evicted                 = false;  // the rows that the next token displaces are dropped already
    int32_t expected                = 0;      // announced tokens that have not come (kvedge_expect)
};

// State that decides how a sequence goes on; a copy of the sequence has the same state.
struct ContinuationState : UbatchState {
    bool    streaming   = false;  // a stream: compressed rows stay pending (compress/stream.h)
    std::vector<TokenLimit> limits;  // limits of compressions (kvedge_limit_tokens)
    int32_t released    = 0;      // first tokens whose cells in llama.cpp's own cache are free

    // For decode policies: the state right after the last compression. `answer` is the plan of the answer.
    kvedge_plan                       answer{};
    int32_t                           prompt = 0;     // tokens of the sequence
    int32_t                           generated = 0;  // tokens generated since
    std::vector<std::vector<int32_t>> kept;           // [layer][head] rows; empty: nothing to drop

    void cut(int32_t n_tokens);  // adapts the state to n_tokens remaining tokens
};

// A sequence, and what automatic compression and statistics need to know about it.
struct SequenceState : ContinuationState {
    int32_t                   id = 0;
    std::unique_ptr<Sequence> seq;
    std::shared_ptr<GraphRows> device;  // rows of layers on devices; NULL: the store has all rows
    int32_t                   n_compressions = 0;
    uint64_t                  before_bytes = 0, after_bytes = 0, peak_bytes = 0;
    int64_t                   compress_us = 0;
    int32_t                   n_unfitted = 0, n_scant = 0;  // of the last compression
    DeviceWork                device_work;     // of the last compression, if rows lay on devices
    Reason                    device_problem;  // why the last compression ran on the host; empty: it did not, or no rows lay on devices
    TokenWeights              weights;
    Whole                     whole;

    std::unique_ptr<BoundedRequest> request;
    std::unique_ptr<BoundedPrompt>  bounded;  // from the announced batch to the next batch
    Answer                          next;     // the state after the bounded prompt

    std::unique_ptr<Replay> replay;        // a chunk of a second pass that was begun; runs point here
    int32_t                 replayed = 0;  // pending tokens that the chunks so far cover

    std::unique_ptr<Verification> verified;  // until kvedge_verify_end

    uint64_t device_bytes() const;  // of rows on devices, also of compressed rows while whole rows take their place
    uint64_t row_bytes() const { return seq->rows.bytes() + device_bytes(); }
    uint64_t score_bytes() const { return seq->score_bytes() + weights.bytes(); }
    void     note_peak();
    void     note_compression(Answer && next, const Compression & outcome, int32_t n_tokens) noexcept;
    void     bound_answer(Answer && next, int32_t n_tokens) noexcept;  // after the compression of n_tokens tokens
    void     end_answer();
    void     drop_bounded();       // removes a prompt that llama.cpp gave up half-way
    void     evict_generated();
    void     swap_whole();  // exchanges whole and compressed rows, for a verification or after it
    bool     whole_in_use() const { return verified && verified->whole; }
};

// Finished layers of bounded prompts, by sequence. Any thread may ask while another thread decodes.
class Progress {
  public:
    // Sets the prompt that the sequence reads now. Throws std::bad_alloc.
    void follow(int32_t seq_id, std::weak_ptr<const std::atomic<int32_t>> layers) {
        const std::lock_guard<std::mutex> hold(lock_);
        prompts_[seq_id] = std::move(layers);
    }

    int32_t of(int32_t seq_id) const {  // -1: no bounded prompt
        const std::lock_guard<std::mutex> hold(lock_);
        const auto                        it     = prompts_.find(seq_id);
        const auto                        layers = it == prompts_.end() ? nullptr : it->second.lock();
        return layers ? layers->load() : -1;
    }

  private:
    mutable std::mutex                                         lock_;
    std::map<int32_t, std::weak_ptr<const std::atomic<int32_t>>> prompts_;
};

// All sequences, by their numbers in llama.cpp.
class Sequences {
  public:
    explicit Sequences(const Layers & layers) : layers_(&layers) {}

    SequenceState &         open(int32_t id);  // adds an empty sequence if there is none. Throws std::bad_alloc.
    SequenceState *         find(int32_t id);  // NULL: the sequence holds nothing
    const SequenceState *   find(int32_t id) const { return const_cast<Sequences *>(this)->find(id); }
    const kvedge_plan &     plan_of(int32_t id) const;
    void                    set_plan(int32_t id, const kvedge_plan * plan);  // gives a sequence its own plan; NULL: the common plan

    kvedge_plan                      plan{};   // of sequences without their own plan
    Storage                          storage;  // types of new rows
    bool                             auto_compress = true;
    bool                             watching      = false;  // kvedge_watch
    std::map<int32_t, SequenceState> all;
    Progress                         progress;  // of bounded prompts

  private:
    const Layers *                 layers_;
    std::map<int32_t, kvedge_plan> own_plans_;  // also of empty sequences
};

}  // namespace kvedge
