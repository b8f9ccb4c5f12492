// What the scenarios share: a tiny model, contexts with a cache attached, plans, and batches.

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

// A context with a cache. Ends in either order: the context or the cache first.
struct World {
    World(llama_model * model, const kvedge_plan * plan, kvedge_type type = KVEDGE_TYPE_F16, bool attached = true);
    World(llama_model * model, const kvedge_plan * plan, kvedge_type type, kvedge_devices devices,
          kvedge_rotate rotate = KVEDGE_ROTATE_AUTO);
    ~World();
    World(const World &)             = delete;
    World & operator=(const World &) = delete;

    // llama_decode of the tokens, or of as many made-up embeddings; logits are asked for of the last one. Goes on at `next`.
    int  decode(const std::vector<llama_token> & tokens, int32_t seq = 0);
    int  decode_each(const std::vector<llama_token> & tokens, int32_t seq = 0);  // logits are asked for of every one
    int  decode_image(int32_t n, int32_t seq = 0);
    void answer(int32_t n, int32_t seq = 0);  // tokens one by one
    void clear();

    kvedge_stats         stats(int32_t seq = 0) const;
    std::vector<int32_t> kept(int32_t layer, int32_t head, int32_t seq = 0) const;
    std::vector<float>   logits(int32_t output = -1) const;  // of a token of the last batch; -1: the last one
    llama_memory_t       memory() const { return llama_get_memory(ctx); }
    bool                 good(kvedge_status status, const kvedge_error & err) const;  // says the message where it is not

    // Where the rows of caches lie that are attached without saying so: every scenario runs with rows on the host, and again
    // with rows that ggml attends to.
    static kvedge_devices usual_devices;

    llama_model *          model;
    llama_context *        ctx = nullptr;
    kvedge_cache *         kv  = nullptr;
    std::vector<llama_pos> next;  // [sequence] position of the next token
};

std::vector<llama_token> words(const llama_model * model, int32_t n, uint32_t seed);

// Under the thread sanitizer ggml's threads, which wait for each other in loops, take minutes for what takes seconds: rows on
// devices run fewer scenarios there.
#if defined(__SANITIZE_THREAD__)
constexpr bool FEWER = true;
#else
constexpr bool FEWER = false;
#endif

constexpr int32_t N_SEQ = 4, N_CTX = 1024, N_UBATCH = 256, N_THREADS = 2, PROMPT = 96;

// The scenarios; `folder` is for files.
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
