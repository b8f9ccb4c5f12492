#include "world.h"

#include <random>

kvedge_devices World::usual_devices = KVEDGE_DEVICES_NONE;

static llama_context * make_context(llama_model * model) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = N_CTX;
    params.n_batch = params.n_ubatch = N_UBATCH;
    params.n_seq_max                 = N_SEQ;
    params.n_threads = params.n_threads_batch = N_THREADS;
    params.kv_unified                         = true;
    params.flash_attn_type                    = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * ctx                       = llama_init_from_model(model, params);
    CHECK(ctx);
    return ctx;
}

World::World(llama_model * m, const kvedge_plan * plan, kvedge_type type, kvedge_devices devices, kvedge_rotate rotate)
    : model(m), ctx(make_context(m)), next(N_SEQ, 0) {
    kvedge_options options;
    kvedge_error   err{};
    CHECK(kvedge_options_init(&options, sizeof(options), &err) == KVEDGE_OK);
    options.type    = type;
    options.devices = devices;
    options.rotate  = rotate;
    CHECK(good(kvedge_attach(ctx, plan, &options, &kv, &err), err));
}

World::World(llama_model * m, const kvedge_plan * plan, kvedge_type type, bool attached) : World(m, plan, type, usual_devices) {
    if (!attached) {
        kvedge_detach(kv);
        kv = nullptr;
    }
}

World::~World() {
    kvedge_detach(kv);
    llama_free(ctx);
}

bool World::good(kvedge_status status, const kvedge_error & err) const {
    if (status != KVEDGE_OK) {
        std::fprintf(stderr, "status %d: %s\n", (int) status, err.message);
    }
    return status == KVEDGE_OK;
}

static int run(World & w, llama_batch & batch, int32_t n, int32_t seq, bool each = false) {
    batch.n_tokens = n;
    for (int32_t i = 0; i < n; i++) {
        batch.pos[i]       = w.next[(size_t) seq] + i;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i]    = each || i + 1 == n;
    }
    const int code = llama_decode(w.ctx, batch);
    if (code == 0) {
        w.next[(size_t) seq] += n;
    }
    llama_batch_free(batch);
    return code;
}

int World::decode(const std::vector<llama_token> & tokens, int32_t seq) {
    const auto  n     = (int32_t) tokens.size();
    llama_batch batch = llama_batch_init(n, 0, 1);
    std::copy(tokens.begin(), tokens.end(), batch.token);
    return run(*this, batch, n, seq);
}

int World::decode_each(const std::vector<llama_token> & tokens, int32_t seq) {
    const auto  n     = (int32_t) tokens.size();
    llama_batch batch = llama_batch_init(n, 0, 1);
    std::copy(tokens.begin(), tokens.end(), batch.token);
    return run(*this, batch, n, seq, true);
}

int World::decode_image(int32_t n, int32_t seq) {
    const int32_t                   width = llama_model_n_embd_inp(model);
    std::mt19937                    rng(7);
    std::normal_distribution<float> normal(0.0f, 0.1f);
    llama_batch                     batch = llama_batch_init(n, width, 1);
    for (int32_t i = 0; i < n * width; i++) {
        batch.embd[i] = normal(rng);
    }
    return run(*this, batch, n, seq);
}

void World::answer(int32_t n, int32_t seq) {
    for (int32_t i = 0; i < n; i++) {
        CHECK(decode(words(model, 1, 100 + (uint32_t) i), seq) == 0);
    }
}

void World::clear() {
    llama_memory_clear(memory(), true);
    next.assign(N_SEQ, 0);
}

kvedge_stats World::stats(int32_t seq) const {
    kvedge_stats out{};
    kvedge_error err{};
    out.struct_size = sizeof(out);
    CHECK(good(kvedge_get_stats(kv, seq, &out, &err), err));
    return out;
}

std::vector<int32_t> World::kept(int32_t layer, int32_t head, int32_t seq) const {
    std::vector<int32_t> out((size_t) kvedge_head_length(kv, seq, layer, head));
    kvedge_error         err{};
    CHECK(out.empty() || good(kvedge_head_tokens(kv, seq, layer, head, out.data(), (int32_t) out.size(), &err), err));
    return out;
}

std::vector<float> World::logits(int32_t output) const {
    const float * first = llama_get_logits_ith(ctx, output);
    return { first, first + llama_vocab_n_tokens(llama_model_get_vocab(model)) };
}

std::vector<llama_token> words(const llama_model * model, int32_t n, uint32_t seed) {
    std::mt19937                           rng(seed);
    std::uniform_int_distribution<int32_t> any(3, llama_vocab_n_tokens(llama_model_get_vocab(model)) - 1);
    std::vector<llama_token>               out((size_t) n);
    for (auto & t : out) {
        t = any(rng);
    }
    return out;
}
