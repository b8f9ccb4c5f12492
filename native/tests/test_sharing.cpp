// Compares sequences that share rows, in memory or in a file, with sequences that have their own memory.

#include "folder.h"
#include "rows.h"
#include "store/following.h"
#include "system/spill.h"

#include <algorithm>
#include <chrono>
#include <thread>

using namespace kvedge;

namespace {

const std::vector<LayerShape> SHAPES = { { 0, 4, 2, 64, 32 } };

int32_t below(int32_t n) { return std::uniform_int_distribution<int32_t>(0, n - 1)(rng); }

void append_rows(Sequence & seq, int32_t n) {
    std::vector<int32_t> pos;
    for (int32_t i = 0; i < n; i++) {
        pos.push_back(seq.rows.n_tokens() + i);
    }
    CHECK(seq.rows.append(n, pos.data(), false));
}

// Appends n tokens with the same rows to both sequences.
void append_both(Sequence & a, Sequence & b, int32_t n) {
    const auto k = random_floats((size_t) n * 2 * 64), v = random_floats((size_t) n * 2 * 32);
    for (Sequence * seq : { &a, &b }) {
        append_rows(*seq, n);
        store(*seq, k, v, n);
    }
}

bool same_rows(const Store & a, const Store & b) {
    std::vector<float> ka, va, kb, vb;
    bool               good = a.contents().pos == b.contents().pos;
    for (int32_t h = 0; h < 2; h++) {
        rows_of(a, h, ka, va);
        rows_of(b, h, kb, vb);
        good = good && ka == kb && va == vb && a.head_tokens(0, h) == b.head_tokens(0, h);
    }
    return good;
}

// A sequence that shares rows, and a sequence with the same rows in its own memory.
struct Pair {
    std::unique_ptr<Sequence> shared, plain;
};

void change(Pair & of) {
    const int32_t n = of.plain->rows.n_tokens();
    switch (below(5)) {
        case 0: return append_both(*of.shared, *of.plain, 1 + below(40));
        case 1:
            for (int32_t i = below(50); i >= 0; i--) {
                append_both(*of.shared, *of.plain, 1);
            }
            return;
        case 2:
            if (n > 20) {
                const int32_t from = below(n), to = below(2) ? n : from + 1 + below(9);
                of.shared->remove(from, to);
                of.plain->remove(from, to);
            }
            return;
        case 3: {
            const int32_t more = 1 + below(20);
            append_both(*of.shared, *of.plain, more);
            of.shared->rows.take_back(more);
            of.plain->rows.take_back(more);
            return;
        }
        default:
            if (n > 0 && of.plain->rows.head_length(0, 1) > 0) {
                const int32_t row = below(of.plain->rows.head_length(0, 1));
                for (Sequence * seq : { of.shared.get(), of.plain.get() }) {
                    drop_row(seq->rows, 0, 1, row);
                }
            }
    }
}

// Sequences that share rows stay equal to their plain copies under random changes.
void sharing(const Storage & storage) {
    Folder folder;
    Spill  spill(folder.name());
    for (int32_t round = 0; round < 40; round++) {
        std::vector<Pair> all(1);
        all.reserve(4);
        all[0] = { std::make_unique<Sequence>(SHAPES, storage), std::make_unique<Sequence>(SHAPES, storage) };
        append_both(*all[0].shared, *all[0].plain, 30 + below(40));
        for (int32_t step = 0; step < 40; step++) {
            Pair & of = all[(size_t) below((int32_t) all.size())];
            change(of);
            if (below(6) == 0 && all.size() < 4) {
                Pair copy{ std::make_unique<Sequence>(of.shared->rows.share()), of.plain->clone() };
                all.push_back(std::move(copy));
            }
            if (below(8) == 0) {
                auto job = std::make_shared<SpillJob>();
                for (const Block & block : of.shared->rows.contents().blocks) {
                    if (const auto memory = block.layers[0].rows.memory().pages(); memory && !memory->mapped()) {
                        job->parts.push_back({ memory, nullptr });
                    }
                }
                spill.write(job);
                change(of);  // changes the sequence while its rows are written
                while (job->state == SpillJob::State::waiting) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                }
                CHECK(job->state == SpillJob::State::written);
                for (Block & block : of.shared->rows.mutable_contents().blocks) {
                    for (const Spilled & part : job->parts) {
                        if (part.from == block.layers[0].rows.memory().pages()) {
                            block.layers[0].rows.memory() = SharedPages(part.to);
                        }
                    }
                }
            }
            for (const Pair & pair : all) {
                CHECK(same_rows(pair.shared->rows, pair.plain->rows));
            }
        }
    }
}

// The rows of a layer that lies on a device are there for a copy, too.
void sharing_with_a_device() {
    Sequence seq(SHAPES, { Type::f16, Type::f16 });
    append_rows(seq, 8);
    seq.rows.release_to_device(0);
    CHECK(seq.rows.on_device(0) && seq.rows.share().on_device(0));
}

bool alike(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) { return close_to(x, y, 1e-3); });
}

// Copying the last tokens of another store gives the same sequence as entering them. If one of the tokens is missing, nothing changes.
void following(const Storage & storage) {
    for (int32_t n : { 0, 1, 5, 33, 100 }) {
        Sequence whole(SHAPES, storage), other(SHAPES, storage);
        append_both(whole, other, 50);
        append(other, 10);
        for (int32_t i = 0; i < n; i++) {
            append(other, 1);
            if (storage.quantised()) {
                CHECK(seal_generated(other.rows));
            }
        }
        Sequence rest(other);
        const int32_t more = n + 10;
        CHECK(holds_last(other.rows, more) && append_last(whole.rows, other.rows, more));
        CHECK(whole.rows.n_tokens() == other.rows.n_tokens());
        std::vector<float> ka, va, kb, vb;
        for (int32_t h = 0; h < 2; h++) {
            rows_of(whole.rows, h, ka, va);
            rows_of(other.rows, h, kb, vb);
            CHECK(alike(ka, kb) && alike(va, vb));
        }
        Sequence lacking(SHAPES, storage);
        append_rows(lacking, 50);
        drop_row(rest.rows, 0, 0, rest.rows.head_length(0, 0) - more / 2 - 1);
        CHECK(!holds_last(rest.rows, more) && !append_last(lacking.rows, rest.rows, more) && lacking.rows.n_tokens() == 50);
    }
}

}  // namespace

int main() {
    for (const Type type : { Type::f16, Type::f32 }) {
        sharing({ type, type });
        following({ type, type });
    }
    following({ Type::q8_0, Type::q8_0 });
    sharing_with_a_device();
    return failures() == 0 ? 0 : 1;
}
