// Bounded prefill: a prompt runs through the model in one pass, and each layer is compressed before the next layer runs.
// A layer keeps the same rows as if the whole prompt were compressed at its end. The peak of memory is the kept rows plus one
// layer of the whole prompt.
//
// Some allocators need the scores of all layers. For them, every head keeps its PROVISIONAL x budget best pairs until the
// last layer has run, and is trimmed to its budget then. No head can get a larger budget than PROVISIONAL x budget.

#pragma once

#include "compress/compress.h"
#include "compress/job.h"

#include <atomic>
#include <memory>

namespace kvedge {

constexpr int32_t PROVISIONAL = 2;

// Checks that the plan can compress a layer before the next layer runs, or can trim provisional rows. Quantised rows are not
// trimmed, because they would be rounded twice. Errors: KVEDGE_E_UNSUPPORTED, with the name of the stage that prevents it.
kvedge_status check_bounded(const kvedge_plan & plan, const Storage & storage, kvedge_error * err);

class BoundedPrompt {
  public:
    // plan: the result of compression_plan for the tokens of this prompt.
    BoundedPrompt(Sequence & seq, const kvedge_plan & plan) : seq_(seq), plan_(plan), wanted_(plan_observes(plan)) {}

    // Returns whether a prompt of n more tokens would be compressed or quantised. Without either, a bounded prefill saves nothing.
    static bool pays(const Sequence & seq, const kvedge_plan & plan, int32_t n);

    // Enters n tokens and takes memory for their rows in the first layer. image [n]: 1 for an image token.
    // A failure changes nothing. Errors: KVEDGE_E_STATE, KVEDGE_E_MEMORY.
    kvedge_status enter(int32_t n, const int32_t * pos, const uint8_t * image, kvedge_error * err);

    // Call after the attention of each layer, in layer order. Compresses the layer, frees its old rows and takes memory for the
    // next layer. The last layer completes the prompt. No other thread may use the sequence meanwhile.
    // After a failure only abandon() may be called. Errors: KVEDGE_E_MEMORY, KVEDGE_E_STAGE, KVEDGE_E_STATE.
    kvedge_status finish_layer(size_t layer, kvedge_error * err) noexcept;

    // Removes an incomplete prompt from the sequence. Does nothing after the last layer.
    void abandon();

    int32_t             layers() const { return *layers_; }  // number of finished layers
    bool                done() const { return done_; }
    bool                failed() const { return failed_; }
    int32_t             n_tokens() const { return n_pending_; }
    const Observation & wanted() const { return wanted_; }
    const Compression & outcome() const { return outcome_; }

    // Returns the counter behind layers(), for other threads. It expires with this object.
    std::weak_ptr<const std::atomic<int32_t>> progress() const { return layers_; }

  private:
    bool          make_layer_room(size_t layer, int32_t n);  // room for observations, n tokens not entered yet; false: no memory
    kvedge_status compress_layer(size_t layer, kvedge_error * err);
    bool          trim();
    bool          trim_layer(const Block & from, size_t layer, const std::vector<std::vector<int32_t>> & left);
    void          note_peak();
    void          complete();

    Sequence &           seq_;
    const kvedge_plan    plan_;
    const Observation    wanted_;
    std::unique_ptr<Job> job_;
    Compression          outcome_;
    int32_t              n_         = 0;  // tokens of the prompt
    int32_t              n_pending_ = 0;  // pending tokens, the prompt included
    uint64_t             written_   = 0;  // bytes of the new blocks so far

    const std::shared_ptr<std::atomic<int32_t>> layers_ = std::make_shared<std::atomic<int32_t>>(0);

    bool                 reduced_ = false, provisional_ = false, done_ = false, failed_ = false;
};

}  // namespace kvedge
