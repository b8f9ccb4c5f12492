// Makes each allocation of libkvedge fail once in calls through llama.cpp, but no allocation of llama.cpp. A call whose allocation
// fails returns KVEDGE_E_MEMORY and leaves the sequence unchanged; the same call then succeeds.

#if defined(__linux__)

#    include "../faults.h"
#    include "system/crc32.h"
#    include "world.h"

#    include <algorithm>
#    include <cstdlib>
#    include <cstring>
#    include <execinfo.h>
#    include <filesystem>
#    include <functional>
#    include <map>

extern "C" char __executable_start, etext;  // bounds of the program's code, which contains libkvedge

namespace {

constexpr int32_t N = 40;  // tokens of a prompt

int64_t n_faults = 0;  // failed allocations
int64_t n_lost   = 0;  // failed allocations that lost a sequence

bool in_program(const void * address) { return address >= (const void *) &__executable_start && address < (const void *) &etext; }

// Returns whether libkvedge called the allocating function `caller`. The linker keeps one copy of each template function, so that code
// of llama.cpp's containers may lie in this program: the caller of that code decides.
bool is_ours(const void * caller) {
    void *     frames[12];
    const int  n  = in_program(caller) ? backtrace(frames, 12) : 0;
    const auto at = std::find(frames, frames + n, caller);
    return at < frames + n - 1 && in_program(at[1]);
}

// Returns a checksum of the kept tokens, keys and values of all KV heads. away: of the tokens only, as reading rows would fetch them.
uint32_t checksum_of(const World & w, int32_t seq, bool away = false) {
    uint32_t     sum = 0;
    kvedge_error err{};
    for (int32_t l = 0; l < w.stats().n_layers; l++) {
        int32_t h_q, h_kv, d_k, d_v;
        CHECK(kvedge_layer_shape(w.kv, l, &h_q, &h_kv, &d_k, &d_v, &err) == KVEDGE_OK);
        for (int32_t h = 0; h < h_kv; h++) {
            const int32_t n = kvedge_head_length(w.kv, seq, l, h);
            if (n <= 0) {
                continue;
            }
            const auto         tokens = w.kept(l, h, seq);
            std::vector<float> k((size_t) (n * d_k)), v((size_t) (n * d_v));
            sum = kvedge::crc32(sum, tokens.data(), tokens.size() * sizeof(int32_t));
            if (away) {
                continue;
            }
            CHECK(w.good(kvedge_head_rows(w.kv, seq, l, h, k.data(), v.data(), n, &err), err));
            sum = kvedge::crc32(sum, k.data(), k.size() * sizeof(float));
            sum = kvedge::crc32(sum, v.data(), v.size() * sizeof(float));
        }
    }
    return sum;
}

struct Call {
    const char *                          name;
    std::function<void(World &)>          before;         // prepares an empty context
    std::function<kvedge_status(World &)> call;
    int32_t                               seq  = 0;       // the sequence to check
    bool                                  gone = false;   // a failure loses the sequence, as kvedge.h says
    bool                                  due  = false;   // a failed call keeps the steps before: a compression, dropped rows
    bool                                  away = false;   // rows lie on a device before the call
};

// Returns the status that kvedge_take_error gives after llama_decode returned `code`. Checks that both agree.
kvedge_status decoded(World & w, int code) {
    kvedge_error err{};
    const auto   status = kvedge_take_error(w.kv, &err);
    CHECK((code == 0) == (status == KVEDGE_OK));
    return status;
}

// Repeats a call with the n-th allocation failing, for n = 1, 2, ... until the call has fewer allocations. lasting: all allocations after
// the n-th fail, too.
void try_call(llama_model * model, const kvedge_plan * plan, kvedge_type type, const Call & of, bool lasting) {
    World w(model, plan, type);
    llama_set_n_threads(w.ctx, 1, 1);  // more threads would be slower for small graphs, and this reads a thousand prompts
    uint32_t           after = 0;
    std::vector<float> logits;
    const int32_t      n_bad = failures();
    int64_t            n     = 0;  // allocation to fail; 0: none
    const char *       every = std::getenv("KVEDGE_FAULTS_EVERY");
    const int64_t      step  = every ? std::max(1, std::atoi(every)) : 1;  // tests every step-th allocation
    for (bool fired = true; fired && failures() == n_bad; n += n == 0 ? 1 : step) {
        w.clear();
        kvedge_set_plan(w.kv, plan, nullptr);
        of.before(w);
        const uint32_t before = checksum_of(w, of.seq, of.away);
        CHECK(of.away == (w.stats(of.seq).device_bytes > 0));
        const auto     next   = w.next;
        faults::arm(n, lasting);
        auto status = of.call(w);
        fired       = faults::disarm() || n == 0;
        const bool lost = of.away && status == KVEDGE_E_STATE && w.stats(of.seq).n_tokens == 0;  // failed between replaced layers
        CHECK(status == KVEDGE_OK || (n > 0 && fired && (status == KVEDGE_E_MEMORY || lost)));
        n_lost += lost;
        if (status != KVEDGE_OK) {
            CHECK(of.gone || of.due || lost || checksum_of(w, of.seq, of.away) == before);
            CHECK(!of.away || lost || w.stats(of.seq).device_bytes > 0);
            if (of.gone || lost) {
                w.clear();
                of.before(w);
            } else {
                CHECK(w.next == next);
            }
            status = of.call(w);
            CHECK(status == KVEDGE_OK);
        }
        const bool     given_up = kvedge_keep_problem(w.kv, of.seq) != nullptr;  // whole rows, so that later tokens see fewer rows
        const bool     moved    = kvedge_device_problem(w.kv, of.seq) != nullptr;  // the host compressed, whose rounding differs
        const uint32_t now   = checksum_of(w, of.seq);
        w.answer(2, of.seq);
        after  = n == 0 ? now : after;
        logits = n == 0 ? w.logits() : logits;
        CHECK(moved || given_up || (now == after && w.logits() == logits));
        CHECK((!moved || of.away) && (fired || (!moved && !given_up)));
    }
    if (failures() != n_bad) {
        std::fprintf(stderr, "  %s, allocation %d%s\n", of.name, (int) (n - step), lasting ? " and all after it" : "");
    }
    n_faults += n - 1 - step;
}

void try_call(llama_model * model, const kvedge_plan * plan, kvedge_type type, const Call & of) {
    try_call(model, plan, type, of, false);
    try_call(model, plan, type, of, true);
}

// Returns the tokens of a text. The first call, in which no allocation fails, makes the text; later calls allocate nothing.
const std::vector<llama_token> & text(const World & w, int32_t n, uint32_t seed) {
    static std::map<std::pair<int32_t, uint32_t>, std::vector<llama_token>> known;
    const auto                                                              at = known.find({ n, seed });
    return at != known.end() ? at->second : known.emplace(std::make_pair(n, seed), words(w.model, n, seed)).first->second;
}

const auto nothing = [](World &) {};
const auto prompt  = [](World & w) { CHECK(w.decode(text(w, N, 1)) == 0); };
const auto ready   = [](World & w) { prompt(w), w.answer(2); };
const auto next_tokens = [](World & w) { return decoded(w, w.decode(text(w, N / 2, 4))); };
const auto few_tokens  = [](World & w) { return decoded(w, w.decode(text(w, 5, 4))); };
const auto parts       = [](World & w) { prompt(w); CHECK(next_tokens(w) == KVEDGE_OK); };
const auto next_token  = [](World & w) { return decoded(w, w.decode(text(w, 1, 4))); };
const auto compress    = [](World & w) {
    kvedge_error err{};
    return kvedge_compress(w.kv, 0, &err);
};

void prompts_and_answers(llama_model * model) {
    for (const char * scorer : { "cumulative", "mixkv", "mean" }) {
        Plan plan({ { "scorer", scorer }, { "budget", "0.5" } });
        if (!strcmp(scorer, "mixkv")) {
            plan.set("scorer.window", "8");
        }
        try_call(model, plan.plan, KVEDGE_TYPE_F16, { "a prompt", nothing, next_tokens });
        try_call(model, plan.plan, KVEDGE_TYPE_F16, { "its second part", prompt, next_tokens });
        try_call(model, plan.plan, KVEDGE_TYPE_F16, { "a short third part", parts, few_tokens });
        try_call(model, plan.plan, KVEDGE_TYPE_F16, { "the first token of an answer", prompt, next_token, 0, false, true });
        try_call(model, plan.plan, KVEDGE_TYPE_F16, { "compress", prompt, compress });
    }
    Plan entropy({ { "scorer", "knorm" }, { "allocator", "entropy" }, { "budget", "0.5" } });
    try_call(model, entropy.plan, KVEDGE_TYPE_F16, { "a prompt of allocator entropy", prompt, next_tokens });
    try_call(model, entropy.plan, KVEDGE_TYPE_F16, { "compress by entropy", prompt, compress });
    Plan heavy({ { "scorer", "cumulative" }, { "budget", "0.5" }, { "decode", "heavy-hitter" } });
    try_call(model, heavy.plan, KVEDGE_TYPE_F16, { "the first token of a bounded answer", prompt, next_token, 0, false, true });
    try_call(model, heavy.plan, KVEDGE_TYPE_F16, { "a token that drops rows", ready, next_token, 0, false, true });
    try_call(model, heavy.plan, KVEDGE_TYPE_F16, { "the next prompt", ready, next_tokens });
    const auto long_answer = [](World & w) { prompt(w), w.answer(33); };
    try_call(model, heavy.plan, KVEDGE_TYPE_KIVI4, { "a token that quantises others", long_answer, next_token, 0, false, true });
    try_call(model, heavy.plan, KVEDGE_TYPE_Q8_0, { "compress and quantise", prompt, compress });
}

// Compressions on devices: the device measures, copies kept rows and merges evicted rows.
void on_devices(llama_model * model) {
    using Fields = std::vector<std::pair<const char *, const char *>>;
    const std::vector<Fields> plans = {
        { { "scorer", "mixkv" }, { "scorer.window", "8" } },
        { { "scorer", "dct" }, { "allocator", "spectral" } },
        { { "scorer", "cumulative" }, { "reducer", "pivotal" }, { "reducer.bias", "mass" } },
        { { "scorer", "keydiff" }, { "allocator", "ada" }, { "reducer", "nearest" } },
    };
    for (const Fields & fields : plans) {
        Plan plan({ { "budget", "0.5" } });
        for (const auto & [key, value] : fields) {
            plan.set(key, value);
        }
        try_call(model, plan.plan, KVEDGE_TYPE_F16, { "compress on a device", prompt, compress, 0, false, false, true });
    }
}

// Copies sequence 0. After a failure, no token enters the missing copy until the error was taken.
kvedge_status copied(World & w) {
    llama_memory_seq_cp(w.memory(), 0, 2, -1, -1);
    CHECK(kvedge_head_length(w.kv, 2, 0, 0) > 0 || (w.decode(text(w, 1, 4), 2) != 0 && w.next[2] == 0));
    const auto status = kvedge_take_error(w.kv, nullptr);
    w.next[2] = status == KVEDGE_OK ? w.next[0] : 0;
    return status;
}

void changes(llama_model * model, const std::string & folder) {
    static std::string path;
    path = folder + "/faults.kvs";
    Plan       plan({ { "scorer", "cumulative" }, { "budget", "0.5" } });
    const auto ours = [&](const Call & call) { try_call(model, plan.plan, KVEDGE_TYPE_F16, call); };
    ours({ "copy", ready, copied, 2 });
    ours({ "cut", ready, [](World & w) {
              const bool done = llama_memory_seq_rm(w.memory(), 0, N / 2, -1);
              const auto status = kvedge_take_error(w.kv, nullptr);
              CHECK(done == (status == KVEDGE_OK));
              w.next[0] = done ? N / 2 : w.next[0];
              return status;
          } });
    ours({ "save", ready, [](World & w) {
              kvedge_error err{};
              return kvedge_save(w.kv, 0, path.c_str(), "m", "note", 4, &err);
          } });
    ours({ "load", nothing, [](World & w) {
              kvedge_error err{};
              const auto   status = kvedge_load(w.kv, 0, path.c_str(), "m", &err);
              w.next[0]           = status == KVEDGE_OK ? N + 2 : 0;
              return status;
          } });
    const auto keep = [](World & w, kvedge_type type) {
        CHECK(kvedge_keep(w.kv, KVEDGE_KEEP_MEMORY, nullptr, 0, type, nullptr) == KVEDGE_OK && kvedge_keep_saved(w.kv, true, nullptr) == KVEDGE_OK);
    };
    const auto keeping = [&](World & w) { keep(w, KVEDGE_TYPE_F16); };
    ours({ "save whole rows", [&](World & w) { keeping(w), ready(w); }, [](World & w) {
              kvedge_error err{};
              return kvedge_save(w.kv, 0, path.c_str(), "m", "note", 4, &err);
          } });
    ours({ "load whole rows", keeping, [](World & w) {
              kvedge_error err{};
              const auto   status = kvedge_load(w.kv, 0, path.c_str(), "m", &err);
              CHECK((w.stats().whole_bytes > 0) == (status == KVEDGE_OK));
              w.next[0] = status == KVEDGE_OK ? N + 2 : 0;
              return status;
          } });
    ours({ "compress over rounded rows", [&](World & w) { keep(w, KVEDGE_TYPE_Q8_0), ready(w), next_tokens(w); }, compress });
    CHECK(std::distance(std::filesystem::directory_iterator(folder), {}) >= 1);
    for (const auto & entry : std::filesystem::directory_iterator(folder)) {
        CHECK(entry.path().extension() != ".part");
    }
    ours({ "plans", ready, [](World & w) {
              kvedge_error err{};
              kvedge_plan * other = nullptr;
              kvedge_status status = kvedge_plan_create(&other, &err);
              status = status ? status : kvedge_plan_set(other, "budget", "0.3", &err);
              status = status ? status : kvedge_set_plan(w.kv, other, &err);
              status = status ? status : kvedge_set_sequence_plan(w.kv, 1, other, &err);
              status = status ? status : kvedge_expect(w.kv, 3, 10, &err);
              kvedge_plan_free(other);
              return status;
          } });
}

const auto keep_whole = [](World & w) {
    CHECK(kvedge_keep(w.kv, KVEDGE_KEEP_MEMORY, nullptr, 0, KVEDGE_TYPE_F16, nullptr) == KVEDGE_OK);
};

// Verifies three tokens, of which two stay. A failure ends the verification.
kvedge_status verified(World & w, bool whole) {
    kvedge_error err{};
    const auto   next   = w.next[0];
    auto         status = whole ? kvedge_verify_whole(w.kv, 0, 3, &err) : kvedge_verify_begin(w.kv, 0, 3, &err);
    status = status ? status : decoded(w, w.decode_each(text(w, 3, 6)));
    status = status ? status : kvedge_verify_end(w.kv, 0, 2, &err);
    if (status != KVEDGE_OK) {
        faults::disarm();
        CHECK(w.good(kvedge_verify_end(w.kv, 0, 0, &err), err));
    }
    w.next[0] = next + (status == KVEDGE_OK ? 2 : 0);
    return status;
}

// Reads a second pass over the prompt, and compresses. A failure ends the pass.
kvedge_status passed(World & w) {
    kvedge_error              err{};
    const kvedge_replay_chunk chunk  = { 0, N, 2, 8 };
    const auto                next   = w.next[0];
    auto                      status = kvedge_replay_begin(w.kv, 0, &chunk, &err);
    status = status ? status : decoded(w, w.decode(text(w, 8, 5)));
    status = status ? status : kvedge_replay_end(w.kv, 0, &err);
    if (status != KVEDGE_OK) {
        faults::disarm();
        CHECK(w.good(kvedge_replay_end(w.kv, 0, &err), err));
    }
    w.next[0] = next;
    return status ? status : compress(w);
}

kvedge_status renumbered(World & w) {
    kvedge_error err{};
    return kvedge_renumber(w.kv, 0, N / 2, &w.next[0], &err);
}

kvedge_status chosen_again(World & w) {
    kvedge_error err{};
    const auto   status = kvedge_limit_tokens(w.kv, 0, 4, N / 2, 3, &err);
    return status ? status : kvedge_choose_again(w.kv, 0, &err);
}

void passes_and_drafts(llama_model * model) {
    Plan       replay({ { "scorer", "replay" }, { "scorer.source", "repeat" }, { "budget", "0.5" } });
    Plan       plan({ { "scorer", "cumulative" }, { "budget", "0.5" } });
    Plan       all({ { "scorer", "cumulative" }, { "budget", "500" } });
    const auto kept    = [](World & w) { keep_whole(w), prompt(w); CHECK(compress(w) == KVEDGE_OK); };
    const auto drafted = [&](World & w) { kept(w), w.answer(2); };
    const auto ours    = [&](const Call & call) { try_call(model, plan.plan, KVEDGE_TYPE_F16, call); };
    try_call(model, replay.plan, KVEDGE_TYPE_F16, { "a second pass", prompt, passed });
    ours({ "drafts", ready, [](World & w) { return verified(w, false); } });
    ours({ "drafts over whole rows", kept, [](World & w) { return verified(w, true); } });
    ours({ "a verification over whole rows", drafted, [](World & w) {
              const auto status = kvedge_verify_whole(w.kv, 0, 3, nullptr);
              w.next[0] -= status == KVEDGE_OK ? 2 : 0;
              return status;
          } });
    ours({ "a message over whole rows", drafted, next_tokens, 0, false, true });
    ours({ "compress over whole rows", [&](World & w) { drafted(w), next_tokens(w); }, compress });
    ours({ "choose again", drafted, chosen_again });
    ours({ "smaller positions", ready, renumbered });
    ours({ "smaller positions of whole rows", drafted, renumbered });
    const auto sealed = [](World & w) { prompt(w), w.answer(34); CHECK(few_tokens(w) == KVEDGE_OK); };
    for (const auto type : { KVEDGE_TYPE_Q8_0, KVEDGE_TYPE_KIVI2 }) {
        try_call(model, all.plan, type, { "compress, all kept", sealed, compress });
    }
    ours({ "scores", prompt, [](World & w) {
              static std::vector<float> scores(4 * N);
              return kvedge_pending_scores(w.kv, 0, 1, scores.data(), (int32_t) scores.size(), nullptr);
          } });
    ours({ "pack and unpack", ready, [](World & w) {
              static std::vector<uint8_t> bytes(1 << 20);
              size_t                      n      = bytes.size();
              const auto                  status = kvedge_pack(w.kv, 0, "m", bytes.data(), &n, nullptr);
              return status ? status : kvedge_unpack(w.kv, 1, "m", bytes.data(), n, nullptr);
          } });
}

void bounded_and_streams(llama_model * model) {
    Plan bounded({ { "scorer", "dct" }, { "allocator", "spectral" }, { "budget", "0.5" } });
    try_call(model, bounded.plan, KVEDGE_TYPE_F16, { "a bounded prompt", nothing, [](World & w) {
        kvedge_error err{};
        const auto   status = kvedge_bound_prompt(w.kv, 0, nullptr, N, &err);
        if (status != KVEDGE_OK) {
            return status;
        }
        const int  code  = w.decode(text(w, N, 1));
        const auto first = kvedge_take_error(w.kv, &err);
        const auto last  = kvedge_compress(w.kv, 0, &err);
        CHECK(code == 0 || first != KVEDGE_OK);
        CHECK((first == KVEDGE_OK) <= (last == KVEDGE_OK));
        return first;
    }, 0, true });
    Plan stream({ { "scorer", "cumulative" }, { "budget", "16" }, { "sinks", "2" } });
    const auto go_on = [](World & w) {
        kvedge_error err{};
        return kvedge_compress_stream(w.kv, 0, &err);
    };
    try_call(model, stream.plan, KVEDGE_TYPE_F16, { "a stream", prompt, go_on });
    try_call(model, stream.plan, KVEDGE_TYPE_F16, { "more of a stream", [&](World & w) {
        prompt(w);
        CHECK(go_on(w) == KVEDGE_OK);
        CHECK(w.decode(text(w, N, 2)) == 0);
    }, go_on });
}

// A failed kvedge_attach makes no cache, and the next kvedge_attach takes over all layers.
void attaching(llama_model * model) {
    Plan  plan({ { "scorer", "cumulative" }, { "budget", "0.5" } });
    World w(model, plan.plan);
    const int32_t n_layers = w.stats().n_layers;
    const int32_t n_bad    = failures();
    kvedge_error  err{};
    kvedge_options options;
    CHECK(kvedge_options_init(&options, sizeof(options), &err) == KVEDGE_OK);
    options.devices = World::usual_devices;
    bool fired = true;
    for (int64_t n = 1; fired && failures() == n_bad; n++) {
        kvedge_detach(w.kv);
        w.kv = nullptr;
        faults::arm(n);
        const auto status = kvedge_attach(w.ctx, plan.plan, &options, &w.kv, &err);
        fired             = faults::disarm();
        CHECK(status == KVEDGE_OK || (fired && status == KVEDGE_E_MEMORY && !w.kv));
        if (!w.kv) {
            CHECK(w.good(kvedge_attach(w.ctx, plan.plan, &options, &w.kv, &err), err));
        }
        CHECK(w.stats().n_layers == n_layers);
    }
    prompt(w);
    CHECK(w.good(kvedge_compress(w.kv, 0, &err), err));
}

}  // namespace

void no_memory_on_devices(llama_model * model) {
    faults::counted = is_ours;
    n_faults        = 0;
    on_devices(model);
    faults::counted = nullptr;
    std::fprintf(stderr, "%d allocations failed, %d of them between the layers\n", (int) n_faults, (int) n_lost);
    CHECK(n_faults > 200 && n_lost * 2 < n_faults);
}

void no_memory(llama_model * model, const std::string & folder) {
    faults::counted = is_ours;
    n_faults        = 0;
    attaching(model);
    prompts_and_answers(model);
    changes(model, folder);
    passes_and_drafts(model);
    bounded_and_streams(model);
    faults::counted = nullptr;
    std::fprintf(stderr, "%d allocations failed\n", (int) n_faults);
    CHECK(n_faults > 1000);
}

#else

#    include "world.h"

void no_memory_on_devices(llama_model *) {}
void no_memory(llama_model *, const std::string &) {}  // is_ours() needs symbols of Linux's linker

#endif
