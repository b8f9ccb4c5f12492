// Shared code of the scenarios: contexts of a tiny model with a cache attached, plans, and batches.

#pragma once

#include "../check.h"
#include "kvedge.h"
#include "llama.h"

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

struct Plan {
    using Fields = std::initializer_list<std::pair<const char *, const char *>>;

    explicit Plan(Fields fields) {
        kvedge_plan_create(&plan, nullptr);
        for (const auto & [key, value] : fields) {
            set(key, value);
        }
    }
    ~Plan() { kvedge_plan_free(plan); }
    Plan(const Plan &)             = delete;
    Plan & operator=(const Plan &) = delete;

    void set(const char * key, const char * value) {
        kvedge_error err{};
        if (kvedge_plan_set(plan, key, value, &err) != KVEDGE_OK) {
            std::fprintf(stderr, "plan: %s\n", err.message);
            CHECK(!"the plan takes the field");
        }
    }

    kvedge_plan * plan = nullptr;
};

// A context with a cache. A scenario may free the context or the cache before the World ends, in any order.
struct World {
    World(llama_model * model, const kvedge_plan * plan, kvedge_type type = KVEDGE_TYPE_F16, bool attached = true);
    World(llama_model * model, const kvedge_plan * plan, kvedge_type type, kvedge_devices devices,
          kvedge_rotate rotate = KVEDGE_ROTATE_AUTO);
    ~World();
    World(const World &)             = delete;
    World & operator=(const World &) = delete;

    // Decode tokens (or n random embeddings) at position `next`, with logits for the last token. Return the code of llama_decode.
    int  decode(const std::vector<llama_token> & tokens, int32_t seq = 0);
    int  decode_each(const std::vector<llama_token> & tokens, int32_t seq = 0);  // with logits for every token
    int  decode_image(int32_t n, int32_t seq = 0);
    void answer(int32_t n, int32_t seq = 0);  // decodes n tokens one by one
    void clear();

    kvedge_stats         stats(int32_t seq = 0) const;
    std::vector<int32_t> kept(int32_t layer, int32_t head, int32_t seq = 0) const;
    std::vector<float>   logits(int32_t output = -1) const;  // logits of an output of the last batch; -1: the last output
    llama_memory_t       memory() const { return llama_get_memory(ctx); }
    bool                 good(kvedge_status status, const kvedge_error & err) const;  // whether status is OK; else prints the message

    // The default of kvedge_options.devices in the scenarios: every scenario runs with rows on the host, and again with rows that
    // ggml attends to.
    static kvedge_devices usual_devices;

    llama_model *          model;
    llama_context *        ctx = nullptr;
    kvedge_cache *         kv  = nullptr;
    std::vector<llama_pos> next;  // [sequence] position of the next token
};

std::vector<llama_token> words(const llama_model * model, int32_t n, uint32_t seed);

// Whether to run fewer scenarios with rows on devices. Under the thread sanitizer ggml's threads, which wait in busy loops, need
// minutes instead of seconds.
#if defined(__SANITIZE_THREAD__)
constexpr bool FEWER = true;
#else
constexpr bool FEWER = false;
#endif

constexpr int32_t N_SEQ = 4, N_CTX = 1024, N_UBATCH = 256, N_THREADS = 2, PROMPT = 96;

// The scenarios. folder: for files.
void every_member(llama_model * model);
void critical_rule(llama_model * model);
void as_without_a_cache(llama_model * model);
void sequences(llama_model * model);
void turns_and_files(llama_model * model, const std::string & folder);
void whole_files(llama_model * model, const std::string & folder);
void parts_and_files(llama_model * model, const std::string & folder);
void bounded_prompts(llama_model * model);
void streams(llama_model * model);
void second_passes(llama_model * model);
void passes_in_parts(llama_model * model);
void passes_alone(llama_model * model);
void scores_of_a_stream(llama_model * model);
void drafts(llama_model * model, const std::string & folder);
void storage_types(llama_model * model);
void own_stages(llama_model * model);
void given_up(llama_model * model);
void gone_on(llama_model * model);
void answers_gone_on(llama_model * model);
void several_threads(llama_model * model);
void devices(llama_model * model, const std::string & folder);
void ends(llama_model * model);
void no_memory(llama_model * model, const std::string & folder);
void no_memory_on_devices(llama_model * model);
