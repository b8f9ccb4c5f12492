// Sequences: several at the same time, copies and cuts, turns of a conversation, files, bounded prompts and streams.

#include "world.h"

#include <algorithm>
#include <fstream>
#include <iterator>

// Decodes two tokens of sequence 0 at two positions in one batch. Returns the code of llama_decode.
static int decode_at(World & w, llama_pos first, llama_pos second) {
    llama_batch batch = llama_batch_init(2, 0, 1);
    batch.n_tokens    = 2;
    for (int32_t i = 0; i < 2; i++) {
        batch.token[i]     = 7 + i;
        batch.pos[i]       = i ? second : first;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i]    = i;
    }
    const int code = llama_decode(w.ctx, batch);
    llama_batch_free(batch);
    return code;
}

// Calls with numbers of sequences that the context does not have fail.
static void no_such_sequences(const World & w, const kvedge_plan * plan) {
    kvedge_error err{};
    for (const int32_t none : { -1, N_SEQ, INT32_MAX }) {
        CHECK(kvedge_set_sequence_plan(w.kv, none, plan, &err) == KVEDGE_E_ARGUMENT);
        CHECK(kvedge_set_sequence_plan(w.kv, none, nullptr, &err) == KVEDGE_E_ARGUMENT);
        CHECK(kvedge_expect(w.kv, none, 8, &err) == KVEDGE_E_ARGUMENT);
        CHECK(kvedge_bound_prompt(w.kv, none, nullptr, 8, &err) == KVEDGE_E_ARGUMENT);
    }
    CHECK(kvedge_set_sequence_plan(w.kv, N_SEQ - 1, plan, &err) == KVEDGE_OK);
}

// Operations that only llama.cpp's own cache supports are refused with KVEDGE_E_UNSUPPORTED. If llama.cpp's function returns no
// status, llama_decode fails until kvedge_take_error is called.
static void as_llama_alone_does(llama_model * model) {
    Plan         plan({ { "scorer", "knorm" }, { "budget", "0.5" } });
    World        w(model, plan.plan);
    kvedge_error err{};
    no_such_sequences(w, plan.plan);
    CHECK(decode_at(w, 0, 0) != 0 && kvedge_take_error(w.kv, &err) == KVEDGE_E_UNSUPPORTED && w.stats().n_tokens == 0);
    CHECK(decode_at(w, 0, 1) == 0);
    w.clear();
    CHECK(w.decode(words(model, 20, 5), 0) == 0 && w.decode(words(model, 10, 6), 1) == 0);
    const auto there   = w.kept(0, 0, 1);
    const auto refused = [&] {
        CHECK(w.decode({ 7 }, 1) != 0 && w.kept(0, 0, 1) == there && llama_memory_seq_pos_max(w.memory(), 1) == 9);
        CHECK(kvedge_take_error(w.kv, &err) == KVEDGE_E_UNSUPPORTED && kvedge_take_error(w.kv, &err) == KVEDGE_OK);
    };
    llama_memory_seq_cp(w.memory(), 0, 1, 10, 20);
    refused();
    llama_memory_seq_cp(w.memory(), 1, 0, -1, -1);
    refused();
    llama_memory_seq_add(w.memory(), 1, 0, -1, 5);
    refused();
    llama_memory_seq_div(w.memory(), 1, 0, -1, 2);
    refused();
    CHECK(w.decode({ 7 }, 1) == 0);
    llama_memory_seq_cp(w.memory(), 0, 1, -1, -1);  // the source is longer than the target
    CHECK(w.kept(0, 0, 1) == w.kept(0, 0, 0) && kvedge_take_error(w.kv, &err) == KVEDGE_OK);
}

void sequences(llama_model * model) {
    as_llama_alone_does(model);
    Plan          plan({ { "scorer", "cumulative" }, { "reducer", "averaged" }, { "budget", "0.25" } });
    Plan          careful({ { "scorer", "knorm" }, { "budget", "0.5" } });
    World         w(model, plan.plan);
    kvedge_error  err{};
    const int32_t n = PROMPT / 2;
    CHECK(kvedge_set_sequence_plan(w.kv, 1, careful.plan, &err) == KVEDGE_OK);

    // two prompts in one batch, compressed by different plans
    const auto  tokens = words(model, 2 * n, 5);
    llama_batch batch  = llama_batch_init(2 * n, 0, 1);
    batch.n_tokens     = 2 * n;
    for (int32_t i = 0; i < 2 * n; i++) {
        batch.token[i]     = tokens[(size_t) i];
        batch.pos[i]       = i / 2;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = i % 2;
        batch.logits[i]    = i + 2 >= 2 * n;
    }
    CHECK(llama_decode(w.ctx, batch) == 0);
    llama_batch_free(batch);
    w.next = { n, n, 0, 0 };
    w.answer(1, 0);
    w.answer(1, 1);
    CHECK(w.kept(0, 0, 0).size() == (size_t) n / 4 + 1 && w.kept(0, 0, 1).size() == (size_t) n / 2 + 1);

    // a copy does not change the original
    llama_memory_seq_cp(w.memory(), 0, 2, -1, -1);
    w.next[2] = w.next[0];
    CHECK(w.kept(1, 1, 2) == w.kept(1, 1, 0));
    w.answer(3, 2);
    CHECK(w.kept(0, 0, 2).size() == (size_t) n / 4 + 4 && w.kept(0, 0, 0).size() == (size_t) n / 4 + 1);
    // a copy of a part of a sequence
    llama_memory_seq_cp(w.memory(), 1, 3, 0, n / 2);
    const auto part = w.kept(0, 0, 3);
    CHECK(std::all_of(part.begin(), part.end(), [&](int32_t t) { return t < n / 2; }));
    // removes the end of a sequence: the answer
    CHECK(llama_memory_seq_rm(w.memory(), 2, n, -1));
    w.next[2] = n;
    CHECK(w.kept(0, 0, 2).size() == (size_t) n / 4);
    CHECK(w.decode(words(model, 8, 6), 2) == 0);
    llama_memory_seq_keep(w.memory(), 2);
    CHECK(w.stats(0).n_tokens == 0 && w.stats(2).n_tokens == n + 8);
    CHECK(llama_memory_seq_rm(w.memory(), -1, -1, -1) && w.stats(2).bytes == 0);
}

// kvedge_pack gives the bytes of a file without a note. Truncated or damaged bytes are refused, and the sequence stays empty.
void packing(World & from, World & to, const std::string & path) {
    kvedge_error err{};
    size_t       n = 0;
    CHECK(kvedge_pack(from.kv, 0, "tiny", nullptr, &n, &err) == KVEDGE_OK && n > 0);
    std::vector<char> bytes(n, 1);
    size_t            less = n - 1;
    CHECK(kvedge_pack(from.kv, 0, "tiny", bytes.data(), &less, &err) == KVEDGE_E_ARGUMENT && less == n);
    CHECK(from.good(kvedge_pack(from.kv, 0, "tiny", bytes.data(), &n, &err), err) && n == bytes.size());
    CHECK(from.good(kvedge_save(from.kv, 0, path.c_str(), "tiny", nullptr, 0, &err), err));
    std::ifstream           file(path, std::ios::binary);
    const std::vector<char> saved{ std::istreambuf_iterator<char>(file), {} };
    CHECK(saved == bytes);
    for (size_t at = 0; at < n; at += 1 + n / 61) {
        std::vector<char> bad = bytes;
        bad[at] ^= 4;
        CHECK(kvedge_unpack(to.kv, 0, "tiny", bad.data(), n, &err) == KVEDGE_E_FILE);
        CHECK(kvedge_unpack(to.kv, 0, "tiny", bytes.data(), at, &err) == KVEDGE_E_FILE);
    }
    CHECK(kvedge_unpack(to.kv, 0, "another", bytes.data(), n, &err) == KVEDGE_E_FILE && to.stats().bytes == 0);
    CHECK(kvedge_unpack(to.kv, 0, "tiny", nullptr, n, &err) == KVEDGE_E_ARGUMENT);
    CHECK(to.good(kvedge_unpack(to.kv, 0, "tiny", bytes.data(), n, &err), err));
    CHECK(kvedge_unpack(to.kv, 0, "tiny", bytes.data(), n, &err) == KVEDGE_E_STATE);
}

// Each turn is compressed. A conversation continues equally after a file is saved and loaded.
void turns_and_files(llama_model * model, const std::string & folder) {
    const std::string path = folder + "/turns.kvs";
    for (const char * decode : { "keep-all", "heavy-hitter" }) {
        Plan         plan({ { "scorer", "cumulative" }, { "budget", "0.25" }, { "decode", decode } });
        World        w(model, plan.plan);
        kvedge_error err{};
        for (uint32_t turn = 0; turn < 3; turn++) {
            CHECK(w.decode(words(model, PROMPT / 2, turn)) == 0);
            CHECK(kvedge_save(w.kv, 0, path.c_str(), "tiny", nullptr, 0, &err) == KVEDGE_E_STATE);  // the turn is not compressed yet
            w.answer(6);
        }
        CHECK(w.stats().n_compressions == 3);
        CHECK(w.good(kvedge_save(w.kv, 0, path.c_str(), "tiny", "note", 4, &err), err));

        kvedge_saved saved{};
        saved.struct_size = sizeof(saved);
        char note[5]      = {};
        CHECK(kvedge_read_saved(path.c_str(), &saved, note, 4, &err) == KVEDGE_OK && std::string(note) == "note");
        CHECK(std::string(saved.model) == "tiny" && saved.note_bytes == 4);

        World other(model, plan.plan);
        CHECK(kvedge_load(other.kv, 0, path.c_str(), "another", &err) == KVEDGE_E_FILE);
        CHECK(other.good(kvedge_load(other.kv, 0, path.c_str(), "tiny", &err), err));
        CHECK(kvedge_load(other.kv, 0, path.c_str(), "tiny", &err) == KVEDGE_E_STATE);
        World packed(model, plan.plan);
        packing(w, packed, path);
        packed.next[0] = other.next[0] = w.next[0];
        w.answer(4);
        other.answer(4);
        packed.answer(4);
        CHECK(packed.logits() == other.logits());
        CHECK(other.kept(1, 0) == w.kept(1, 0));
        const auto a = w.logits(), b = other.logits();
        CHECK(std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) { return close_to(x, y, 1e-4); }));
    }
}

// After loading a file with whole rows, a later turn keeps the same tokens. A cache that keeps no whole rows drops them.
void whole_files(llama_model * model, const std::string & folder) {
    const std::string path = folder + "/whole.kvs";
    Plan              plan({ { "scorer", "cumulative" }, { "budget", "0.25" } });
    World             w(model, plan.plan), loaded(model, plan.plan), drops(model, plan.plan);
    kvedge_error      err{};
    for (World * of : { &w, &loaded }) {
        CHECK(kvedge_keep(of->kv, KVEDGE_KEEP_MEMORY, nullptr, 0, KVEDGE_TYPE_F16, &err) == KVEDGE_OK);
    }
    CHECK(kvedge_keep_saved(w.kv, true, &err) == KVEDGE_OK && kvedge_keep_saved(nullptr, true, &err) == KVEDGE_E_ARGUMENT);
    CHECK(w.decode(words(model, PROMPT, 1)) == 0);
    w.answer(6);
    CHECK(w.good(kvedge_save(w.kv, 0, path.c_str(), "tiny", nullptr, 0, &err), err));
    kvedge_saved saved{};
    saved.struct_size = sizeof(saved);
    CHECK(kvedge_read_saved(path.c_str(), &saved, nullptr, 0, &err) == KVEDGE_OK && saved.whole);
    CHECK(saved.file_bytes > w.stats().bytes + w.stats().whole_bytes / 2);
    for (World * of : { &loaded, &drops }) {
        CHECK(of->good(kvedge_load(of->kv, 0, path.c_str(), "tiny", &err), err));
        of->next[0] = w.next[0];
        CHECK(of->kept(1, 0) == w.kept(1, 0));
    }
    CHECK(loaded.stats().whole_bytes > 0 && drops.stats().whole_bytes == 0);
    for (World * of : { &w, &loaded, &drops }) {
        CHECK(of->decode(words(model, PROMPT / 2, 2)) == 0);
        of->answer(4);
    }
    CHECK(loaded.kept(0, 0) == w.kept(0, 0) && loaded.kept(1, 1) == w.kept(1, 1) && drops.kept(1, 1) != w.kept(1, 1));
    const auto a = w.logits(), b = loaded.logits();
    CHECK(std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) { return close_to(x, y, 1e-4); }));
    CHECK(w.good(kvedge_keep_saved(w.kv, false, &err), err) && w.good(kvedge_save(w.kv, 0, path.c_str(), "tiny", nullptr, 0, &err), err));
    CHECK(kvedge_read_saved(path.c_str(), &saved, nullptr, 0, &err) == KVEDGE_OK && !saved.whole);
}

// A part of a sequence, copied or left after a cut, can be saved and loaded.
void parts_and_files(llama_model * model, const std::string & folder) {
    const std::string path = folder + "/part.kvs";
    const auto        through_file = [&](World & w, int32_t from, int32_t to) {
        kvedge_error err{};
        CHECK(llama_memory_seq_rm(w.memory(), to, -1, -1));
        CHECK(w.good(kvedge_save(w.kv, from, path.c_str(), "tiny", nullptr, 0, &err), err));
        CHECK(w.good(kvedge_load(w.kv, to, path.c_str(), "tiny", &err), err));
        CHECK(w.kept(0, 0, to) == w.kept(0, 0, from) && w.kept(1, 1, to) == w.kept(1, 1, from));
        w.next[(size_t) from] = w.next[(size_t) to] = llama_memory_seq_pos_max(w.memory(), from) + 1;
        w.answer(3, from);
        const auto logits = w.logits();
        w.answer(3, to);
        const auto again = w.logits();
        CHECK(std::equal(logits.begin(), logits.end(), again.begin(), [](float x, float y) { return close_to(x, y, 1e-4); }));
        CHECK(w.kept(1, 0, to) == w.kept(1, 0, from));
    };
    for (const auto & [decode, type] : { std::pair("keep-all", KVEDGE_TYPE_F16), { "sliding", KVEDGE_TYPE_F16 }, { "keep-all", KVEDGE_TYPE_Q8_0 } }) {
        Plan  plan({ { "scorer", "knorm" }, { "budget", "0.5" }, { "decode", decode } });
        World w(model, plan.plan, type);
        CHECK(w.decode(words(model, PROMPT, 7)) == 0);
        w.answer(12);
        for (const auto & [p0, p1] : { std::pair(0, PROMPT - 1), { 0, PROMPT / 2 }, { 0, 4 }, { PROMPT / 2, PROMPT - 1 }, { 0, PROMPT + 3 } }) {
            CHECK(llama_memory_seq_rm(w.memory(), 1, -1, -1));
            llama_memory_seq_cp(w.memory(), 0, 1, p0, p1);
            through_file(w, 1, 2);
        }
        CHECK(llama_memory_seq_rm(w.memory(), 0, 4, -1));  // fewer tokens remain than were generated
        through_file(w, 0, 3);
        llama_memory_seq_cp(w.memory(), 0, 1, 1000, 2000);  // copies no token
        CHECK(w.stats(1).n_tokens == PROMPT + 3 + 3);
    }
}

// A bounded prompt, compressed layer by layer, keeps the same rows as a prompt compressed at its end.
void bounded_prompts(llama_model * model) {
    for (const char * allocator : { "uniform", "spectral" }) {
        Plan         plan({ { "scorer", "dct" }, { "allocator", allocator }, { "budget", "0.25" } });
        World        whole(model, plan.plan), bounded(model, plan.plan);
        kvedge_error err{};
        const auto   tokens = words(model, PROMPT, 8);
        CHECK(whole.decode(tokens) == 0 && kvedge_compress(whole.kv, 0, &err) == KVEDGE_OK);
        CHECK(kvedge_bounded_layers(bounded.kv, 0) == -1);
        CHECK(bounded.good(kvedge_bound_prompt(bounded.kv, 0, nullptr, PROMPT, &err), err));
        CHECK(bounded.decode(tokens) == 0 && bounded.good(kvedge_compress(bounded.kv, 0, &err), err));
        const int32_t n_layers = whole.stats().n_layers;
        CHECK(kvedge_bounded_layers(bounded.kv, 0) == n_layers);
        for (int32_t l = 0; l < n_layers; l++) {
            CHECK(bounded.kept(l, 0) == whole.kept(l, 0));
        }
        bounded.answer(3);
        CHECK(kvedge_bounded_layers(bounded.kv, 0) == -1);
    }
}

void streams(llama_model * model) {
    Plan         plan({ { "scorer", "window" }, { "scorer.window", "8" }, { "budget", "32" }, { "sinks", "4" } });
    World        w(model, plan.plan);
    kvedge_error err{};
    for (int32_t i = 0; i < 20; i++) {  // 1,280 tokens in total, more than n_ctx
        CHECK((i % 3 == 0 ? w.decode_image(64) : w.decode(words(model, 64, (uint32_t) i))) == 0);
        CHECK(w.good(kvedge_compress_stream(w.kv, 0, &err), err));
        CHECK(w.kept(0, 0).size() == 32);
    }
    CHECK(w.stats().n_tokens == 20 * 64 && kvedge_cells(w.kv, 0) <= 64);
    w.answer(5);
    CHECK(w.kept(1, 1).size() == 32 + 5);
}

// Reads n tokens as a chunk of a second pass, and ends the chunk. n may be smaller than announced. Returns the status of the begin.
static kvedge_status read_chunk(World & w, const kvedge_replay_chunk & chunk, int32_t n, uint32_t seed) {
    kvedge_error err{};
    const auto   at     = w.next[0];
    const auto   status = kvedge_replay_begin(w.kv, 0, &chunk, &err);
    if (status == KVEDGE_OK) {
        CHECK(kvedge_compress(w.kv, 0, &err) == KVEDGE_E_STATE);
        CHECK(w.decode(words(w.model, n, seed)) == 0);
        CHECK(w.good(kvedge_replay_end(w.kv, 0, &err), err));
        w.next[0] = at;
    }
    return status;
}

// A second pass over a prompt changes only the choice of kept rows: otherwise the answer is the same as without the pass.
void second_passes(llama_model * model) {
    Plan          plan({ { "scorer", "replay" }, { "scorer.source", "repeat" }, { "allocator", "global" }, { "budget", "0.25" } });
    Plan          full({});
    kvedge_error  err{};
    const int32_t n = PROMPT, half = n / 2;
    const auto    prompt = words(model, n, 11);
    World         w(model, plan.plan), once(model, full.plan);
    CHECK(kvedge_replay_end(w.kv, 0, &err) == KVEDGE_OK && kvedge_plan_replays(plan.plan) && !kvedge_plan_replays(full.plan));
    CHECK(w.decode(prompt) == 0 && once.decode(prompt) == 0);
    CHECK(kvedge_compress(w.kv, 0, &err) == KVEDGE_E_STATE);  // the pass is missing
    CHECK(read_chunk(w, { half, n, 2, 8 }, 8, 1) == KVEDGE_E_STATE);  // the first half is missing
    CHECK(read_chunk(w, { 0, n + 1, 2, 8 }, 8, 1) == KVEDGE_E_ARGUMENT);
    CHECK(read_chunk(w, { 0, half, 2, half + 8 }, half, 1) == KVEDGE_OK);  // too few tokens: the chunk must be repeated
    CHECK(read_chunk(w, { half, n, 2, 8 }, 8, 1) == KVEDGE_E_STATE);
    CHECK(read_chunk(w, { 0, half, 2, half + 8 }, half + 8, 1) == KVEDGE_OK && read_chunk(w, { half, n, 2, 1 }, 1, 2) == KVEDGE_OK);
    CHECK(w.stats().n_tokens == n && w.stats().n_pending == n && llama_memory_seq_pos_max(w.memory(), 0) == n - 1);
    // removing tokens during a pass ends the pass
    const kvedge_replay_chunk chunk = { 0, n, 2, 8 };
    CHECK(kvedge_replay_begin(w.kv, 0, &chunk, &err) == KVEDGE_OK && w.decode(words(model, 4, 3)) == 0);
    CHECK(llama_memory_seq_rm(w.memory(), 0, n - 8, -1) && w.decode(words(model, 4, 4)) != 0);
    CHECK(kvedge_take_error(w.kv, &err) == KVEDGE_E_STATE && kvedge_replay_end(w.kv, 0, &err) == KVEDGE_OK);
    w.next[0] = n - 8;
    CHECK(w.stats().n_tokens == n - 8 && w.decode({ prompt.end() - 8, prompt.end() }) == 0);
    CHECK(read_chunk(w, { 0, n, 2, 40 }, 40, 5) == KVEDGE_OK);
    CHECK(w.good(kvedge_compress(w.kv, 0, &err), err) && w.stats().n_compressions == 1);
    const auto kept = w.kept(0, 0);
    CHECK(kept.size() > 1 && kept[0] == 0 && kept[1] == 1);
    w.answer(3);

    // a pass over a prompt whose plan then keeps everything
    World all(model, plan.plan);
    CHECK(all.decode(prompt) == 0 && read_chunk(all, { 0, n, 0, 60 }, 60, 6) == KVEDGE_OK);
    CHECK(kvedge_set_plan(all.kv, full.plan, &err) == KVEDGE_OK);
    all.answer(2);
    once.answer(2);
    CHECK(all.logits() == once.logits());
    all.clear();
    CHECK(kvedge_replay_begin(all.kv, 0, &chunk, &err) == KVEDGE_E_STATE);
}

// More of the prompt may come between the chunks of a pass, and an older pass that was dropped counts no more.
void passes_in_parts(llama_model * model) {
    Plan          plan({ { "scorer", "replay" }, { "scorer.source", "repeat" }, { "budget", "0.5" } }), full({});
    World         w(model, plan.plan);
    kvedge_error  err{};
    const int32_t n = PROMPT, all = 3 * n;
    CHECK(w.decode(words(model, n, 1)) == 0 && read_chunk(w, { 0, n, 2, 8 }, 8, 1) == KVEDGE_OK);
    CHECK(w.decode(words(model, all - n, 2)) == 0 && read_chunk(w, { n, all, 2, 8 }, 8, 3) == KVEDGE_OK);
    CHECK(w.good(kvedge_compress(w.kv, 0, &err), err));
    const auto kept = w.kept(0, 0);
    CHECK((int32_t) kept.size() == all / 2 && kept.front() < n && kept.back() >= n);
    CHECK(kvedge_set_plan(w.kv, full.plan, &err) == KVEDGE_OK && w.decode(words(model, 40, 4)) == 0);
    CHECK(kvedge_set_plan(w.kv, plan.plan, &err) == KVEDGE_OK && read_chunk(w, { 0, 40, 2, 8 }, 8, 5) == KVEDGE_OK);
    CHECK(llama_memory_seq_rm(w.memory(), 0, all, -1) && kvedge_compress(w.kv, 0, &err) == KVEDGE_OK);
    w.next[0] = all;
    CHECK(w.decode(words(model, 40, 6)) == 0 && read_chunk(w, { 20, 40, 2, 8 }, 8, 7) == KVEDGE_E_STATE);
}

// A second pass, a verification and a new choice change the same rows, so only one of them is possible at a time.
void passes_alone(llama_model * model) {
    Plan                      plan({ { "scorer", "replay" }, { "scorer.source", "repeat" }, { "budget", "0.25" } }), full({});
    World                     w(model, full.plan, KVEDGE_TYPE_F16, KVEDGE_DEVICES_NONE);
    kvedge_error              err{};
    const kvedge_replay_chunk chunk = { 0, 3, 0, 4 };
    CHECK(kvedge_keep(w.kv, KVEDGE_KEEP_MEMORY, nullptr, 0, KVEDGE_TYPE_F16, &err) == KVEDGE_OK);
    CHECK(w.decode(words(model, PROMPT, 1)) == 0 && kvedge_compress(w.kv, 0, &err) == KVEDGE_OK);
    w.answer(3);
    CHECK(kvedge_set_plan(w.kv, plan.plan, &err) == KVEDGE_OK && kvedge_verify_begin(w.kv, 0, 2, &err) == KVEDGE_OK);
    CHECK(kvedge_replay_begin(w.kv, 0, &chunk, &err) == KVEDGE_E_STATE && kvedge_verify_end(w.kv, 0, 0, &err) == KVEDGE_OK);
    CHECK(w.good(kvedge_replay_begin(w.kv, 0, &chunk, &err), err) && w.decode(words(model, 2, 2)) == 0);
    CHECK(kvedge_choose_again(w.kv, 0, &err) == KVEDGE_E_STATE && kvedge_verify_begin(w.kv, 0, 2, &err) == KVEDGE_E_STATE);
    CHECK(w.decode(words(model, 2, 3)) == 0 && w.good(kvedge_replay_end(w.kv, 0, &err), err));
    CHECK(w.kept(0, 0).size() == PROMPT + 3);

    // the heads of an answer that a decode policy bounds hold different tokens
    Plan               heavy({ { "scorer", "cumulative" }, { "budget", "0.5" }, { "decode", "heavy-hitter" } });
    World              bounded(model, heavy.plan, KVEDGE_TYPE_F16, KVEDGE_DEVICES_NONE);
    std::vector<float> scores(4 * PROMPT);
    CHECK(bounded.decode(words(model, PROMPT, 1)) == 0);
    bounded.answer(40);
    CHECK(kvedge_pending_scores(bounded.kv, 0, 0, scores.data(), 4 * PROMPT, &err) == KVEDGE_E_STATE);
    CHECK(kvedge_set_plan(bounded.kv, plan.plan, &err) == KVEDGE_OK);
    CHECK(kvedge_replay_begin(bounded.kv, 0, &chunk, &err) == KVEDGE_E_STATE);
}

// In a stream, tokens that the scorer did not observe have no sum of attention.
void scores_of_a_stream(llama_model * model) {
    Plan               plan({ { "scorer", "cumulative" }, { "budget", "32" } }), full({});
    World              w(model, plan.plan, KVEDGE_TYPE_F16, KVEDGE_DEVICES_NONE);
    kvedge_error       err{};
    constexpr int32_t  n = 32 + 200;
    std::vector<float> scores(4 * n, 1.0f);
    CHECK(w.decode(words(model, PROMPT, 1)) == 0 && w.good(kvedge_compress_stream(w.kv, 0, &err), err));
    CHECK(kvedge_set_plan(w.kv, full.plan, &err) == KVEDGE_OK);
    w.answer(200);
    CHECK(kvedge_set_plan(w.kv, plan.plan, &err) == KVEDGE_OK);
    CHECK(w.good(kvedge_pending_scores(w.kv, 0, 0, scores.data(), 4 * n, &err), err) && scores[0] > 0.0f);
    CHECK(std::all_of(scores.begin() + 32, scores.begin() + n, [](float x) { return x == 0.0f; }));
}
