// Compares the store with plain lists of rows under random series of operations. Also checks the memory cost of a long answer.

#include "kernels/kernels.h"
#include "system/pages.h"
#include "store/store.h"
#include "check.h"
#include "compress/compress.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <random>

// Bytes that operator new has allocated.
static std::atomic<size_t> g_allocated{ 0 };

void * operator new(size_t size) {
    g_allocated += size;
    if (void * p = std::malloc(size ? size : 1)) {
        return p;
    }
    throw std::bad_alloc();
}
void operator delete(void * p) noexcept { std::free(p); }
void operator delete(void * p, size_t) noexcept { std::free(p); }

using namespace kvedge;

namespace {

std::mt19937 rng(5);

int32_t below(int32_t n) { return std::uniform_int_distribution<int32_t>(0, n - 1)(rng); }

struct Row {
    int32_t token;
    double  score;
};

const std::vector<LayerShape> SHAPES = { { 0, 4, 2, 16, 8 }, { 1, 3, 3, 8, 24 } };

float value(int32_t token, size_t layer, size_t head, bool is_value) {
    return (float) (token % 251) + 0.25f * (float) (layer * 2 + (is_value ? 1 : 0)) + 300.0f * (float) head;
}

kvedge_plan test_plan(const char * decode) {
    kvedge_plan plan  = full_plan();
    plan.budget_ratio = 0.5;
    plan.scorer       = find_scorer("random");
    plan.decode       = find_decode(decode);
    return plan;
}

class Checked {
  public:
    explicit Checked(const char * decode) : seq(std::make_unique<Sequence>(SHAPES, Storage{ Type::f32, Type::f32 })), plan(test_plan(decode)) {
        for (size_t l = 0; l < SHAPES.size(); l++) {
            rows.emplace_back((size_t) SHAPES[l].n_heads_kv);
        }
    }

    bool scored() const { return plan.decode->needs_scores; }

    void append(int32_t n) {
        std::vector<int32_t> pos;
        for (int32_t i = 0; i < n; i++) {
            next_pos += below(3) ? 1 : 3;
            pos.push_back(next_pos);
        }
        const auto first = seq->rows.n_tokens();
        CHECK(seq->rows.append(n, pos.data(), false));
        each_head([&](size_t l, size_t h) {
            for (int32_t i = 0; i < n; i++) {
                const auto         at = seq->rows.place_from_end(i, n);
                std::vector<float> k((size_t) SHAPES[l].d_k, value(first + i, l, h, false));
                std::vector<float> v((size_t) SHAPES[l].d_v, value(first + i, l, h, true));
                kernels().from_f32(Type::f32, k.data(), k_row(at, (int32_t) l, (int32_t) h), k.size());
                kernels().from_f32(Type::f32, v.data(), v_row(at, (int32_t) l, (int32_t) h), v.size());
                rows[l][h].push_back({ first + i, 0.0 });
            }
        });
    }

    void prompt(int32_t n) {
        if (bounded) {
            seq->close_pending();
        }
        bounded = false;
        seq->rows.evict(Eviction::none);
        append(n);
    }

    void compress() {
        if (bounded || seq->rows.pending_length() == 0) {
            return;
        }
        const auto pending = pending_tokens(seq->rows);
        CHECK(make_room(*seq, { { true, false } }, 0));
        for (size_t l = 0; l < SHAPES.size(); l++) {
            for (size_t h = 0; h < rows[l].size(); h++) {
                for (size_t i = 0; i < pending.size(); i++) {
                    seq->observed.layer(l).columns.sums()[h * (size_t) seq->observed.layer(l).columns.capacity + i] = (double) (pending[i] * 7 % 100);
                }
            }
        }
        plan.budget_ratio = below(3) ? 0.5 : 0.0;  // 0.0: a budget of 400 pairs, more than the sequence has
        plan.budget_pairs = 400;
        Compression  outcome;
        kvedge_error err{};
        CHECK(compress_pending(*seq, plan, 2, outcome, &err) == KVEDGE_OK);
        each_head([&](size_t l, size_t h) {
            const auto tokens = seq->rows.head_tokens((int32_t) l, (int32_t) h);
            auto &     list   = rows[l][h];
            list.erase(std::remove_if(list.begin(), list.end(), [&](const Row & r) {
                           return !std::binary_search(tokens.begin(), tokens.end(), r.token);
                       }), list.end());
            for (Row & r : list) {
                if (scored() && std::binary_search(pending.begin(), pending.end(), r.token)) {
                    r.score = (double) (r.token * 7 % 100);
                }
            }
        });
        bounded = true;
        seq->rows.evict(scored() ? Eviction::by_score : Eviction::by_place);
    }

    void drop(bool anywhere) {
        each_head([&](size_t l, size_t h) {
            auto & list = rows[l][h];
            if (list.empty() || below(4) == 0) {
                return;
            }
            const int32_t row = anywhere ? below((int32_t) list.size()) : std::min((int32_t) list.size() - 1, 5);
            drop_row(seq->rows, (int32_t) l, (int32_t) h, row);
            list.erase(list.begin() + row);
        });
        drop_empty_blocks(seq->rows);
    }

    void attend() {
        each_head([&](size_t l, size_t h) {
            const int32_t      n = below((int32_t) rows[l][h].size() + 1), group = 1 + below(2);
            std::vector<float> w((size_t) (2 * n));
            for (float & x : w) {
                x = (float) below(100);
            }
            add_scores(seq->rows, (int32_t) l, (int32_t) h, n, w.data(), (size_t) n, group);
            for (int32_t i = 0; i < n && scored(); i++) {
                rows[l][h][(size_t) i].score += group == 1 ? w[(size_t) i] : (w[(size_t) i] + w[(size_t) (n + i)]) / 2.0;
            }
        });
    }

    void remove() {
        const int32_t p0 = below(next_pos + 2), p1 = p0 + below(12);
        const std::vector<int32_t> pos = seq->rows.contents().pos;
        seq->remove(p0, p1);
        each_head([&](size_t l, size_t h) {
            auto & list = rows[l][h];
            list.erase(std::remove_if(list.begin(), list.end(), [&](const Row & r) {
                           return pos[(size_t) r.token] >= p0 && pos[(size_t) r.token] < p1;
                       }), list.end());
        });
        CHECK(std::none_of(seq->rows.contents().pos.end() - (seq->rows.contents().pos.empty() ? 0 : 1), seq->rows.contents().pos.end(), [&](int32_t p) { return p >= p0 && p < p1; }));
    }

    void check() {
        each_head([&](size_t l, size_t h) {
            const auto   tokens = seq->rows.head_tokens((int32_t) l, (int32_t) h);
            const auto & list   = rows[l][h];
            CHECK(tokens.size() == list.size() && (size_t) seq->rows.head_length((int32_t) l, (int32_t) h) == list.size());
            std::vector<double> scores(list.size());
            read_scores(seq->rows, (int32_t) l, (int32_t) h, scores.data());
            size_t i = 0;
            each_segment(seq->rows, (int32_t) l, (int32_t) h, [&](const Segment & s) {
                for (int32_t r = 0; r < s.n && i < list.size(); r++, i++) {
                    const auto * k = (const float *) (s.k.data + (size_t) r * s.k.stride);
                    const auto * v = (const float *) (s.v.data + (size_t) r * s.v.stride);
                    CHECK(tokens[i] == list[i].token);
                    CHECK(k[0] == value(list[i].token, l, h, false) && k[SHAPES[l].d_k - 1] == k[0]);
                    CHECK(v[0] == value(list[i].token, l, h, true) && v[SHAPES[l].d_v - 1] == v[0]);
                    // rows have scores only after the first compression
                    CHECK(!bounded || close_to(scores[i], list[i].score, 1e-9));
                }
            });
            CHECK(i == list.size());
        });
    }

    template <class F> void each_head(const F & call) {
        for (size_t l = 0; l < SHAPES.size(); l++) {
            for (size_t h = 0; h < rows[l].size(); h++) {
                call(l, h);
            }
        }
    }

    std::unique_ptr<Sequence>                  seq;
    kvedge_plan                                plan;
    bool                                       bounded  = false;
    int32_t                                    next_pos = 0;
    std::vector<std::vector<std::vector<Row>>> rows;  // [layer][head]
};

void test_random_series(const char * decode) {
    Checked c(decode);
    c.prompt(40);
    c.compress();
    for (int32_t step = 0; step < 4000 && failures() == 0; step++) {
        const int32_t what = below(100);
        if (what < 70) {
            c.append(1);
            c.attend();
            if (c.bounded) {
                c.drop(what % 2 == 0);
            }
        } else if (what < 80 && c.bounded) {
            pack_if_sparse(c.seq->rows);
        } else if (what < 84) {
            c.remove();
        } else if (what < 90) {
            auto copy = c.seq->clone();
            CHECK(copy);
            c.seq = std::move(copy);
        } else if (what < 93) {
            c.prompt(1 + below(60));
        } else {
            c.compress();
        }
        c.check();
    }
}

// Decodes a long answer in which each new row replaces a dropped row of 300. anywhere: any row may be dropped.
void test_long_answer(bool anywhere) {
    Checked c(anywhere ? "heavy-hitter" : "sliding");
    c.prompt(600);
    c.plan.budget_pairs = 0;
    while (!c.bounded) {
        c.compress();
    }
    size_t most_blocks[2] = {}, most_bytes[2] = {}, asked[2] = {};
    for (int32_t step = 0; step < 20000; step++) {
        const size_t before = g_allocated;
        CHECK(c.seq->rows.append(1, &step, false));
        for (size_t l = 0; l < SHAPES.size(); l++) {
            for (int32_t h = 0; h < SHAPES[l].n_heads_kv; h++) {
                if (const int32_t n = c.seq->rows.head_length((int32_t) l, h); n > 300) {
                    drop_row(c.seq->rows, (int32_t) l, h, anywhere ? below(n - 30) : 4);
                }
            }
        }
        drop_empty_blocks(c.seq->rows);
        if (step % 32 == 0) {
            pack_if_sparse(c.seq->rows);
        }
        const size_t half = step < 10000 ? 0 : 1;
        if (step >= 2000) {
            most_blocks[half] = std::max(most_blocks[half], c.seq->rows.contents().blocks.size());
            most_bytes[half]  = std::max(most_bytes[half], (size_t) c.seq->rows.bytes());
        }
        if ((step >= 2000 && step < 5000) || step >= 17000) {
            asked[half] += g_allocated - before;
        }
    }
    size_t rows = 0;
    for (const LayerShape & s : SHAPES) {
        rows += 300 * (size_t) s.n_heads_kv * (row_k(s, Type::f32) + row_v(s, Type::f32));
    }
    CHECK(most_blocks[1] <= most_blocks[0]);
    CHECK(most_bytes[1] <= most_bytes[0] && most_bytes[1] < rows * 2);
    // the cost of a token does not depend on the number of earlier tokens; positions (5 bytes a token) grow by a quarter at a time
    CHECK((double) asked[1] < 1.1 * (double) asked[0] + 5.0 * 20000 * 1.25);
    CHECK(index_bytes(c.seq->rows) < 20600 * 5 * 1.25 + 2 * 300 * 5 * (sizeof(int32_t) + 4));
}

// A removal that matches no token changes nothing. A removal of compressed tokens does not change the observations of the pending
// prompt.
void test_removing_nothing() {
    Checked c("fixed-point");
    c.prompt(40);
    c.plan.budget_pairs = 0;
    while (!c.bounded) {
        c.compress();
    }
    c.prompt(30);
    Sequence & seq = *c.seq;
    CHECK(make_room(seq, { { true, true }, false, true, 8 }, 4));
    c.append(4);
    seq.observed.skip_windows(42);
    const int32_t last     = seq.rows.contents().pos.back(), first = seq.rows.contents().pos.front();
    const auto    capacity = seq.score_bytes();
    seq.observed.layer(1).columns.sums()[3]    = 5.0;
    const auto untouched = [&](size_t n) {
        c.check();
        CHECK((size_t) seq.rows.n_tokens() == n && seq.rows.contents().image.size() == n);
        CHECK(seq.observed.window_from() == 42 && seq.observed.have().window == 8);
        CHECK(seq.observed.layer(1).columns.sums()[3] == 5.0 && seq.observed.queries.of(0).size() == 1 && seq.observed.queries.of(0)[0].n == 4);
        CHECK(seq.score_bytes() == capacity);
    };
    for (const auto & [p0, p1] : { std::pair<int32_t, int32_t>{ last + 1, last + 100 }, { 0, first }, { first, first }, { last, last } }) {
        seq.remove(p0, p1);
        untouched(74);
    }
    const int32_t compressed = seq.rows.contents().pos[7];
    seq.remove(compressed, compressed + 1);
    c.each_head([&](size_t l, size_t h) {
        auto & list = c.rows[l][h];
        list.erase(std::remove_if(list.begin(), list.end(), [](const Row & r) { return r.token == 7; }), list.end());
    });
    untouched(74);
    seq.remove(last, last + 1);  // the last token of the prompt
    CHECK(seq.observed.window_from() == 73 && seq.rows.n_tokens() == 73 && seq.observed.queries.of(0)[0].n == 3);
}

// discard() clears whole pages, which stay usable, and does not change bytes of other pages.
void test_discard() {
    const size_t page  = 1u << 16;  // a multiple of every system's page size
    Pages        pages = Pages::take(8 * page);
    CHECK(pages);
    std::fill(pages.data(), pages.data() + pages.size(), (uint8_t) 7);
    discard(pages.data() + page / 2, 0);
    discard(pages.data() + page / 2, 100);
    CHECK(std::all_of(pages.data(), pages.data() + pages.size(), [](uint8_t x) { return x == 7; }));
    discard(pages.data() + page / 2, 3 * page);
    for (const size_t i : { (size_t) 0, page / 2 - 1, 7 * page / 2, 8 * page - 1 }) {
        CHECK(pages.data()[i] == 7);
    }
#if defined(__linux__)
    CHECK(std::all_of(pages.data() + page, pages.data() + 3 * page, [](uint8_t x) { return x == 0; }));
#endif
    std::fill(pages.data(), pages.data() + pages.size(), (uint8_t) 9);
    CHECK(std::all_of(pages.data(), pages.data() + pages.size(), [](uint8_t x) { return x == 9; }));
}

}  // namespace

int main() {
    for (const char * decode : { "heavy-hitter", "fixed-point" }) {
        test_random_series(decode);
    }
    test_long_answer(false);
    test_long_answer(true);
    test_removing_nothing();
    test_discard();
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
