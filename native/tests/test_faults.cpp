// Makes each allocation of a call fail once. The call reports it, leaks no memory and leaves the sequence unchanged; the same call then
// succeeds.

#include "faults.h"

#include "compress/compress.h"
#include "compress/stream.h"
#include "kvedge.h"
#include "rows.h"
#include "system/crc32.h"
#include "system/file.h"
#include "sequence/serial.h"

#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <string>

using namespace kvedge;

namespace {

const std::vector<LayerShape> SHAPES = { { 0, 4, 2, 32, 32 }, { 1, 4, 2, 32, 64 } };

// Returns a checksum of a sequence that does not depend on its blocks: tokens, rows, scores, and observed attention.
uint32_t checksum_of(const Sequence & seq) {
    uint32_t   sum  = 0;
    const auto tell = [&](const auto & x) { sum = crc32(sum, x.data(), x.size() * sizeof(x[0])); };
    tell(seq.rows.contents().pos);
    tell(seq.rows.contents().image);
    tell(std::vector<int32_t>{ seq.rows.pending_length() });
    for (int32_t l = 0; l < (int32_t) SHAPES.size(); l++) {
        for (int32_t h = 0; h < SHAPES[(size_t) l].n_heads_kv; h++) {
            const auto         tokens = seq.rows.head_tokens(l, h);
            std::vector<float> k, v;
            each_segment(seq.rows, l, h, [&](const Segment & s) {
                const size_t n = k.size(), m = v.size(), dk = (size_t) SHAPES[(size_t) l].d_k, dv = (size_t) SHAPES[(size_t) l].d_v;
                k.resize(n + (size_t) s.n * dk);
                v.resize(m + (size_t) s.n * dv);
                kernels().widen(s.k, s.n, (int32_t) dk, k.data() + n, dk);
                kernels().widen(s.v, s.n, (int32_t) dv, v.data() + m, dv);
            });
            std::vector<double> scores(tokens.size());
            read_scores(seq.rows, l, h, scores.data());
            tell(tokens), tell(k), tell(v);
            if (seq.rows.scored()) {
                tell(scores);
            }
            if (seq.observed.have().sums()) {
                const Columns & cs = seq.observed.layer((size_t) l).columns;
                const auto         n  = (size_t) std::min(cs.capacity, seq.rows.pending_length());  // later entries are unused
                sum = crc32(sum, cs.sums().data() + (size_t) h * (size_t) cs.capacity, n * sizeof(double));
            }
        }
    }
    return sum;
}

void enter(Sequence & seq, int32_t n) {
    std::vector<int32_t> pos((size_t) n);
    std::iota(pos.begin(), pos.end(), seq.rows.n_tokens());
    const int32_t at = seq.rows.pending_length();
    CHECK(make_room(seq, { { true, false }, false, false, 8 }, n) && seq.rows.append(n, pos.data(), false));
    const Storage plain = seq.rows.storage().plain();
    for (size_t l = 0; l < SHAPES.size(); l++) {
        Columns & cs = seq.observed.layer(l).columns;
        for (int32_t h = 0; h < SHAPES[l].n_heads_kv; h++) {
            for (int32_t t = 0; t < n; t++) {
                const auto place = seq.rows.place_from_end(t, n);
                const auto k = random_floats((size_t) SHAPES[l].d_k), v = random_floats((size_t) SHAPES[l].d_v);
                kernels().from_f32(plain.k, k.data(), k_row(place, (int32_t) l, h), k.size());
                kernels().from_f32(plain.v, v.data(), v_row(place, (int32_t) l, h), v.size());
                cs.sums()[(size_t) (h * cs.capacity + at + t)] = (double) (rng() % 1000);
            }
        }
    }
}

kvedge_plan * plan_of(const std::vector<std::pair<const char *, const char *>> & fields) {
    kvedge_plan * plan = nullptr;
    CHECK(kvedge_plan_create(&plan, nullptr) == KVEDGE_OK);
    for (const auto & [key, value] : fields) {
        CHECK(kvedge_plan_set(plan, key, value, nullptr) == KVEDGE_OK);
    }
    return plan;
}

struct Plans {
    kvedge_plan * merging = plan_of({ { "scorer", "cumulative" }, { "reducer", "pivotal" }, { "reducer.bias", "mass" }, { "budget", "0.4" } });
    kvedge_plan * bounded = plan_of({ { "scorer", "cumulative" }, { "budget", "0.5" }, { "decode", "heavy-hitter" } });
    kvedge_plan * keeping = plan_of({ { "scorer", "cumulative" }, { "budget", "500" } });
    kvedge_plan * stream  = plan_of({ { "scorer", "cumulative" }, { "reducer", "averaged" }, { "reducer.bias", "mass" }, { "budget", "24" }, { "sinks", "2" } });
    ~Plans() {
        for (kvedge_plan * plan : { merging, bounded, keeping, stream }) {
            kvedge_plan_free(plan);
        }
    }
};

// Makes a sequence with a compressed prompt, a pending prompt and generated tokens. evicting: a decode policy drops rows.
std::unique_ptr<Sequence> make(const Storage & storage, const Plans & plans, bool evicting) {
    rng.seed(3);
    auto        seq = std::make_unique<Sequence>(SHAPES, storage);
    Compression outcome;
    enter(*seq, 70);
    CHECK(compress_pending(*seq, evicting ? *plans.bounded : *plans.merging, 1, outcome, nullptr) == KVEDGE_OK);
    if (evicting) {
        seq->rows.evict(Eviction::by_score);
    } else {
        enter(*seq, 40);
    }
    for (int32_t i = 0; i < 33; i++) {
        CHECK(seal_generated(seq->rows));
        enter(*seq, 1);
    }
    return seq;
}

// Makes a sequence with a compressed prompt, an answer whose first rows are quantised, and the next prompt.
std::unique_ptr<Sequence> make_next(const Storage & storage, const Plans & plans) {
    rng.seed(4);
    auto        seq = std::make_unique<Sequence>(SHAPES, storage);
    Compression outcome;
    enter(*seq, 30);
    CHECK(compress_pending(*seq, *plans.merging, 1, outcome, nullptr) == KVEDGE_OK);
    for (int32_t i = 0; i < 33; i++) {
        CHECK(seal_generated(seq->rows));
        enter(*seq, 1);
    }
    enter(*seq, 40);
    return seq;
}

int64_t n_faults = 0;  // failed allocations
int64_t step     = 1;  // tries the first allocation, and each step-th after it

struct Operation {
    const char *                    name;
    std::function<bool(Sequence &)> call;  // false, or throws std::bad_alloc: out of memory
};

// Returns whether an operation succeeds. An operation may throw std::bad_alloc only.
bool succeeds(const Operation & operation, Sequence & seq) try {
    return operation.call(seq);
} catch (const std::bad_alloc &) {
    return false;
}

void try_operation(const Operation & operation, const std::function<std::unique_ptr<Sequence>()> & made) {
    const auto     expected = made();
    const uint32_t before   = checksum_of(*expected);
    CHECK(operation.call(*expected));
    const uint32_t after = checksum_of(*expected);
    int32_t        n_bad = failures();
    int64_t        n     = 1;
    for (bool fired = true; fired && failures() == n_bad; n += step) {
        const int64_t live = faults::live;
        {
            const auto seq = made();
            faults::arm(n);
            const bool good = succeeds(operation, *seq);
            fired           = faults::disarm();
            CHECK(good || fired);
            CHECK(checksum_of(*seq) == (good ? after : before));
            CHECK(good || (succeeds(operation, *seq) && checksum_of(*seq) == after));
        }
        CHECK(faults::live == live);
    }
    if (failures() != n_bad) {
        std::fprintf(stderr, "  %s, allocation %lld\n", operation.name, (long long) (n - step));
    }
    n_faults += (n - 1) / step - 1;
}

const std::string path =
    (std::filesystem::temp_directory_path() / ("kvedge-faults-" + std::to_string(std::random_device{}()) + ".kvs")).u8string();

bool save(const Sequence & seq) {
    kvedge_error err{};
    FileWriter   out;
    if (out.open(path.c_str(), &err) != KVEDGE_OK) {
        return false;
    }
    write_sequence(seq, out);
    return out.commit(&err) == KVEDGE_OK;
}

bool load(const Storage & storage, uint32_t & sum) {
    kvedge_error err{};
    FileReader   in;
    if (in.open(path.c_str(), &err) != KVEDGE_OK) {
        return false;
    }
    const auto seq = read_sequence(in, SHAPES, storage);
    CHECK(seq && in.left() == 0);
    sum = seq ? checksum_of(*seq) : 0;
    return true;
}

bool compressed(Sequence & seq, const kvedge_plan & plan, int32_t n_threads) {
    Compression  outcome;
    kvedge_error err{};
    const auto   status = compress_pending(seq, plan, n_threads, outcome, &err);
    CHECK(status == KVEDGE_OK || status == KVEDGE_E_MEMORY);
    return status == KVEDGE_OK;
}

void test_operations(const Storage & storage, const Plans & plans) {
    int32_t pos[60];
    std::iota(pos, pos + 60, 143);
    const std::vector<Operation> plain = {
        { "append one", [&](Sequence & s) { return s.rows.append(1, pos, false); } },
        { "append many", [&](Sequence & s) { return s.rows.append(60, pos, true); } },
        { "room", [&](Sequence & s) { return make_room(s, { { true, false }, true, true, 12 }, 300); } },
        { "copy", [&](Sequence & s) {
             const auto copy = s.clone();
             CHECK(!copy || checksum_of(*copy) == checksum_of(s));
             return copy != nullptr;
         } },
        { "remove", [&](Sequence & s) { s.remove(20, 90); return true; } },
        { "compress", [&](Sequence & s) { return compressed(s, *plans.merging, 1); } },
        { "compress with threads", [&](Sequence & s) { return compressed(s, *plans.merging, 2); } },
        { "compress, scored", [&](Sequence & s) { return compressed(s, *plans.bounded, 1); } },
        { "unseal", [&](Sequence & s) { return unseal_pending(s.rows); } },
        { "save", [&](Sequence & s) { return save(s); } },
    };
    const std::vector<Operation> evicting = {
        { "drop a row", [&](Sequence & s) { drop_row(s.rows, 1, 1, 60); return true; } },
        { "remove from an answer", [&](Sequence & s) { s.remove(20, 90); return true; } },
        { "append to an answer", [&](Sequence & s) { return s.rows.append(1, pos, false); } },
        { "seal", [&](Sequence & s) { return seal_generated(s.rows); } },
        { "save an answer", [&](Sequence & s) { return save(s); } },
    };
    for (const bool evicts : { false, true }) {
        const auto made = [&] { return make(storage, plans, evicts); };
        for (const Operation & operation : evicts ? evicting : plain) {
            if (!storage.quantised() && (!strcmp(operation.name, "unseal") || !strcmp(operation.name, "seal"))) {
                continue;  // these operations do nothing on plain rows
            }
            try_operation(operation, made);
        }
        CHECK(save(*made()));
        uint32_t expected = 0;
        CHECK(load(storage, expected));
        const Operation reading = { "load", [&](Sequence &) {
            uint32_t sum = 0;
            const bool good = load(storage, sum);
            CHECK(!good || sum == expected);
            return good;
        } };
        try_operation(reading, made);
    }
}

// The budget covers all pending rows: quantised rows stay as they are, and the others are quantised.
void test_quantised(const Storage & storage, const Plans & plans) {
    const auto made = [&] { return make_next(storage, plans); };
    try_operation({ "compress, all kept", [&](Sequence & s) {
        const auto seal = [&] { return seal_old(s.rows, s.rows.contents().blocks.size()); };  // does what a compression may leave undone
        return compressed(s, *plans.keeping, 1) && (seal() || seal());
    } }, made);
    try_operation({ "compress a copy, all kept", [&](Sequence & s) {
        Compression outcome;
        outcome.keep_original = true;
        const auto status = compress_pending(s, *plans.keeping, 1, outcome, nullptr);
        CHECK(status == KVEDGE_E_MEMORY || outcome.compressed_copy->rows.head_length(1, 1) == 73);
        return status == KVEDGE_OK;
    } }, made);
}

void test_streams(const Plans & plans) {
    const auto      made   = [&] { return make({ Type::f16, Type::f16 }, plans, false); };
    const Operation open   = { "open a stream", [&](Sequence & s) {
        kvedge_error err{};
        return open_stream(s, *plans.stream, &err) == KVEDGE_OK;
    } };
    const Operation stream = { "compress a stream", [&](Sequence & s) {
        Compression  outcome;
        kvedge_error err{};
        return compress_stream(s, *plans.stream, 1, outcome, &err) == KVEDGE_OK;
    } };
    const auto opened   = [&] { auto s = made(); CHECK(open.call(*s)); return s; };
    const auto streamed = [&] { auto s = opened(); CHECK(stream.call(*s)); enter(*s, 20); return s; };
    try_operation(open, made);
    try_operation(stream, opened);
    try_operation(stream, streamed);
    try_operation({ "remove from a stream", [&](Sequence & s) { s.remove(30, 150); return true; } }, streamed);
}

// ---------------------------------------------------------------------------------------------------------
// The C interface, which throws no exceptions.

// Checks that call() returns KVEDGE_OK or KVEDGE_E_MEMORY, and leaks nothing.
void try_call(const char * name, const std::function<kvedge_status()> & call) {
    CHECK(call() == KVEDGE_OK);  // makes objects that are made only once
    const int32_t n_bad = failures();
    int64_t       n     = 1;
    for (bool fired = true; fired && failures() == n_bad; n += step) {
        const int64_t live = faults::live;
        faults::arm(n);
        const auto status = call();
        fired             = faults::disarm();
        CHECK(status == KVEDGE_OK || (fired && status == KVEDGE_E_MEMORY));
        CHECK(faults::live == live);
    }
    if (failures() != n_bad) {
        std::fprintf(stderr, "  %s, allocation %lld\n", name, (long long) (n - step));
    }
    n_faults += (n - 1) / step - 1;
}

struct Arrays {
    static constexpr int32_t L = 2, H = 4, HKV = 2, T = 40, D = 32;
    std::vector<float>       q = random_floats((size_t) (L * H * T * D)), k = random_floats((size_t) (L * HKV * T * D)),
                             v = random_floats((size_t) (L * HKV * T * D));
    std::vector<uint8_t>     image = std::vector<uint8_t>((size_t) T, 0);

    kvedge_arrays given() const { return { L, H, HKV, T, D, q.data(), k.data(), v.data(), image.data() }; }
};

// Returns a checksum of a result; 0 if result is NULL.
uint32_t checksum_of(const kvedge_result * result) {
    uint32_t sum = result ? 1 : 0;
    for (int32_t l = 0; result && l < Arrays::L; l++) {
        for (int32_t h = 0; h < Arrays::HKV; h++) {
            const auto n = (size_t) kvedge_result_length(result, l, h);
            sum          = crc32(sum, kvedge_result_kept(result, l, h), n * sizeof(int32_t));
            sum          = crc32(sum, kvedge_result_k(result, l, h), n * Arrays::D * sizeof(float));
            sum          = crc32(sum, kvedge_result_v(result, l, h), n * Arrays::D * sizeof(float));
        }
    }
    return sum;
}

void try_arrays(const char * name, const kvedge_plan * plan, const Arrays & arrays, kvedge_type type, int32_t step, int32_t n_threads) {
    const kvedge_arrays in       = arrays.given();
    uint32_t            expected = 0;
    try_call(name, [&] {
        kvedge_result * result = nullptr;
        kvedge_error    err{};
        const auto      status = step > 0 ? kvedge_stream_arrays(plan, &in, type, type, step, n_threads, &result, &err)
                                          : kvedge_compress_arrays(plan, &in, type, n_threads, &result, &err);
        const uint32_t sum = checksum_of(result);
        kvedge_result_free(result);
        expected = expected ? expected : sum;
        CHECK(sum == (status == KVEDGE_OK ? expected : 0) && err.status == status);
        CHECK(status == KVEDGE_OK || strstr(err.message, "no memory"));
        return status;
    });
}

void test_members(const Arrays & arrays) {
    static const char * const KEYS[] = { "scorer", "allocator", "reducer" };
    for (int32_t stage = KVEDGE_STAGE_SCORER; stage <= KVEDGE_STAGE_REDUCER; stage++) {
        for (int32_t i = 0; const char * name = kvedge_stage_name((kvedge_stage) stage, i); i++) {
            kvedge_plan * plan = plan_of({ { "scorer", strcmp(name, "spectral") ? "cumulative" : "dct" }, { "budget", "0.3" }, { KEYS[stage], name } });
            if (!strcmp(name, "window") || !strcmp(name, "mixkv")) {
                CHECK(kvedge_plan_set(plan, "scorer.window", "8", nullptr) == KVEDGE_OK);
            }
            if (!strcmp(name, "heads")) {
                const std::vector<float> scores = { 1, 5, 1, 1, 2, 1, 1, 1 };
                CHECK(kvedge_plan_set_profile(plan, KVEDGE_STAGE_ALLOCATOR, scores.data(), nullptr, Arrays::L, Arrays::H, nullptr) == KVEDGE_OK);
            }
            if (!strcmp(name, "calibrated")) {
                const std::vector<float> shares = { 1, 5, 2, 1 };
                CHECK(kvedge_plan_set_profile(plan, KVEDGE_STAGE_ALLOCATOR, shares.data(), nullptr, Arrays::L, Arrays::HKV, nullptr) == KVEDGE_OK);
            }
            try_arrays(name, plan, arrays, KVEDGE_TYPE_F16, 0, 1);
            kvedge_plan_free(plan);
        }
    }
}

void test_interface(const Plans & plans) {
    Arrays arrays;
    std::fill(arrays.image.begin() + 10, arrays.image.begin() + 30, (uint8_t) 1);
    test_members(arrays);
    try_arrays("threads", plans.merging, arrays, KVEDGE_TYPE_F16, 0, 3);
    try_arrays("quantised", plans.merging, arrays, KVEDGE_TYPE_KIVI4, 0, 1);
    try_arrays("stream", plans.stream, arrays, KVEDGE_TYPE_F16, 16, 1);
    try_call("plan", [&] {
        kvedge_error   err{};
        kvedge_plan *  plan   = nullptr;
        const float    one[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
        kvedge_status  status = kvedge_plan_create(&plan, &err);
        status = status ? status : kvedge_plan_set(plan, "scorer", "mixkv", &err);
        status = status ? status : kvedge_plan_set(plan, "scorer.window", "16", &err);
        status = status ? status : kvedge_plan_set(plan, "allocator", "heads", &err);
        status = status ? status : kvedge_plan_set_profile(plan, KVEDGE_STAGE_ALLOCATOR, one, nullptr, 2, 4, &err);
        status = status ? status : kvedge_plan_check(plan, &err);
        kvedge_plan_free(plan);
        return status;
    });
}

}  // namespace

int main(int argc, char ** argv) {
#if defined(_WIN32)
    // on Windows the C++ library keeps its own operator new, so that memory of one allocator would be freed by the other
    (void) argc, (void) argv;
    std::fprintf(stderr, "not run on Windows, where a program cannot take the C++ library's allocations over\n");
    return 0;
#endif
    step = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
    const Plans plans;
    test_operations({ Type::f16, Type::f16 }, plans);
    test_operations({ Type::kivi4, Type::kivi4 }, plans);
    test_quantised({ Type::kivi4, Type::kivi4 }, plans);
    test_quantised({ Type::q8_0, Type::q8_0 }, plans);
    test_streams(plans);
    test_interface(plans);
    std::filesystem::remove(std::filesystem::u8path(path));
    std::fprintf(stderr, "%lld allocations failed, %d failures\n", (long long) n_faults, failures());
    return failures() != 0;
}
