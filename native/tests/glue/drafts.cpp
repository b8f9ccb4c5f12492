// Drafts: verifying an answer in batches, with right and wrong guesses, gives the same logits as decoding token by token.

#include "world.h"

#include <algorithm>
#include <climits>

namespace {

bool alike(const std::vector<float> & a, const std::vector<float> & b, double tolerance) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [=](float x, float y) { return close_to(x, y, tolerance); });
}

// The reference: decodes an answer token by token, and keeps the logits after each token.
struct Alone {
    Alone(llama_model * model, const kvedge_plan * plan, kvedge_type type, const std::vector<llama_token> & prompt,
          const std::vector<llama_token> & answer)
        : w(model, plan, type) {
        read(model, type, prompt, answer);
    }
    Alone(llama_model * model, const kvedge_plan * plan, kvedge_devices devices, const std::vector<llama_token> & prompt,
          const std::vector<llama_token> & answer)
        : w(model, plan, KVEDGE_TYPE_F16, devices) {
        read(model, KVEDGE_TYPE_F16, prompt, answer);
    }
    void read(llama_model * model, kvedge_type type, const std::vector<llama_token> & prompt, const std::vector<llama_token> & answer) {
        CHECK(w.decode(prompt) == 0);
        if (type != KVEDGE_TYPE_F16) {  // the last bits of a batch's products differ, and quantised rows may round to other codes
            tolerance = 0.1;
        } else if (w.stats().n_layers < llama_model_n_layer(model) || w.stats().device_bytes > 0) {
            tolerance = 5e-3;  // ggml's attention rounds a batch in another way than single tokens
        }
        for (const llama_token t : answer) {
            CHECK(w.decode({ t }) == 0);
            logits.push_back(w.logits());
        }
    }
    World                           w;
    std::vector<std::vector<float>> logits;
    double                          tolerance = 1e-3;
};

// Verifies the answer in batches: the next token and up to `most` guesses, of which the first `right` are right.
void verify_all(World & w, const std::vector<llama_token> & answer, const Alone & alone, int32_t most, int32_t right) {
    kvedge_error err{};
    for (size_t at = 0; at < answer.size();) {
        const int32_t room = kvedge_verify_room(w.kv, 0);
        CHECK(room >= 1);
        const int32_t            n = std::min({ most + 1, room, (int32_t) (answer.size() - at) });
        std::vector<llama_token> batch(answer.begin() + (std::ptrdiff_t) at, answer.begin() + (std::ptrdiff_t) at + n);
        for (int32_t i = right + 1; i < n; i++) {
            batch[(size_t) i] = batch[(size_t) i] == 7 ? 8 : 7;
        }
        const int32_t good = std::min(n, right + 1);
        CHECK(w.good(kvedge_verify_begin(w.kv, 0, n, &err), err));
        CHECK(w.decode_each(batch) == 0);
        for (int32_t i = 0; i < good; i++) {
            CHECK(alike(w.logits(i), alone.logits[at + (size_t) i], alone.tolerance));
        }
        CHECK(kvedge_verify_end(w.kv, 0, n + 1, &err) == KVEDGE_E_ARGUMENT);
        CHECK(w.good(kvedge_verify_end(w.kv, 0, good, &err), err));
        w.next[0] -= n - good;
        CHECK(llama_memory_seq_pos_max(w.memory(), 0) + 1 == w.next[0]);
        at += (size_t) good;
    }
}

// Checks that two sequences continue equally: single tokens, then a message with its compression.
void goes_on(World & a, World & b, double tolerance) {
    CHECK(a.kept(0, 0) == b.kept(0, 0) && a.kept(1, 1) == b.kept(1, 1) && a.stats().n_tokens == b.stats().n_tokens);
    CHECK(a.stats().device_bytes > 0 || a.stats().bytes == b.stats().bytes);
    for (World * w : { &a, &b }) {
        w->answer(3);
        CHECK(w->decode(words(w->model, PROMPT / 2, 9)) == 0);
        w->answer(2);
    }
    CHECK(alike(a.logits(), b.logits(), tolerance) && a.kept(0, 1) == b.kept(0, 1));
}

void equal_to_single_tokens(llama_model * model) {
    const auto prompt = words(model, PROMPT, 21), answer = words(model, 40, 22);  // 40 tokens: more than a group of 32 rows
    for (const char * budget : { "0.25", "1.0" }) {
        for (const kvedge_type type : { KVEDGE_TYPE_F16, KVEDGE_TYPE_Q4_0, KVEDGE_TYPE_KIVI4 }) {
            if (type != KVEDGE_TYPE_F16 && std::string(budget) == "1.0") {
                continue;
            }
            Plan plan({ { "scorer", "cumulative" }, { "budget", budget } });
            for (const auto & [most, right] : { std::pair(4, 4), { 4, 0 }, { 12, 5 } }) {
                Alone alone(model, plan.plan, type, prompt, answer);
                World w(model, plan.plan, type);
                CHECK(w.decode(prompt) == 0);
                verify_all(w, answer, alone, most, right);
                goes_on(alone.w, w, alone.tolerance);
            }
        }
    }
}

// Checks the calls that an open verification refuses, and verifications whose batch never comes or is removed.
void unfinished(llama_model * model, const std::string & folder) {
    Plan         plan({ { "scorer", "knorm" }, { "budget", "0.5" } });
    World        w(model, plan.plan);
    kvedge_error err{};
    CHECK(kvedge_verify_begin(nullptr, 0, 1, &err) == KVEDGE_E_ARGUMENT && kvedge_verify_room(nullptr, 0) == 0);
    CHECK(kvedge_verify_begin(w.kv, 0, 1, &err) == KVEDGE_E_STATE && kvedge_verify_room(w.kv, 0) == 0);
    CHECK(w.decode(words(model, PROMPT, 3)) == 0);
    CHECK(kvedge_verify_begin(w.kv, 0, 0, &err) == KVEDGE_E_ARGUMENT);
    CHECK(kvedge_set_auto_compress(w.kv, false, &err) == KVEDGE_OK);
    CHECK(kvedge_verify_begin(w.kv, 0, 2, &err) == KVEDGE_E_STATE);  // the prompt is not compressed yet
    CHECK(kvedge_compress(w.kv, 0, &err) == KVEDGE_OK && kvedge_verify_room(w.kv, 0) == INT32_MAX);
    const auto before = w.kept(0, 0);

    CHECK(w.good(kvedge_verify_begin(w.kv, 0, 3, &err), err));
    CHECK(kvedge_verify_begin(w.kv, 0, 3, &err) == KVEDGE_E_STATE && kvedge_verify_room(w.kv, 0) == 0);
    CHECK(kvedge_compress(w.kv, 0, &err) == KVEDGE_E_STATE);
    CHECK(kvedge_save(w.kv, 0, (folder + "/drafts.kvs").c_str(), "tiny", nullptr, 0, &err) == KVEDGE_E_STATE);
    CHECK(kvedge_verify_end(w.kv, 0, 1, &err) == KVEDGE_E_ARGUMENT);  // no token was decoded yet
    CHECK(w.decode(words(model, 4, 4)) != 0 && w.kept(0, 0) == before);  // more tokens than announced
    CHECK(kvedge_take_error(w.kv, &err) == KVEDGE_E_STATE);
    CHECK(w.good(kvedge_verify_end(w.kv, 0, 0, &err), err) && kvedge_verify_end(w.kv, 0, 0, &err) == KVEDGE_OK);
    CHECK(kvedge_verify_end(w.kv, 0, 1, &err) == KVEDGE_E_STATE);

    CHECK(w.good(kvedge_verify_begin(w.kv, 0, 3, &err), err) && w.decode(words(model, 3, 4)) == 0);
    CHECK(llama_memory_seq_rm(w.memory(), 0, PROMPT, -1) && w.kept(0, 0) == before);
    CHECK(kvedge_verify_end(w.kv, 0, 3, &err) == KVEDGE_E_STATE);
    w.next[0] = PROMPT;
    w.answer(2);
    CHECK(w.kept(0, 0).size() == before.size() + 2);
    CHECK(w.good(kvedge_save(w.kv, 0, (folder + "/drafts.kvs").c_str(), "tiny", nullptr, 0, &err), err));
}

void refused(llama_model * model) {
    Plan         dropping({ { "scorer", "knorm" }, { "budget", "0.5" }, { "decode", "sliding" } });
    kvedge_error err{};
    World        w(model, dropping.plan);
    CHECK(w.decode(words(model, PROMPT, 3)) == 0);
    CHECK(kvedge_verify_begin(w.kv, 0, 2, &err) == KVEDGE_E_UNSUPPORTED && kvedge_verify_room(w.kv, 0) == 0);
    w.answer(1);
    CHECK(kvedge_verify_begin(w.kv, 0, 2, &err) == KVEDGE_E_UNSUPPORTED);

    Plan  bound({ { "scorer", "knorm" }, { "budget", "32" } });
    World stream(model, bound.plan, KVEDGE_TYPE_F16, KVEDGE_DEVICES_NONE);
    CHECK(stream.decode(words(model, PROMPT, 3)) == 0);
    CHECK(stream.good(kvedge_compress_stream(stream.kv, 0, &err), err));
    CHECK(kvedge_verify_begin(stream.kv, 0, 2, &err) == KVEDGE_E_UNSUPPORTED);
}

// Decodes drafts with the compressed rows and verifies the answer over the whole rows: the logits equal those of an uncompressed cache.
void verify_whole(World & w, const std::vector<llama_token> & answer, const Alone & alone, size_t kept) {
    kvedge_error err{};
    for (size_t at = 0, n = 1; at < answer.size(); at += n, n = 1 + n % 5) {
        n = std::min(n, answer.size() - at);
        w.answer((int32_t) n + 1);  // drafts, which are wrong guesses
        CHECK((w.stats().device_bytes > 0) == (kvedge_layer_device(w.kv, 0) != nullptr));
        w.next[0] -= (int32_t) n + 1;
        std::vector<llama_token> batch(answer.begin() + (std::ptrdiff_t) at, answer.begin() + (std::ptrdiff_t) (at + n));
        batch.push_back(5);
        CHECK(w.good(kvedge_verify_whole(w.kv, 0, (int32_t) n + 1, &err), err) && w.decode_each(batch) == 0);
        for (size_t i = 0; i < n; i++) {
            CHECK(alike(w.logits((int32_t) i), alone.logits[at + i], alone.tolerance));
        }
        if (at % 3 == 0) {  // gives the verification up: removes the batch and verifies it again
            w.next[0] -= (int32_t) n + 1;
            CHECK(llama_memory_seq_rm(w.memory(), 0, w.next[0], -1) && kvedge_verify_end(w.kv, 0, 0, &err) == KVEDGE_OK);
            CHECK(w.kept(0, 0).size() == kept + at);
            CHECK(w.good(kvedge_verify_whole(w.kv, 0, (int32_t) n + 1, &err), err) && w.decode_each(batch) == 0);
        }
        CHECK(w.good(kvedge_verify_end(w.kv, 0, (int32_t) n, &err), err));
        w.next[0]--;
        CHECK(w.kept(0, 0).size() == kept + at + n && w.stats().n_tokens == PROMPT + (int32_t) (at + n));
    }
}

// If the compressed rows lie on a device, the host keeps the whole rows and verifies. Afterwards the device has the same rows of the
// answer as a host: the next tokens, and the choice for the next message, are equal.
void over_whole_rows(llama_model * model, Plan::Fields fields, kvedge_type type) {
    const auto   prompt = words(model, PROMPT, 21), answer = words(model, 40, 22);
    Plan         full({}), plan(fields);
    kvedge_error err{};
    Alone        alone(model, full.plan, KVEDGE_DEVICES_NONE, prompt, answer);
    World        host(model, plan.plan, type, KVEDGE_DEVICES_NONE, KVEDGE_ROTATE_OFF);
    World        usual(model, plan.plan, type, World::usual_devices, KVEDGE_ROTATE_OFF);
    for (World * w : { &host, &usual }) {
        CHECK(w->good(kvedge_keep(w->kv, KVEDGE_KEEP_MEMORY, nullptr, 0, KVEDGE_TYPE_F16, &err), err));
        CHECK(w->decode(prompt) == 0 && kvedge_compress(w->kv, 0, &err) == KVEDGE_OK);
        const size_t kept = w->kept(0, 0).size();
        CHECK(kept < PROMPT * 3 / 4 && kvedge_verify_whole(w->kv, 0, 0, &err) == KVEDGE_E_ARGUMENT);
        verify_whole(*w, answer, alone, kept);
    }
    goes_on(host, usual, type == KVEDGE_TYPE_F16 ? 1e-2 : 0.1);
}

void over_whole_rows(llama_model * model) {
    for (const kvedge_type type : { KVEDGE_TYPE_F16, KVEDGE_TYPE_Q8_0 }) {
        over_whole_rows(model, { { "scorer", "knorm" }, { "budget", "0.25" } }, type);
        over_whole_rows(model, { { "scorer", "knorm" }, { "budget", "0.25" }, { "allocator", "ada" } }, type);
    }
    over_whole_rows(model, { { "scorer", "window" }, { "budget", "0.25" }, { "reducer", "averaged" }, { "reducer.bias", "mass" } }, KVEDGE_TYPE_F16);
    Plan         plan({ { "scorer", "knorm" }, { "budget", "0.25" } });
    kvedge_error err{};
    World        without(model, plan.plan);
    CHECK(without.decode(words(model, PROMPT, 21)) == 0 && kvedge_compress(without.kv, 0, &err) == KVEDGE_OK);
    CHECK(kvedge_verify_whole(without.kv, 0, 2, &err) == KVEDGE_E_STATE);
}

// Settings that change during a verification do not touch its tokens.
void other_settings(llama_model * model) {
    Plan         plan({ { "scorer", "knorm" }, { "budget", "0.5" } }), dropping({ { "scorer", "knorm" }, { "budget", "0.5" }, { "decode", "sliding" } });
    kvedge_error err{};
    World        w(model, plan.plan);
    CHECK(w.decode(words(model, PROMPT, 3)) == 0 && w.good(kvedge_verify_begin(w.kv, 0, 4, &err), err));
    CHECK(kvedge_set_auto_compress(w.kv, false, &err) == KVEDGE_OK && w.decode_each(words(model, 2, 4)) == 0);
    CHECK(kvedge_set_auto_compress(w.kv, true, &err) == KVEDGE_OK && w.decode_each(words(model, 2, 5)) == 0);
    CHECK(w.good(kvedge_verify_end(w.kv, 0, 1, &err), err) && w.kept(0, 0).size() == PROMPT + 1);

    World other(model, plan.plan);
    CHECK(other.decode(words(model, PROMPT, 3)) == 0 && other.good(kvedge_verify_begin(other.kv, 0, 4, &err), err));
    CHECK(kvedge_set_plan(other.kv, dropping.plan, &err) == KVEDGE_OK);
    CHECK(other.decode_each(words(model, 4, 4)) != 0 && kvedge_take_error(other.kv, &err) == KVEDGE_E_STATE);
    CHECK(other.good(kvedge_verify_end(other.kv, 0, 0, &err), err));
    other.answer(2);
    CHECK(other.kept(0, 0).size() < PROMPT);
}

// What whole rows cannot answer after removals and verifications is refused.
void whole_rows_changed(llama_model * model) {
    Plan               plan({ { "scorer", "knorm" }, { "budget", "0.5" } });
    World              w(model, plan.plan, KVEDGE_TYPE_F16, KVEDGE_DEVICES_NONE);
    kvedge_error       err{};
    std::vector<float> weights(2 * PROMPT);
    const auto         attention = [&] { return kvedge_attention(w.kv, 0, 0, 0, weights.data(), (int32_t) weights.size(), &err); };
    CHECK(kvedge_keep(w.kv, KVEDGE_KEEP_MEMORY, nullptr, 0, KVEDGE_TYPE_F16, &err) == KVEDGE_OK && kvedge_watch(w.kv, true, &err) == KVEDGE_OK);
    CHECK(w.decode(words(model, PROMPT, 3)) == 0 && kvedge_compress(w.kv, 0, &err) == KVEDGE_OK);
    CHECK(w.good(kvedge_verify_whole(w.kv, 0, 1, &err), err) && w.decode_each({ 5 }) == 0 && attention() == KVEDGE_OK);
    CHECK(w.good(kvedge_verify_end(w.kv, 0, 1, &err), err) && attention() == KVEDGE_E_STATE);  // the weights belong to the whole rows
    w.answer(1);
    CHECK(attention() == KVEDGE_OK);
    CHECK(llama_memory_seq_rm(w.memory(), 0, 0, PROMPT + 1) && kvedge_choose_again(w.kv, 0, &err) == KVEDGE_E_STATE);
    w.answer(1);
    CHECK(w.kept(0, 0).size() == 2);
}

}  // namespace

void drafts(llama_model * model, const std::string & folder) {
    equal_to_single_tokens(model);
    unfinished(model, folder);
    refused(model);
    over_whole_rows(model);
    other_settings(model);
    whole_rows_changed(model);
}
