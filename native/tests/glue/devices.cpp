// Compares caches with rows on devices and caches with rows on the host: kept tokens, logits, files, and freed memory.

#include "world.h"

#include <algorithm>
#include <cmath>

namespace {

// Allowed difference of logits, whose magnitude is about 5, with f32 rows. Some of ggml's code rounds to half precision.
constexpr float CLOSE = 1e-2f;

float distance(const std::vector<float> & a, const std::vector<float> & b) {
    float most = 0.0f;
    for (size_t i = 0; i < a.size(); i++) {
        most = std::max(most, std::fabs(a[i] - b[i]));
    }
    return most;
}

// One of ONE_OF kept tokens may differ: nearly equal scores swap places when a product is rounded in another order, as on another
// CPU.
constexpr size_t ONE_OF = 50;
// Allowed difference of logits if a kept token differs.
constexpr float STRAYED = 1.0f;

void same(const World & host, const World & device, const char * what, int32_t seq = 0, float close = CLOSE) {
    const kvedge_stats stats = host.stats(seq);
    size_t             others = 0, all = 0;
    for (int32_t l = 0; l < stats.n_layers; l++) {
        for (int32_t h = 0; kvedge_head_length(host.kv, seq, l, h) >= 0; h++) {
            const auto here = host.kept(l, h, seq), there = device.kept(l, h, seq);
            all += here.size();
            others += (size_t) std::count_if(here.begin(), here.end(), [&](int32_t t) {
                return !std::binary_search(there.begin(), there.end(), t);
            });
        }
    }
    if (others * ONE_OF > all) {
        std::fprintf(stderr, "%s: %zu of %zu tokens that are kept are others\n", what, others, all);
        failures()++;
    }
    const float far = distance(host.logits(), device.logits());
    if (!(far <= (others > 0 ? STRAYED : close))) {
        std::fprintf(stderr, "%s: logits differ by %g\n", what, (double) far);
        failures()++;
    }
}

// Reads two turns with an image and answers each with 40 tokens, enough to make buffers grow.
void converse(World & w) {
    for (uint32_t turn = 0; turn < 2; turn++) {
        CHECK(w.decode(words(w.model, PROMPT / 2, 10 + turn)) == 0);
        CHECK(w.decode_image(PROMPT) == 0);
        CHECK(w.decode(words(w.model, PROMPT / 2, 20 + turn)) == 0);
        CHECK(turn > 0 || (w.stats().device_bytes > 0) == (kvedge_layer_device(w.kv, 0) != nullptr));  // a device reads the prompt
        w.answer(40);
    }
}

void compare(llama_model * model, Plan::Fields fields, const char * what, kvedge_type type = KVEDGE_TYPE_F32, float close = CLOSE) {
    Plan plan(fields);
    World host(model, plan.plan, type, KVEDGE_DEVICES_NONE, KVEDGE_ROTATE_OFF);  // rows on devices are not rotated
    World device(model, plan.plan, type, KVEDGE_DEVICES_ALL, KVEDGE_ROTATE_OFF);
    converse(host);
    converse(device);
    same(host, device, what, 0, close);
    const bool by_score = std::any_of(fields.begin(), fields.end(), [](const auto & f) { return f.second == std::string("heavy-hitter"); });
    CHECK((device.stats().device_bytes > 0) != by_score);
    CHECK(host.stats().device_bytes == 0 && !kvedge_layer_device(host.kv, 0) && kvedge_layer_device(device.kv, 0));
}

// A compression frees device memory: afterwards the device holds about the kept rows.
void gives_back(llama_model * model) {
    Plan         plan({ { "scorer", "knorm" }, { "budget", "64" } });
    World        w(model, plan.plan, KVEDGE_TYPE_F32, KVEDGE_DEVICES_ALL);
    kvedge_error err{};
    uint64_t full = 0;
    for (const bool announced : { false, true }) {
        CHECK(!announced || w.good(kvedge_expect(w.kv, 0, 7 * 128, &err), err));
        for (uint32_t i = 0; i < 7; i++) {
            CHECK(w.decode(words(model, 128, 30 + i)) == 0);
        }
        CHECK(!announced || w.stats().device_bytes < full);  // for an announced prompt no buffer grows beyond its length
        full = w.stats().device_bytes;
        if (!announced) {
            w.clear();
        }
    }
    CHECK(w.good(kvedge_compress(w.kv, 0, &err), err));
    for (const char * when : { "at once", "with a token" }) {
        const uint64_t kept = w.stats().device_bytes;
        if (kept == 0 || kept * 6 > full) {
            std::fprintf(stderr, "%s: %llu bytes of %llu for 64 rows of 896\n", when, (unsigned long long) kept, (unsigned long long) full);
            failures()++;
        }
        w.answer(1);
    }
    w.clear();
    CHECK(w.stats().bytes == 0 && w.stats().device_bytes == 0);
}

// Rows come to the host for files, copies and cuts, and go back to the device afterwards.
void moves(llama_model * model, const std::string & folder) {
    const std::string path = folder + "/device.kvs";
    Plan              plan({ { "scorer", "window" }, { "scorer.window", "8" }, { "budget", "0.25" } });
    World             w(model, plan.plan, KVEDGE_TYPE_F32, KVEDGE_DEVICES_ALL), host(model, plan.plan, KVEDGE_TYPE_F32, KVEDGE_DEVICES_NONE);
    kvedge_error      err{};
    CHECK(w.decode(words(model, PROMPT, 1)) == 0);
    w.answer(5);
    CHECK(w.good(kvedge_save(w.kv, 0, path.c_str(), "a model", nullptr, 0, &err), err));
    CHECK(w.good(kvedge_load(host.kv, 0, path.c_str(), "a model", &err), err));
    host.next[0] = w.next[0];
    llama_memory_seq_cp(w.memory(), 0, 1, -1, -1);
    w.next[1] = w.next[0];
    w.answer(3, 1);
    const auto copied = w.logits();
    w.answer(3, 0);
    host.answer(3);
    CHECK(distance(w.logits(), copied) <= CLOSE);
    same(host, w, "a file");
    for (World * x : { &w, &host }) {
        if (!llama_memory_seq_rm(x->memory(), 0, PROMPT + 4, -1)) {
            return;  // this model's recurrent state cannot be cut
        }
        x->next[0] = PROMPT + 4;
        x->answer(2);
    }
    same(host, w, "a cut");
}

// Batches with one token of each of several sequences give the same results on host and device.
void several(llama_model * model) {
    Plan  plan({ { "scorer", "knorm" }, { "budget", "0.5" } });
    World host(model, plan.plan, KVEDGE_TYPE_F32, KVEDGE_DEVICES_NONE), device(model, plan.plan, KVEDGE_TYPE_F32, KVEDGE_DEVICES_ALL);
    for (World * w : { &host, &device }) {
        for (int32_t s = 0; s < 3; s++) {
            CHECK(w->decode(words(model, 20 + 10 * s, 40 + (uint32_t) s), s) == 0);
        }
        for (int32_t t = 0; t < 3; t++) {
            llama_batch batch = llama_batch_init(3, 0, 1);
            batch.n_tokens    = 3;
            for (int32_t s = 0; s < 3; s++) {
                batch.token[s]     = words(model, 1, 50 + (uint32_t) (3 * t + s))[0];
                batch.pos[s]       = w->next[(size_t) s]++;
                batch.n_seq_id[s]  = 1;
                batch.seq_id[s][0] = s;
                batch.logits[s]    = true;
            }
            CHECK(llama_decode(w->ctx, batch) == 0);
            llama_batch_free(batch);
        }
    }
    CHECK(device.stats(2).device_bytes > 0);
    for (int32_t s = 0; s < 3; s++) {
        same(host, device, "several sequences", s);
    }
}

}  // namespace

void devices(llama_model * model, const std::string & folder) {
    if (FEWER) {
        compare(model, { { "scorer", "window" }, { "scorer.window", "8" }, { "allocator", "ada" }, { "budget", "0.25" } }, "ada");
        moves(model, folder);
        return;
    }
    compare(model, { { "budget", "1.0" } }, "full");
    compare(model, { { "scorer", "knorm" }, { "budget", "0.25" } }, "knorm");
    compare(model, { { "scorer", "window" }, { "scorer.window", "8" }, { "budget", "0.25" } }, "window");
    compare(model, { { "scorer", "window" }, { "scorer.window", "8" }, { "allocator", "pyramid" }, { "budget", "0.25" } }, "pyramid");
    compare(model, { { "scorer", "window" }, { "scorer.window", "8" }, { "allocator", "ada" }, { "budget", "0.25" } }, "ada");
    compare(model, { { "scorer", "cumulative" }, { "reducer", "pivotal" }, { "budget", "0.25" } }, "cumulative");
    compare(model, { { "scorer", "cumulative" }, { "reducer", "averaged" }, { "reducer.bias", "mass" }, { "budget", "0.25" } }, "biased",
            KVEDGE_TYPE_F32, 0.02f);
    compare(model, { { "scorer", "cumulative" }, { "reducer", "averaged" }, { "reducer.bias", "mass" }, { "decode", "sliding" }, { "budget", "0.25" } },
            "biased, sliding", KVEDGE_TYPE_F32, 0.02f);
    compare(model, { { "scorer", "cumulative" }, { "decode", "fixed-point" }, { "budget", "0.25" } }, "fixed-point");
    compare(model, { { "scorer", "cumulative" }, { "allocator", "pyramid" }, { "decode", "ratio" }, { "budget", "0.25" } }, "ratio");
    compare(model, { { "scorer", "position" }, { "decode", "sliding" }, { "budget", "0.25" } }, "sliding, f16", KVEDGE_TYPE_F16, 0.1f);
    compare(model, { { "scorer", "cumulative" }, { "decode", "heavy-hitter" }, { "budget", "0.25" } }, "heavy-hitter");
    compare(model, { { "scorer", "mean" }, { "budget", "0.25" } }, "mean");
    compare(model, { { "scorer", "knorm" }, { "allocator", "entropy" }, { "allocator.attention", "full" }, { "budget", "0.25" } }, "entropy");
    compare(model, { { "budget", "1.0" } }, "full, q8_0", KVEDGE_TYPE_Q8_0, 0.1f);
    compare(model, { { "scorer", "window" }, { "scorer.window", "8" }, { "budget", "0.25" } }, "window, q8_0", KVEDGE_TYPE_Q8_0, 0.1f);
    compare(model, { { "scorer", "position" }, { "allocator", "pyramid" }, { "budget", "0.25" } }, "pyramid, q4_0", KVEDGE_TYPE_Q4_0, 1.0f);
    gives_back(model);
    moves(model, folder);
    if (!llama_model_is_hybrid(model)) {  // llama.cpp's own answers for several sequences of some hybrid models vary
        several(model);
    }
}
