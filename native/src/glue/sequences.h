// What each sequence holds and how it goes on: rows, plan, second pass, bounded prompt, statistics.

#pragma once

#include "attention/attention.h"
#include "compress/bounded.h"
#include "compress/compress.h"
#include "device/graph_rows.h"
#include "glue/layers.h"
#include "kvedge.h"
#include "plan/plan.h"
#include "sequence/sequence.h"
#include "system/spill.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace kvedge {

// Softmax weights of a token that is decoded by itself: of every layer for whoever watches, else of the layer at work; and the scores
// that they are added to.
struct TokenWeights {
    bool                            valid = false;  // all layers are there, and the rows are those that the weights belong to
    std::vector<std::vector<float>> weights;        // [layer or 1][H * rows]
    std::vector<int32_t>            rows;           // [layer or 1] floats of a query head
    std::vector<double>             before;         // the scores of all rows before the last ubatch that adds to them

    // For the sequence's last token, which has its row already. False: no memory.
    bool     reserve(const Store & store, bool every_layer);
    uint64_t bytes() const;
};

// What kvedge_bound_prompt announced: the next batch of the sequence is a whole prompt.
struct BoundedRequest {
    std::vector<uint8_t> image;  // [n_tokens]
};

// A chunk of a second pass over the prompt (kvedge_replay_begin): the sequence's tokens from n_old on are the pass's.
struct Replay {
    ReplayScope scope;
    int32_t     n_old;      // tokens of the sequence before the pass
    int32_t     announced;  // tokens of the pass
    bool        armed, output;  // Course::armed and prev_output, as they were
    bool        spoiled = false;  // tokens were removed meanwhile, so that rows are not what scope says
};

// Tokens of an answer that come several at once (kvedge_verify_begin): the sequence's tokens from n_old on.
struct Verification {
    int32_t announced;
    int32_t n_old;  // tokens of the sequence before them
    bool    whole       = false;  // the sequence is the whole one meanwhile, and Whole::seq the compressed one
    std::shared_ptr<GraphRows> device = nullptr;  // the compressed one's, meanwhile
    int32_t window_from = 0;      // of what was observed of the whole one
};

// What follows the compression of a prompt: made before it, so that nothing can fail after it.
struct Answer {
    kvedge_plan                       plan{};
    std::vector<std::vector<int32_t>> kept;  // [layer][head] room for rows; empty where the plan bounds no answer

    Answer() = default;
    Answer(const kvedge_plan & by, const std::vector<LayerShape> & shapes);  // Throws std::bad_alloc.
};

// A sequence as it was before it was compressed, behind the compressed one (glue/keeping.h).
struct Whole {
    std::unique_ptr<Sequence>              seq;      // all its tokens are pending; NULL: there is none
    std::vector<std::shared_ptr<SpillJob>> jobs;     // rows that are being written
    uint64_t                               turn = 0; // of the compression
    int32_t                                n_read = 0;  // tokens that the compression was of
    std::string                            problem;  // why there is none although it was asked for; empty: there is, or it was not

    Whole() = default;
    Whole(Whole &&) = default;
    Whole & operator=(Whole && other) noexcept;
    ~Whole();  // nobody waits for what is being written

    uint64_t bytes() const;       // of rows and of what was observed
    uint64_t file_bytes() const;  // of the rows among them that lie in a file
};

// What every ubatch changes.
struct OnItsWay {
    bool    armed       = false;  // a prompt came in since the last compression
    bool    prev_output = false;  // logits of the last token were asked for
    bool    evicted     = false;  // the rows that the next token displaces are gone, and it has not come
    int32_t expected    = 0;      // tokens that were announced and have not come
};

// What decides how a sequence goes on; a copy of the sequence goes on in the same way.
struct Course : OnItsWay {
    bool    streaming   = false;  // what is compressed stays pending (compress/stream.h)
    std::vector<TokenLimit> limits;  // of compressions
    int32_t released    = 0;      // first tokens whose cells in llama.cpp's own cache are free again

    // For decode policies: the state right after the last compression, whose plan the answer follows.
    kvedge_plan                       answer{};
    int32_t                           prompt = 0;     // tokens of the sequence
    int32_t                           generated = 0;  // tokens since
    std::vector<std::vector<int32_t>> kept;           // [layer][head] rows; empty: none, or nothing to drop

    void cut(int32_t n_tokens);  // n_tokens are left of the sequence
};

// A sequence, and what automatic compression and statistics need to know about it.
struct SequenceState : Course {
    int32_t                   id = 0;
    std::unique_ptr<Sequence> seq;
    std::shared_ptr<GraphRows> device;  // the rows of layers on devices, while they are there; NULL: the store has them
    int32_t                   n_compressions = 0;
    uint64_t                  before_bytes = 0, after_bytes = 0, peak_bytes = 0;
    int64_t                   compress_us = 0;
    int32_t                   n_unfitted = 0, n_scant = 0;  // of the last compression
    DeviceWork                device_work;     // of the last compression, of rows on devices
    std::string               device_problem;  // why these were compressed on the host; empty: they were not, or there were none
    TokenWeights              weights;
    Whole                     whole;

    std::unique_ptr<BoundedRequest> request;
    std::unique_ptr<BoundedPrompt>  bounded;  // from the announced batch to the next one
    Answer                          next;     // of the bounded prompt

    std::unique_ptr<Replay> replay;        // while one is read; runs of it point here
    int32_t                 replayed = 0;  // pending tokens that chunks so far were about

    std::unique_ptr<Verification> verified;  // until kvedge_verify_end

    uint64_t device_bytes() const;  // of rows on devices, also of compressed ones while whole ones take their place
    uint64_t row_bytes() const { return seq->rows.bytes() + device_bytes(); }
    uint64_t score_bytes() const { return seq->score_bytes() + weights.bytes(); }
    void     note_peak();
    void     note_compression(Answer && next, const Compression & outcome, int32_t n_tokens) noexcept;
    void     bound_answer(Answer && next, int32_t n_tokens) noexcept;  // after the compression of n_tokens
    void     end_answer();
    void     drop_bounded();       // a prompt that llama.cpp gave up half-way
    void     evict_generated();
    void     turn();  // whole and compressed rows change places, for a verification or after it
    bool     turned() const { return verified && verified->whole; }
};

// Layers that bounded prompts have behind them, by sequence: any thread may ask, while another decodes.
class Progress {
  public:
    // The prompt that the sequence reads now, until it is gone. Throws std::bad_alloc.
    void follow(int32_t seq_id, std::weak_ptr<const std::atomic<int32_t>> layers) {
        const std::lock_guard<std::mutex> hold(lock_);
        prompts_[seq_id] = std::move(layers);
    }

    int32_t of(int32_t seq_id) const {  // -1: none
        const std::lock_guard<std::mutex> hold(lock_);
        const auto                        it     = prompts_.find(seq_id);
        const auto                        layers = it == prompts_.end() ? nullptr : it->second.lock();
        return layers ? layers->load() : -1;
    }

  private:
    mutable std::mutex                                         lock_;
    std::map<int32_t, std::weak_ptr<const std::atomic<int32_t>>> prompts_;
};

// All of them, by their numbers in llama.cpp.
class Sequences {
  public:
    explicit Sequences(const Layers & layers) : layers_(&layers) {}

    SequenceState &         open(int32_t id);  // an empty one if there is none. Throws std::bad_alloc.
    SequenceState *         find(int32_t id);  // NULL: it holds nothing
    const SequenceState *   find(int32_t id) const { return const_cast<Sequences *>(this)->find(id); }
    const kvedge_plan &     plan_of(int32_t id) const;
    void                    set_plan(int32_t id, const kvedge_plan * plan);  // of one; NULL: it has the common plan

    kvedge_plan                      plan{};   // of those that have none of their own
    Storage                          storage;  // of rows that are added
    bool                             auto_compress = true;
    bool                             watching      = false;  // kvedge_watch
    std::map<int32_t, SequenceState> all;
    Progress                         progress;  // of bounded prompts

  private:
    const Layers *                 layers_;
    std::map<int32_t, kvedge_plan> own_plans_;  // also of sequences that are empty
};

}  // namespace kvedge
