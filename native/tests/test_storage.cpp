// Checks sequences of every storage type after prompts, generated tokens, drops, cuts and copies: each token has its own rows, as exact
// as the type allows, and KIVI types have no more plain rows than the residual.

#include "kernels/kernels.h"
#include "store/store.h"
#include "check.h"
#include "compress/compress.h"
#include "sequence/sequence.h"
#include "plan/storage.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <random>
#include <vector>

using namespace kvedge;

namespace {

std::mt19937 rng(3);

std::vector<LayerShape> SHAPES = { { 0, 4, 2, 64, 32 }, { 1, 2, 1, 32, 96 } };

struct Row {
    std::vector<float> k, v;
};

// A sequence, and a copy of every row that was ever written to it.
struct Shadow {
    Sequence                                   seq;
    std::vector<std::vector<std::vector<Row>>> rows;  // [token][layer][head]

    explicit Shadow(const Storage & storage) : seq(SHAPES, storage) {}

    void add(int32_t n) {
        std::normal_distribution<float> normal;
        std::vector<int32_t>            pos;
        for (int32_t i = 0; i < n; i++) {
            pos.push_back(seq.rows.n_tokens() + i);
        }
        rows.resize((size_t) seq.rows.n_tokens());  // new tokens reuse the indices of tokens removed from the end
        CHECK(seq.rows.append(n, pos.data(), false));
        const Storage plain = seq.rows.storage().plain();
        for (int32_t t = 0; t < n; t++) {
            rows.emplace_back(SHAPES.size());
            for (size_t l = 0; l < SHAPES.size(); l++) {
                for (int32_t h = 0; h < SHAPES[l].n_heads_kv; h++) {
                    Row row{ std::vector<float>((size_t) SHAPES[l].d_k), std::vector<float>((size_t) SHAPES[l].d_v) };
                    std::generate(row.k.begin(), row.k.end(), [&] { return normal(rng); });
                    std::generate(row.v.begin(), row.v.end(), [&] { return normal(rng); });
                    const auto at = seq.rows.place_from_end(t, n);
                    kernels().from_f32(plain.k, row.k.data(), k_row(at, (int32_t) l, h), row.k.size());
                    kernels().from_f32(plain.v, row.v.data(), v_row(at, (int32_t) l, h), row.v.size());
                    rows.back()[l].push_back(std::move(row));
                }
            }
        }
    }

    void generate(int32_t n) {
        for (int32_t i = 0; i < n; i++) {
            CHECK(seal_generated(seq.rows));
            add(1);
        }
    }
};

double cosine(const float * a, const std::vector<float> & b) {
    double dot = 0.0, aa = 1e-30, bb = 1e-30;
    for (size_t i = 0; i < b.size(); i++) {
        dot += (double) a[i] * b[i];
        aa += (double) a[i] * a[i];
        bb += (double) b[i] * b[i];
    }
    return dot / std::sqrt(aa * bb);
}

// Returns the least allowed cosine between a stored row and the written row. The cosine with another token's row would be about 0.
double exactness(Type t) {
    const int range = format(t).highest - format(t).lowest;
    return !is_quantised(t) ? 0.99999 : unrotated(t) == Type::tq3 ? 0.96 : range < 4 ? 0.7 : range < 250 ? 0.985 : 0.9999;
}

void check(const Sequence & seq, const Shadow & shadow, bool once = true) {
    const Storage storage = seq.rows.storage();
    for (size_t l = 0; l < SHAPES.size(); l++) {
        for (int32_t h = 0; h < SHAPES[l].n_heads_kv; h++) {
            const auto tokens = seq.rows.head_tokens((int32_t) l, h);
            CHECK((int32_t) tokens.size() == seq.rows.head_length((int32_t) l, h) && std::is_sorted(tokens.begin(), tokens.end()));
            size_t             at = 0;
            int32_t            plain_k = 0, plain_v = 0;
            std::vector<float> k, v;
            each_segment(seq.rows, (int32_t) l, h, [&](const Segment & s) {
                const auto dk = (size_t) SHAPES[l].d_k, dv = (size_t) SHAPES[l].d_v, n = (size_t) s.n;
                k.resize(n * dk);
                v.resize(n * dv);
                kernels().widen(s.k, s.n, (int32_t) dk, k.data(), dk);
                kernels().widen(s.v, s.n, (int32_t) dv, v.data(), dv);
                plain_k += is_quantised(s.k.type) ? 0 : s.n;
                plain_v += is_quantised(s.v.type) ? 0 : s.n;
                for (size_t r = 0; r < n && at < tokens.size(); r++, at++) {
                    const Row &  row   = shadow.rows[(size_t) tokens[at]][l][(size_t) h];
                    const double twice = once ? 0.0 : 0.05;  // loss of cosine by a second rounding
                    CHECK(cosine(k.data() + r * dk, row.k) > exactness(storage.k) - twice);
                    CHECK(cosine(v.data() + r * dv, row.v) > exactness(storage.v) - twice);
                }
            });
            CHECK(at == tokens.size());
            if (seq.rows.pending_length() <= GROUP) {  // no prompt awaits its compression
                CHECK(!is_quantised(storage.k) || plain_k <= 2 * GROUP - 1);
                CHECK(!is_quantised(storage.v) || plain_v <= 3 * GROUP - 1);
            }
        }
    }
}

kvedge_plan plan_of(double ratio) {
    kvedge_plan plan  = full_plan();
    plan.budget_ratio = ratio;
    plan.scorer       = find_scorer("knorm");
    return plan;
}

void compress(Shadow & x, double ratio) {
    Compression  outcome;
    kvedge_error err{};
    CHECK(compress_pending(x.seq, plan_of(ratio), 2, outcome, &err) == KVEDGE_OK);
    CHECK(x.seq.rows.pending_length() == 0 && outcome.after_bytes == x.seq.rows.bytes());
}

// Drops n random rows of each KV head.
void drop_some(Shadow & x, int32_t n) {
    for (size_t l = 0; l < SHAPES.size(); l++) {
        for (int32_t h = 0; h < SHAPES[l].n_heads_kv; h++) {
            for (int32_t i = 0; i < n; i++) {
                const auto    before = x.seq.rows.head_tokens((int32_t) l, h);
                const int32_t row    = (int32_t) (rng() % before.size());
                drop_row(x.seq.rows, (int32_t) l, h, row);
                auto expected = before;
                expected.erase(expected.begin() + row);
                CHECK(x.seq.rows.head_tokens((int32_t) l, h) == expected);
            }
        }
    }
    drop_empty_blocks(x.seq.rows);
}

void test_conversation(const Storage & storage) {
    Shadow x(storage);
    x.add(5);
    x.add(195);
    check(x.seq, x);
    compress(x, 0.5);
    CHECK(x.seq.rows.head_length(0, 0) == 100);
    check(x.seq, x);
    x.generate(700);  // seals rows, and joins sealed blocks
    check(x.seq, x);
    CHECK(x.seq.rows.contents().blocks.size() < 20);
    x.seq.remove(300, 317);  // in sealed pending blocks
    x.seq.remove(3, 60);     // in the compressed block
    x.seq.remove(880, INT_MAX);
    check(x.seq, x);
    x.add(90);
    compress(x, 0.5);  // converts the answer to plain rows and quantises it again
    check(x.seq, x, false);
    x.generate(40);
    const auto copy = x.seq.clone();
    CHECK(copy && copy->rows.bytes() == x.seq.rows.bytes());
    x.seq.remove(0, 500);
    check(*copy, x, false);
    check(x.seq, x, false);
}

void test_whole_prompts_are_quantised(const Storage & storage) {
    Shadow x(storage);
    for (int32_t n : { 300, 1, 64, 97 }) {
        x.add(n);
        compress(x, 1.0);
        check(x.seq, x);
        x.generate(50);
        check(x.seq, x);  // a prompt that is kept whole is quantised once
    }
    CHECK(x.seq.rows.head_length(0, 0) == 462 + 4 * 50);
}

void test_policies(const Storage & storage) {
    Shadow x(storage);
    x.add(400);
    compress(x, 0.5);
    for (int32_t turn = 0; turn < 6; turn++) {
        drop_some(x, 20);
        check(x.seq, x);
        x.generate(45);
        check(x.seq, x);
    }
    x.seq.close_pending();  // the next compression does not change an answer under a decode policy
    x.add(100);
    compress(x, 0.3);
    check(x.seq, x);
    drop_some(x, 150);
    check(x.seq, x);
}

// Drops a random row for each new row: pack_if_sparse packs gaps and joins sparse groups, so that memory stays bounded.
void test_any_row_goes(const Storage & storage) {
    Shadow x(storage);
    x.add(500);
    compress(x, 0.4);
    x.seq.rows.evict(Eviction::by_place);
    size_t most = 0;
    for (int32_t step = 0; step < 3000; step++) {
        CHECK(seal_generated(x.seq.rows));
        x.add(1);
        for (size_t l = 0; l < SHAPES.size(); l++) {
            for (int32_t h = 0; h < SHAPES[l].n_heads_kv; h++) {
                const int32_t n = x.seq.rows.head_length((int32_t) l, h);
                if (n > 200) {
                    drop_row(x.seq.rows, (int32_t) l, h, (int32_t) (rng() % (size_t) (n - 100)));  // keeps the 100 newest rows
                }
            }
        }
        drop_empty_blocks(x.seq.rows);
        if (step % 32 == 31) {
            pack_if_sparse(x.seq.rows);
            uint64_t bytes = 0;
            for (const auto & block : x.seq.rows.contents().blocks) {
                for (const auto & layer : block.layers) {
                    bytes += layer.rows.extent();
                }
            }
            most = std::max(most, (size_t) bytes);
        }
    }
    check(x.seq, x, false);
    size_t rows = 0, plain = 0;
    for (const LayerShape & s : SHAPES) {
        rows += (size_t) s.n_heads_kv * 200 * (row_bytes(storage.k, s.d_k) + row_bytes(storage.v, s.d_v));
        plain += (size_t) s.n_heads_kv * 96 * (row_bytes(storage.plain().k, s.d_k) + row_bytes(storage.plain().v, s.d_v));
    }
    // half of the rows lie in groups, and a group may have room for three dropped rows for each row that it holds
    CHECK(most < (is_grouped(storage.k) ? 3 * rows : 2 * rows) + plain);
}

void test_kivi_residual() {
    for (int32_t n : { 1, 31, 32, 33, 64, 100, 128 }) {
        Shadow x({ of_keys(Type::kivi2), Type::kivi2 });
        x.add(n);
        compress(x, 1.0);
        int32_t plain_k = 0, plain_v = 0;
        each_segment(x.seq.rows, 0, 0, [&](const Segment & s) {
            plain_k += is_quantised(s.k.type) ? 0 : s.n;
            plain_v += is_quantised(s.v.type) ? 0 : s.n;
        });
        CHECK(plain_k == n % 32 && plain_v == std::min(n, 32));
    }
}

// rotate_storage follows llama.cpp's rule, separately for keys and values.
void test_what_is_rotated() {
    const auto both = [](int32_t d_k, int32_t d_v, Type t, kvedge_rotate how) {
        Storage      storage{ of_keys(t), t };
        kvedge_error err{};
        const auto   status = rotate_storage(storage, how, { { 0, 4, 2, d_k, d_v }, { 1, 4, 2, 128, 128 } }, &err);
        CHECK(unrotated(storage.k) == of_keys(t) && unrotated(storage.v) == t && (status == KVEDGE_OK) == (err.message[0] == 0));
        return status == KVEDGE_OK ? (is_rotated(storage.k) ? 1 : 0) + (is_rotated(storage.v) ? 2 : 0) : -1;
    };
    CHECK(both(128, 128, Type::q4_0, KVEDGE_ROTATE_AUTO) == 3 && both(128, 128, Type::q8_0, KVEDGE_ROTATE_ON) == 3);
    CHECK(both(128, 128, Type::q4_0, KVEDGE_ROTATE_OFF) == 0);
    CHECK(both(64, 128, Type::q8_0, KVEDGE_ROTATE_AUTO) == 2 && both(64, 128, Type::q8_0, KVEDGE_ROTATE_ON) == 3);
    CHECK(both(96, 128, Type::q8_0, KVEDGE_ROTATE_AUTO) == 2 && both(96, 128, Type::q8_0, KVEDGE_ROTATE_ON) == -1);
    for (Type t : { Type::f16, Type::f32, Type::kivi4, Type::kivi2 }) {
        CHECK(both(128, 128, t, KVEDGE_ROTATE_AUTO) == 0 && both(128, 128, t, KVEDGE_ROTATE_ON) == -1);
    }
    CHECK(rotation(rotated_keys(Type::q8_0), 192) == 64 && rotation(rotated_keys(Type::q8_0), 256) == 256);
    CHECK(rotation(rotated_values(Type::q8_0), 256) == 64 && rotation(Type::q8_0, 256) == 0);
}

}  // namespace

int main() {
    for (int32_t i = 0; i <= KVEDGE_TYPE_TQ3; i++) {
        const char * const names[] = { "f16", "bf16", "f32", "q8_0", "q4_0", "kivi4", "kivi2", "tq3" };
        CHECK(strcmp(kvedge_type_name(i), names[i]) == 0);
    }
    std::vector<Storage> storages = {
        { Type::f16, Type::f16 }, { Type::q8_0, Type::kivi2 }, { of_keys(Type::kivi4), Type::f32 }, { Type::bf16, Type::q4_0 },
    };
    for (int32_t i = KVEDGE_TYPE_Q8_0; kvedge_type_name(i); i++) {
        storages.push_back({ of_keys((Type) i), (Type) i });
    }
    for (const Storage & storage : storages) {
        std::fprintf(stderr, "%d:%d\n", (int) storage.k, (int) storage.v);
        test_conversation(storage);
        test_whole_prompts_are_quantised(storage);
        test_policies(storage);
        test_any_row_goes(storage);
    }
    test_kivi_residual();
    test_what_is_rotated();
    SHAPES = { { 0, 4, 2, 64, 128 }, { 1, 2, 1, 192, 64 } };
    for (const Storage & storage : { Storage{ rotated_keys(Type::q4_0), rotated_values(Type::q4_0) }, { rotated_keys(Type::q8_0), Type::kivi2 },
                                     { of_keys(Type::kivi4), rotated_values(Type::q8_0) },
                                     { rotated_keys(Type::tq3), rotated_values(Type::tq3) } }) {
        test_conversation(storage);
        test_whole_prompts_are_quantised(storage);
        test_policies(storage);
        test_any_row_goes(storage);
    }
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
