// Custom stages, on layers of different shapes: the inputs of callbacks, their threads, and the state after a failure.

#include "kernels/kernels.h"
#include "store/store.h"
#include "check.h"
#include "compress/compress.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>

using namespace kvedge;

namespace {

constexpr int32_t T = 40, QUERIES = 5;

const std::vector<LayerShape> SHAPES = { { 0, 4, 2, 16, 8 }, { 1, 2, 1, 8, 24 }, { 2, 4, 2, 16, 8 }, { 3, 8, 4, 32, 32 } };

// Channel c of the key, value or query of token t, head h, layer l. Integers, which every storage type holds exactly.
float key(int32_t l, int32_t h, int32_t t, int32_t c) { return (float) ((l * 7 + h * 5 + t * 3 + c) % 61); }
float value(int32_t l, int32_t h, int32_t t, int32_t c) { return (float) ((l * 11 + h * 3 + t * 5 + c) % 53); }
float query(int32_t l, int32_t h, int32_t t, int32_t c) { return (float) ((l + h + t + c) % 16); }

Sequence make_sequence() {
    Sequence             seq(SHAPES, Storage{});
    std::vector<int32_t> pos(T);
    for (int32_t t = 0; t < T; t++) {
        pos[(size_t) t] = t;
    }
    CHECK(make_room(seq, { {}, false, false, QUERIES }, 0) && seq.rows.append(T - 3, pos.data(), false) && seq.rows.append(3, pos.data() + T - 3, true));
    for (int32_t l = 0; l < (int32_t) SHAPES.size(); l++) {
        const LayerShape & s = SHAPES[(size_t) l];
        for (int32_t h = 0; h < s.n_heads_kv; h++) {
            int32_t t = 0;
            for (const Segment & seg : seq.rows.view(l, h).pending) {
                for (int32_t r = 0; r < seg.n; r++, t++) {
                    for (int32_t c = 0; c < s.d_k; c++) {
                        const float x = key(l, h, t, c);
                        kernels().from_f32(Type::f16, &x, (uint8_t *) seg.k.data + (size_t) r * seg.k.stride + (size_t) c * 2, 1);
                    }
                    for (int32_t c = 0; c < s.d_v; c++) {
                        const float x = value(l, h, t, c);
                        kernels().from_f32(Type::f16, &x, (uint8_t *) seg.v.data + (size_t) r * seg.v.stride + (size_t) c * 2, 1);
                    }
                }
            }
        }
        for (int32_t t = T - QUERIES; t < T; t++) {
            for (int32_t h = 0; h < s.n_heads; h++) {
                for (int32_t c = 0; c < s.d_k; c++) {
                    seq.observed.layer((size_t) l).window.slot(t)[h * s.d_k + c] = query(l, h, t, c) / std::sqrt((float) s.d_k);
                }
            }
        }
    }
    return seq;
}

struct Seen {
    std::mutex                lock;
    std::set<std::thread::id> threads;
    int32_t                   calls = 0, wrong = 0, fail_at = -1;

    void call(bool right) {
        const std::lock_guard<std::mutex> guard(lock);
        threads.insert(std::this_thread::get_id());
        calls++;
        wrong += right ? 0 : 1;
    }
};

kvedge_status score(const kvedge_score_input * in, float * out, kvedge_error * err) {
    Seen &             seen  = *(Seen *) in->user_data;
    const LayerShape & s     = SHAPES[(size_t) in->layer];
    bool               right = in->n_layers == 4 && in->n_tokens == T && in->n_heads == s.n_heads && in->n_heads_kv == s.n_heads_kv &&
                 in->d_k == s.d_k && in->d_v == s.d_v && in->n_queries == 3 && !in->column_sums;
    for (int32_t h = 0; h < s.n_heads_kv; h++) {
        for (int32_t t = 0; t < T; t++) {
            right = right && in->image_mask[t] == (t >= T - 3 ? 1 : 0) && out[h * T + t] == 0.0f;
            for (int32_t c = 0; c < s.d_k; c++) {
                right = right && in->k[(h * T + t) * s.d_k + c] == key(in->layer, h, t, c);
            }
            for (int32_t c = 0; c < s.d_v; c++) {
                right = right && in->v[(h * T + t) * s.d_v + c] == value(in->layer, h, t, c);
            }
            out[h * T + t] = (float) (t % 4);
        }
    }
    for (int32_t r = 0; r < 3; r++) {
        for (int32_t h = 0; h < s.n_heads; h++) {
            for (int32_t c = 0; c < s.d_k; c++) {
                const float q = in->q[(r * s.n_heads + h) * s.d_k + c];
                right         = right && close_to(q, query(in->layer, h, T - 3 + r, c), 1e-6);
            }
        }
    }
    seen.call(right);
    if (in->layer == seen.fail_at) {
        snprintf(err->message, sizeof(err->message), "layer %d", (int) in->layer);
        return KVEDGE_E_STATE;
    }
    return KVEDGE_OK;
}

kvedge_status allocate(const kvedge_allocate_input * in, int32_t * counts, kvedge_error *) {
    bool right = in->n_layers == 4 && in->n_rows == 9 && in->n_heads_kv[1] == 1 && in->n_heads_kv[3] == 4 && in->budget == 10 &&
                 in->recent == 4;
    for (int32_t i = 0; i < 9 * T; i++) {
        right = right && in->scores[i] == (float) (i % T % 4);
    }
    for (int32_t r = 0; r < 9; r++) {
        counts[r] = 6 + r;
    }
    ((Seen *) in->user_data)->call(right);
    return KVEDGE_OK;
}

kvedge_status reduce(const kvedge_reduce_input * in, float * k, float * v, kvedge_error *) {
    Seen & seen  = *(Seen *) in->user_data;
    bool   right = in->n_tokens == T && in->recent == std::min(in->n_kept / 2, 4);
    for (int32_t i = 0; i < in->n_kept; i++) {
        for (int32_t c = 0; c < in->d_k; c++) {
            right = right && k[i * in->d_k + c] == key(in->layer, in->head, in->kept[i], c);
        }
        for (int32_t c = 0; c < in->d_v; c++) {
            right = right && v[i * in->d_v + c] == in->v[in->kept[i] * in->d_v + c];
            v[i * in->d_v + c] += 1.0f;
        }
    }
    seen.call(right);
    return in->layer == seen.fail_at ? KVEDGE_E_ARGUMENT : KVEDGE_OK;
}

// Returns a copy of a plan with three custom stages. The plan and the strings that it was made from no longer exist.
kvedge_plan make_plan(Seen * seen, bool threads) {
    kvedge_error  err{};
    kvedge_plan * plan = nullptr;
    CHECK(kvedge_plan_create(&plan, &err) == KVEDGE_OK);
    std::string             name = "a-name-that-is-longer-than-small-strings", word = "kind", words = "one,two";
    kvedge_setting          setting{ word.c_str(), nullptr, 1, 0, 0, 0, words.c_str() };
    kvedge_custom_scorer    scorer{ sizeof(kvedge_custom_scorer), name.c_str(), nullptr, &setting, 1, 3, 4, false, threads, score, seen };
    kvedge_custom_allocator allocator{ sizeof(kvedge_custom_allocator), name.c_str(), nullptr, nullptr, 0, allocate, seen };
    kvedge_custom_reducer   reducer{ sizeof(kvedge_custom_reducer), name.c_str(), nullptr, nullptr, 0, threads, reduce, seen };
    CHECK(kvedge_plan_add_scorer(plan, &scorer, &err) == KVEDGE_OK);
    CHECK(kvedge_plan_add_scorer(plan, &scorer, &err) == KVEDGE_E_ARGUMENT);
    CHECK(kvedge_plan_add_allocator(plan, &allocator, &err) == KVEDGE_OK && kvedge_plan_add_reducer(plan, &reducer, &err) == KVEDGE_OK);
    CHECK(kvedge_plan_add_reducer(plan, nullptr, &err) == KVEDGE_E_ARGUMENT);
    for (const char * stage : { "scorer", "allocator", "reducer" }) {
        CHECK(kvedge_plan_set(plan, stage, name.c_str(), &err) == KVEDGE_OK);
    }
    CHECK(kvedge_plan_set(plan, "scorer.kind", "two", &err) == KVEDGE_OK && plan->params[KVEDGE_STAGE_SCORER][0] == 1.0);
    CHECK(kvedge_plan_set(plan, "scorer.kind", "three", &err) == KVEDGE_E_ARGUMENT && strstr(err.message, "one,two"));
    CHECK(kvedge_plan_set(plan, "budget", "10", &err) == KVEDGE_OK);
    kvedge_plan copy = *plan;
    kvedge_plan_free(plan);
    return copy;
}

void check_run(bool threads, int32_t n_threads) {
    Seen        seen;
    kvedge_plan plan = make_plan(&seen, threads);
    Sequence    seq  = make_sequence();
    Compression outcome;
    kvedge_error err{};
    CHECK(compress_pending(seq, plan, n_threads, outcome, &err) == KVEDGE_OK && outcome.reduced);
    CHECK(seen.calls == 4 + 1 + 9 && seen.wrong == 0);
    CHECK(threads || seen.threads == std::set<std::thread::id>{ std::this_thread::get_id() });
    for (int32_t l = 0, row = 0; l < 4; l++) {
        for (int32_t h = 0; h < SHAPES[(size_t) l].n_heads_kv; h++, row++) {
            CHECK(seq.rows.head_length(l, h) == 6 + row);
            each_segment(seq.rows, l, h, [&](const Segment & seg) {
                float v;
                kernels().to_f32(Type::f16, seg.v.data, &v, 1);
                CHECK(v == value(l, h, seq.rows.head_tokens(l, h)[0], 0) + 1.0f);
            });
        }
    }
}

void check_failures(bool threads) {
    for (int32_t at = 0; at < 4; at++) {
        for (bool late : { false, true }) {
            Seen        fine, fails;
            kvedge_plan plan = make_plan(&fine, threads), other = make_plan(&fails, threads);
            fails.fail_at    = at;
            if (late) {
                plan.reducer = other.reducer;
                plan.own.insert(plan.own.end(), other.own.begin(), other.own.end());
            } else {
                plan = other;
            }
            Sequence     seq    = make_sequence();
            const auto   before = seq.rows.bytes();
            Compression  outcome;
            kvedge_error err{};
            CHECK(compress_pending(seq, plan, 4, outcome, &err) == KVEDGE_E_STAGE && err.status == KVEDGE_E_STAGE);
            CHECK(strstr(err.message, late ? "reducer 'a-name" : "scorer 'a-name") && (late || strstr(err.message, "layer")));
            CHECK(seq.rows.bytes() == before && seq.rows.pending_length() == T && seq.rows.head_length(3, 3) == T);
            fails.fail_at = -1;
            CHECK(compress_pending(seq, plan, 4, outcome, &err) == KVEDGE_OK && seq.rows.pending_length() == 0);
            CHECK(fine.wrong == 0 && fails.wrong == 0);  // the failed run left the rows unchanged
        }
    }
}

}  // namespace

int main() {
    for (bool threads : { false, true }) {
        for (int32_t n_threads : { 1, 4 }) {
            check_run(threads, n_threads);
        }
        check_failures(threads);
    }
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
