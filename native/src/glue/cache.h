// kvedge_cache: the attention provider of one llama_context. The only part of the library that knows llama.cpp.

#pragma once

#include "attention/attention.h"
#include "device/graph_rows.h"
#include "compress/bounded.h"
#include "system/claim.h"
#include "compress/compress.h"
#include "compress/observe.h"
#include "plan/plan.h"
#include "compress/projection.h"
#include "sequence/sequence.h"
#include "glue/intermediate.h"
#include "kvedge.h"
#include "llama-attn-provider.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace kvedge {

// Softmax weights of a token that is decoded by itself: of every layer for whoever watches, else of the layer at work.
struct TokenWeights {
    bool                            valid = false;  // all layers are there, and the rows are those that the weights belong to
    std::vector<std::vector<float>> weights;        // [layer or 1][H * rows]
    std::vector<int32_t>            rows;           // [layer or 1] floats of a query head

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

// What follows the compression of a prompt: made before it, so that nothing can fail after it.
struct Answer {
    kvedge_plan                       plan{};
    std::vector<std::vector<int32_t>> kept;  // [layer][head] room for rows; empty where the plan bounds no answer

    Answer() = default;
    Answer(const kvedge_plan & by, const std::vector<LayerShape> & shapes);  // Throws std::bad_alloc.
};

// What decides how a sequence goes on; a copy of the sequence goes on in the same way.
struct Course {
    bool    armed       = false;  // a prompt came in since the last compression
    bool    prev_output = false;  // logits of the last token were asked for
    bool    streaming   = false;  // what is compressed stays pending (glue/stream.cpp)
    int32_t expected    = 0;      // tokens that were announced and have not come
    bool    evicted     = false;  // the rows that the next token displaces are gone, and it has not come
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

    std::unique_ptr<BoundedRequest> request;
    std::unique_ptr<BoundedPrompt>  bounded;  // from the announced batch to the next one
    Answer                          next;     // of the bounded prompt

    std::unique_ptr<Replay> replay;        // while one is read; runs of it point here
    int32_t                 replayed = 0;  // pending tokens that chunks so far were about

    uint64_t row_bytes() const { return seq->rows.bytes() + (device ? device->bytes() : 0); }
    uint64_t score_bytes() const { return seq->score_bytes() + weights.bytes(); }
    void     note_peak();
    void     note_compression(Answer && next, const Compression & outcome, int32_t n_tokens) noexcept;
    void     bound_answer(Answer && next, int32_t n_tokens) noexcept;  // after the compression of n_tokens
    void     end_answer();
    void     drop_bounded();  // a prompt that llama.cpp gave up half-way
    void     evict_generated();
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

// The tokens of one sequence in the current ubatch.
struct Run {
    SequenceState *      state;
    std::vector<int32_t> index;  // their places in the ubatch
    Observation          wanted; // of a prompt that the plan may compress: what is gathered
    bool                 decode; // few rows: the decode path
    bool                 watch;  // a single token whose attention somebody wants to see
    bool                 score;  // add its attention to the scores of rows that are there already
    bool                 prompt;
    bool                 output;  // logits of its last token are asked for
    bool                 entered = false;   // its tokens are in the store
    std::vector<uint8_t> modality = {};     // of the pending tokens, where queries are kept
    std::vector<int32_t> places = {};       // [PLACES][tokens] positions that turn them, where they have several and it matters
    const ReplayScope *  replay = nullptr;  // its tokens are those of a second pass, which nothing but that is to see
    bool                 watched; // its plan is to choose among these tokens
    std::unique_ptr<BoundedRequest> request;  // announced for it
    bool                            pays;     // to bound it
    std::shared_ptr<GraphRows>      device;   // as the sequence's; graphs that were built hold its tensors
    BoundedPrompt *      bounded = nullptr;  // which is compressed layer by layer; NULL: not so
    DecodePartials       partials;
};

inline std::vector<int32_t> positions(const llama_attn_provider_ubatch & ubatch, const Run & run) {
    std::vector<int32_t> pos;
    pos.reserve(run.index.size());
    for (int32_t i : run.index) {
        pos.push_back(ubatch.pos[i]);
    }
    return pos;
}

// What the operations of one layer are given as user data.
struct LayerOp {
    kvedge_cache * kv;
    int32_t        layer;  // index into shapes
    float          scale;
    int32_t        reader = -1;  // the number of a layer that has no rows and reads those of `layer`; -1: `layer` itself
};

}  // namespace kvedge

struct kvedge_cache {
    llama_context *     ctx = nullptr;  // NULL once llama.cpp has freed it
    llama_attn_provider provider{};
    kvedge_plan         plan{};
    kvedge::Storage     storage;
    int32_t             n_threads     = 0;
    int32_t             most_threads  = 1;  // that the context has computed with
    bool                auto_compress = true;
    bool                watching      = false;

    int32_t                                       model_layers = 0;  // of the model, stored or not
    std::vector<kvedge::LayerShape>               shapes;
    std::vector<std::unique_ptr<kvedge::LayerOp>> ops;  // as shapes; the graphs keep their addresses
    std::vector<std::unique_ptr<kvedge::LayerOp>> readers;            // of layers that read another layer's rows; likewise
    bool                                          shares_kv = false;  // a layer cannot read the rows of the one that it shares with
    bool                                          declined  = false;  // a full-attention layer stayed with llama.cpp
    bool                                          entering  = false;  // the token being decoded is a place holder
    bool                                          releasing = false;  // what llama.cpp removes are its cells only

    // Layers on devices (glue/devices.cpp).
    kvedge_devices                        devices = KVEDGE_DEVICES_AUTO;
    kvedge_rotate                         rotate  = KVEDGE_ROTATE_AUTO;  // as it was asked for; storage says what became of it
    std::vector<ggml_backend_dev_t>       places;            // as shapes; NULL: rows and attention are the host's
    std::shared_ptr<kvedge::Rotations>    rotations = std::make_shared<kvedge::Rotations>();  // as shapes
    std::shared_ptr<kvedge::Projections>  projections;       // as shapes
    std::vector<std::vector<float>>       sinks;             // as shapes: logits of a layer's sinks, of layers on devices
    bool                                  on_devices = false; // the current ubatch attends there
    uint64_t                              stamps     = 0;
    std::vector<kvedge::GraphRows::Signature> wanted_graph, built_graph;
    std::vector<std::shared_ptr<kvedge::GraphRows>> running;  // of earlier ubatches, whose graphs may run still

    std::map<int32_t, kvedge::SequenceState> seqs;
    std::map<int32_t, kvedge_plan>           own_plans;  // of sequences that have one, also while they are empty
    kvedge::Progress                         progress;   // of bounded prompts

    // The current ubatch.
    std::vector<std::unique_ptr<kvedge::Run>> runs;
    bool                                      causal   = true;
    int32_t                                   n_tokens = 0;
    std::vector<kvedge::Scratch>              scratch;  // one per thread
    std::vector<kvedge::MomentsScratch>       turning;  // likewise
    std::unique_ptr<kvedge::SpinLock[]>       locks;
    std::atomic<int32_t>                      next_task{ 0 };
    std::atomic<int32_t>                      finished{ 0 };  // pieces of a bounded prompt's layer

    // Of the last graph that ran. Only a graph that is built can move them: they are forgotten then.
    kvedge::Intermediate intermediate;

    kvedge_error error{};  // the first that llama_decode could not report

    std::atomic<bool> refused{ false };  // a second thread's call inside llama.cpp, which could not report it either

    mutable kvedge::Owner owner;  // the thread in a call, or in a ubatch

    ggml_tensor * build_attn(const llama_attn_provider_layer & layer);
    int           ubatch_begin(const llama_attn_provider_ubatch & ubatch);
    void          seq_rm(int32_t seq_id, int32_t p0, int32_t p1);
    bool          seq_cp(int32_t from, int32_t to, int32_t p0, int32_t p1);
    void          seq_keep(int32_t seq_id);

    kvedge::SequenceState & open(int32_t seq_id);  // the sequence, an empty one if there is none. Throws std::bad_alloc.
    const kvedge_plan &     plan_of(int32_t seq_id) const;

    kvedge_status compress(kvedge::SequenceState & state, kvedge_error * err);
    // What compresses the sequence's rows on devices; NULL: the host, and the sequence's device_problem says why.
    kvedge::AwayRows * compressor(kvedge::SequenceState & state, const kvedge_plan & plan) const;
    kvedge_status compress_rows(kvedge::SequenceState & state, kvedge::Compression & outcome, kvedge_error * err);
    kvedge_status compress_stream(kvedge::SequenceState & state, kvedge_error * err);
    void          release_cells(int32_t seq_id, kvedge::SequenceState & state);
    int32_t       threads() const;
    void          finish_layer(kvedge::SequenceState & state, int32_t layer) noexcept;  // of its bounded prompt
    int           report(kvedge_status status, const char * what);             // the first is kept for kvedge_take_error; -1

    // Rows that are on devices come to the host, before anything but a graph looks at them. False: no memory.
    bool to_host(kvedge::SequenceState & state);
    int32_t set_provider();  // llama_set_attn_provider
    // Ends when no graph runs: before the sequences change. The last ubatch is over then.
    void settle();
    void wait();  // the same while the next ubatch begins
    // What graphs left on devices of a sequence's prompt comes to the host, before anybody looks at it: bytes that were fetched.
    // They throw std::bad_alloc.
    uint64_t read_queries(kvedge::SequenceState & state);
    uint64_t read_sums(kvedge::SequenceState & state);

  private:
    bool collect_runs(const llama_attn_provider_ubatch & ubatch);
    void note_places(const llama_attn_provider_ubatch & ubatch, kvedge::Run & run) const;
    bool prepare_run(const llama_attn_provider_ubatch & ubatch, kvedge::Run & run);
    uint32_t device_layers() const;
    uint32_t device_nodes() const;  // of a graph, that the attention of layers on devices may take
    bool     even(const kvedge::SequenceState & state) const;
    bool fits_devices(const kvedge::Run & run, bool even) const;
    bool place_runs();
    bool to_device(kvedge::SequenceState & state, bool prompt);
    bool needed_on_host(kvedge::SequenceState & state);
    bool reserve_on_device(kvedge::Run & run);
    bool report_full(const kvedge::GraphRows & device, int32_t n);  // which had no memory for n tokens; false
    int  finish_begin();
    void add_layer(const llama_attn_provider_layer & layer);
    ggml_tensor * build_reader(const llama_attn_provider_layer & layer);
    ggml_backend_dev_t place_of(const llama_attn_provider_layer & layer) const;
    ggml_tensor *      build_on_device(const llama_attn_provider_layer & layer, size_t at);
    void               begin_another();       // the last ubatch's graph may run on
    bool               one_at_a_time() const;  // no more graphs of llama.cpp's run than one
    uint32_t           summing_nodes(size_t runs) const;
    void               note_queries(kvedge::SequenceState & state, size_t layer, int32_t n, const std::vector<float> & queries);
    void               note_sums(kvedge::SequenceState & state, size_t layer, int32_t rows, const kvedge::AttentionSums & sums);
    // Room for the rows of a run and for what is gathered of it; request: of a bounded prompt that is read as any other, or NULL.
    bool store_runs(const llama_attn_provider_ubatch & ubatch);
    void take_back_runs() noexcept;
    void go_on(kvedge::Run & run);
    bool store_run(const llama_attn_provider_ubatch & ubatch, kvedge::Run & run);
    bool enter_bounded(const llama_attn_provider_ubatch & ubatch, kvedge::Run & run, const std::vector<uint8_t> & image);
    bool end_bounded(kvedge::SequenceState & state);
    bool decodes(const kvedge::Run & run) const;
    bool reserve_scratch();
    bool reserve_turning();
    void release_scratch();         // attention's own
    void release_working_memory();  // and llama.cpp's: between two ubatches, when a prompt is complete
};

namespace kvedge {

// What a caller reads of a sequence's rows: on the host. Errors: KVEDGE_E_MEMORY.
kvedge_status rows_at_hand(const kvedge_cache & kv, const SequenceState & state, kvedge_error * err);

// Takes a bounded prompt that failed out of the sequence; says once more that it did.
kvedge_status fail_bounded(SequenceState & state, kvedge_error * err);

kvedge_status fail_replaying(kvedge_error * err);  // a chunk of a second pass was begun and not ended
kvedge_status fail_busy(kvedge_error * err);  // another thread is the owner

// What a caller of the C interface names. kv may be NULL; no such sequence: NULL.
inline const SequenceState * find_seq(const kvedge_cache * kv, int32_t seq_id) {
    if (!kv) {
        return nullptr;
    }
    const auto it = kv->seqs.find(seq_id);
    return it == kv->seqs.end() || !it->second.seq ? nullptr : &it->second;
}

inline bool is_layer(const kvedge_cache & kv, int32_t i) { return i >= 0 && (size_t) i < kv.shapes.size(); }

inline bool is_head(const kvedge_cache & kv, int32_t i, int32_t head) {
    return is_layer(kv, i) && head >= 0 && head < kv.shapes[(size_t) i].n_heads_kv;
}

// The two operations of a layer in the graph; see ggml_custom_4d.
void store_op(ggml_tensor * dst, int ith, int nth, void * layer_op);   // src: k, v
void start_op(ggml_tensor * dst, int ith, int nth, void * layer_op);   // src: q; in its place, of a layer that stores nothing
void attend_op(ggml_tensor * dst, int ith, int nth, void * layer_op);  // src: q, the result of either, sinks (optional)

}  // namespace kvedge
