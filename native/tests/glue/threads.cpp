// Calls from several threads, requests that are aborted, and the ends of contexts and caches.

#include "world.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <thread>

// While one thread decodes, calls of a second thread succeed or report that the cache is busy.
void several_threads(llama_model * model) {
    Plan              plan({ { "scorer", "mixkv" }, { "scorer.window", "8" }, { "reducer", "pivotal" }, { "budget", "0.25" } });
    World             w(model, plan.plan);
    std::atomic<bool> over{ false };
    std::thread       other([&] {
        std::vector<int32_t> tokens(N_CTX);
        std::vector<float>   floats(1 << 20);
        kvedge_stats         stats{};
        stats.struct_size = sizeof(stats);
        const auto fine   = [](kvedge_status s) { return s == KVEDGE_OK || s == KVEDGE_E_STATE || s == KVEDGE_E_ARGUMENT; };
        while (!over) {
            kvedge_error err{};
            int32_t      h, hkv, dk, dv;
            CHECK(kvedge_bounded_layers(w.kv, 0) >= -1);
            CHECK(fine(kvedge_get_stats(w.kv, 0, &stats, &err)));
            CHECK(fine(kvedge_head_tokens(w.kv, 0, 0, 0, tokens.data(), N_CTX, &err)));
            CHECK(fine(kvedge_layer_shape(w.kv, 0, &h, &hkv, &dk, &dv, &err)));
            CHECK(fine(kvedge_pending_scores(w.kv, 0, 0, floats.data(), 1 << 20, &err)));
            CHECK(fine(kvedge_set_plan(w.kv, plan.plan, &err)));
            CHECK(fine(kvedge_set_auto_compress(w.kv, true, &err)));
            CHECK(kvedge_layer_id(w.kv, 0) >= -1 && kvedge_query_heads(w.kv, 0) >= -1 && kvedge_cells(w.kv, 0) >= -1);
            CHECK(kvedge_head_length(w.kv, 0, 0, 0) >= -1);
            CHECK(fine(kvedge_check_kernels(kvedge_simd(), &err)));
            CHECK(kvedge_load_backends(&err) == KVEDGE_OK);
        }
    });
    for (uint32_t i = 0; i < 6; i++) {
        kvedge_error err{};
        const auto   tokens = words(model, PROMPT, i);
        if (i % 2 == 0) {
            while (kvedge_bound_prompt(w.kv, 0, nullptr, PROMPT, &err) == KVEDGE_E_STATE) {
            }
        }
        CHECK(w.decode(tokens) == 0);
        w.answer(4);
        w.clear();
    }
    over = true;
    other.join();
    kvedge_error err{};
    (void) kvedge_take_error(w.kv, &err);  // clears an error of two calls at the same time
    CHECK(w.decode(words(model, PROMPT, 9)) == 0);
    w.answer(2);
    CHECK(w.stats().n_compressions == 1);
}

// After an abort of llama_decode in the middle of its graph, the next request works.
void given_up(llama_model * model) {
    Plan         plan({ { "scorer", "cumulative" }, { "budget", "0.25" } });
    World        w(model, plan.plan);
    kvedge_error err{};
    for (int32_t after = 1; after < 60; after += 6) {
        std::atomic<int32_t> left{ after };
        llama_set_abort_callback(w.ctx, [](void * n) { return --*(std::atomic<int32_t> *) n < 0; }, &left);
        if (after % 4 == 3) {
            CHECK(kvedge_bound_prompt(w.kv, 0, nullptr, PROMPT, &err) == KVEDGE_OK);
        }
        const int code = w.decode(words(model, PROMPT, 1));
        CHECK(code == 0 || code == 2);
        llama_set_abort_callback(w.ctx, nullptr, nullptr);
        w.clear();
        CHECK(w.decode(words(model, PROMPT, 2)) == 0);
        w.answer(2);
        CHECK(w.kept(0, 0).size() == PROMPT / 4 + 2);
        w.clear();
    }
}

// Reads tokens in batches of `part`. Aborts the batch that begins at token `stopped` once, after `after` operations, and reads on from
// llama.cpp's position. Returns 1 if the batch was aborted, else 0.
static int32_t read_stopped(World & w, const std::vector<llama_token> & tokens, size_t part, size_t stopped, int32_t after) {
    int32_t              n = 0;
    std::atomic<int32_t> left{ 0 };
    for (size_t at = 0; at < tokens.size();) {
        left = at == stopped && n == 0 ? after : INT32_MAX;
        llama_set_abort_callback(w.ctx, [](void * m) { return --*(std::atomic<int32_t> *) m < 0; }, &left);
        const auto end  = tokens.begin() + (std::ptrdiff_t) std::min(at + part, tokens.size());
        const int  code = w.decode({ tokens.begin() + (std::ptrdiff_t) at, end });
        CHECK(code == 0 || (code == 2 && n == 0));
        n += code == 2;
        at        = (size_t) (llama_memory_seq_pos_max(w.memory(), 0) + 1);
        w.next[0] = (llama_pos) at;
    }
    llama_set_abort_callback(w.ctx, nullptr, nullptr);
    return n;
}

// Compresses the prompt and returns the kept tokens of every KV head. Empty: the compression was refused because a batch was stopped.
static std::vector<std::vector<int32_t>> chosen(const World & w) {
    std::vector<std::vector<int32_t>> out;
    kvedge_error                      err{};
    const auto                        status = kvedge_compress(w.kv, 0, &err);
    CHECK(status == KVEDGE_OK || (status == KVEDGE_E_STATE && std::strstr(err.message, "a batch of the prompt was stopped")));
    for (int32_t l = 0; status == KVEDGE_OK && l < w.stats().n_layers; l++) {
        for (int32_t h = 0; kvedge_head_length(w.kv, 0, l, h) >= 0; h++) {
            out.push_back(w.kept(l, h));
        }
    }
    return out;
}

// If the caller reads on after an aborted batch, the compression keeps the tokens of a prompt without an abort, or is refused.
void gone_on(llama_model * model) {
    constexpr size_t PART = 24;
    struct Case {
        const char *scorer, *option, *value;
        bool        last, sees;  // whether an abort in the last batch, in the second batch, makes the compression refuse
    };
    const Case cases[] = { { "knorm", nullptr, nullptr, false, false }, { "cumulative", nullptr, nullptr, true, true },
                           { "mean", nullptr, nullptr, true, true },    { "mixkv", "scorer.window", "32", true, false } };
    const auto tokens  = words(model, PROMPT - 1, 3);
    for (const Case & c : cases) {
        Plan plan({ { "scorer", c.scorer }, { "budget", "0.25" } });
        if (c.option) {
            plan.set(c.option, c.value);
        }
        World w(model, plan.plan);
        CHECK(read_stopped(w, tokens, PART, SIZE_MAX, 0) == 0);
        const auto whole = chosen(w);
        CHECK(!whole.empty());
        for (const size_t stopped : { (size_t) 0, PART, 3 * PART }) {
            int32_t n = 1;
            for (int32_t after = 5; n > 0; after += 23) {
                w.clear();
                n               = read_stopped(w, tokens, PART, stopped, after);
                const bool half = n > 0 && stopped > 0 && (stopped == PART ? c.sees : c.last);
                CHECK(chosen(w) == (half ? std::vector<std::vector<int32_t>>() : whole));
            }
        }
    }
}

// Repeated aborts of a token of an answer, which is then decoded again, change neither the scores of rows nor the dropped rows.
void answers_gone_on(llama_model * model) {
    Plan plan({ { "scorer", "cumulative" }, { "budget", "0.25" }, { "decode", "heavy-hitter" } });
    const auto tokens = words(model, PROMPT, 3), answer = words(model, 24, 4);
    const auto rows   = [&](int32_t after) {
        World w(model, plan.plan);
        CHECK(w.decode(tokens) == 0);
        std::atomic<int32_t> left{ 0 };
        llama_set_abort_callback(w.ctx, [](void * m) { return --*(std::atomic<int32_t> *) m < 0; }, &left);
        for (size_t i = 0; i < answer.size(); i++) {
            int32_t times = i % 5 == 2 ? 30 : 0;
            do {
                left = times > 0 ? after : INT32_MAX;
            } while (w.decode({ answer[i] }) != 0 && times-- > 0);
        }
        llama_set_abort_callback(w.ctx, nullptr, nullptr);
        std::vector<std::vector<int32_t>> out;
        for (int32_t l = 0; l < w.stats().n_layers; l++) {
            for (int32_t h = 0; kvedge_head_length(w.kv, 0, l, h) >= 0; h++) {
                out.push_back(w.kept(l, h));
            }
        }
        return std::make_pair(out, w.logits());
    };
    const auto whole = rows(INT32_MAX);
    for (int32_t after = 3; after < 100; after += 12) {
        CHECK(rows(after) == whole);
    }
}

namespace {

struct Detaching {
    kvedge_cache *    kv = nullptr;
    std::atomic<bool> inside{ false };
    bool              over = false;  // set at the end of the call that kvedge_detach waits for
};

kvedge_status dawdles(const kvedge_score_input * in, float *, kvedge_error *) {
    auto & d = *(Detaching *) in->user_data;
    d.inside = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    d.over = in->layer == in->n_layers - 1;
    return KVEDGE_OK;
}

}  // namespace

// Caches and contexts may end in any order. kvedge_detach waits for a call of another thread.
void ends(llama_model * model) {
    Plan         plan({ { "scorer", "knorm" }, { "budget", "16" } });
    kvedge_error err{};
    World        freed(model, plan.plan);
    CHECK(freed.decode(words(model, PROMPT, 1)) == 0);
    llama_free(freed.ctx);
    freed.ctx = nullptr;
    CHECK(kvedge_compress(freed.kv, 0, &err) == KVEDGE_E_STATE && kvedge_save(freed.kv, 0, "x", "x", nullptr, 0, &err) == KVEDGE_E_STATE);
    CHECK(freed.stats().n_tokens == PROMPT);

    World twice(model, plan.plan);
    kvedge_cache * second = nullptr;
    CHECK(kvedge_attach(twice.ctx, plan.plan, nullptr, &second, &err) == KVEDGE_E_STATE && !second);
    kvedge_detach(twice.kv);
    twice.kv = nullptr;
    CHECK(twice.decode(words(model, PROMPT, 1)) == 0);  // uses llama.cpp's own cache
    CHECK(kvedge_attach(twice.ctx, plan.plan, nullptr, &twice.kv, &err) == KVEDGE_E_STATE);
    twice.clear();
    CHECK(twice.good(kvedge_attach(twice.ctx, plan.plan, nullptr, &twice.kv, &err), err));

    Detaching            d;
    kvedge_custom_scorer slow{};
    slow.struct_size = sizeof(slow);
    slow.name        = "dawdles";
    slow.score       = dawdles;
    slow.user_data   = &d;
    CHECK(kvedge_plan_add_scorer(plan.plan, &slow, &err) == KVEDGE_OK);
    plan.set("scorer", "dawdles");
    CHECK(kvedge_set_plan(twice.kv, plan.plan, &err) == KVEDGE_OK);
    CHECK(twice.decode(words(model, PROMPT, 1)) == 0);
    std::thread other([&] {
        while (!d.inside) {
            std::this_thread::yield();
        }
        kvedge_detach(twice.kv);
        CHECK(d.over);
    });
    CHECK(kvedge_compress(twice.kv, 0, &err) == KVEDGE_OK);
    other.join();
    twice.kv = nullptr;
}
