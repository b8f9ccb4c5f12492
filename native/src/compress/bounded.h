// Bounded prefill: a prompt that goes through the model in one pass, and of which every layer is compressed before the next
// one runs. What a layer keeps is what it would have kept had the whole prompt been compressed at its end; the peak is what
// is kept and one layer of the whole prompt.
//
// An allocator that wants the scores of all layers before it grants a budget to the first gets them: until the last layer has
// run every head keeps its PROVISIONAL x budget best pairs, and is trimmed then. No head can be granted more than those.

#pragma once

#include "compress/compress.h"
#include "compress/job.h"

#include <atomic>
#include <memory>

namespace kvedge {

constexpr int32_t PROVISIONAL = 2;

// Whether the plan can decide a layer before the next one ran, or trim what it kept provisionally (not of quantised rows,
// which would be rounded twice). Errors: KVEDGE_E_UNSUPPORTED, with the stage that cannot.
kvedge_status check_bounded(const kvedge_plan & plan, const Storage & storage, kvedge_error * err);

class BoundedPrompt {
  public:
    // plan: as compression_plan gives it for the tokens to come.
    BoundedPrompt(Sequence & seq, const kvedge_plan & plan) : seq_(seq), plan_(plan), wanted_(plan_observes(plan)) {}

    // Whether n more tokens would be compressed at all; where not, there is nothing to gain.
    static bool pays(const Sequence & seq, const kvedge_plan & plan, int32_t n);

    // Enters the n tokens and makes room for them in the first layer. image [n]: 1 for an image token.
    // A failure leaves the sequence as it was. Errors: KVEDGE_E_STATE, KVEDGE_E_MEMORY.
    kvedge_status enter(int32_t n, const int32_t * pos, const uint8_t * image, kvedge_error * err);

    // The attention of a layer, one after the other, is done: compresses it, gives its rows back and makes room in the next.
    // The last layer completes the prompt. For one thread, with nobody else at the sequence.
    // After a failure nothing can be gone on with but abandon(). Errors: KVEDGE_E_MEMORY, KVEDGE_E_STAGE.
    kvedge_status finish_layer(size_t layer, kvedge_error * err) noexcept;

    // Takes the prompt back out of the sequence, as far as it got.
    void abandon();

    int32_t             layers() const { return *layers_; }  // behind it
    bool                done() const { return done_; }
    bool                failed() const { return failed_; }
    int32_t             n_tokens() const { return n_pending_; }
    const Observation & wanted() const { return wanted_; }
    const Compression & outcome() const { return outcome_; }

    // The same number for other threads, as long as the prompt is there.
    std::weak_ptr<const std::atomic<int32_t>> progress() const { return layers_; }

  private:
    bool          make_layer_room(size_t layer, int32_t n);  // of n tokens that are not entered yet; false: no memory
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
    int32_t              n_pending_ = 0;  // and what was pending before it
    uint64_t             written_   = 0;  // bytes of the new blocks so far

    const std::shared_ptr<std::atomic<int32_t>> layers_ = std::make_shared<std::atomic<int32_t>>(0);

    bool                 reduced_ = false, provisional_ = false, done_ = false, failed_ = false;
};

}  // namespace kvedge
