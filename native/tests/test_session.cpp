// Writes sequences to files and reads them back: rows are equal, and invalid files do no harm. Mainly for sanitizers.

#include "kernels/kernels.h"
#include "store/store.h"
#include "check.h"
#include "system/crc32.h"
#include "system/file.h"
#include "sequence/serial.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <string>

using namespace kvedge;

namespace {

std::mt19937      rng(5);
// the name is random, as several runs of this test may run at the same time
const std::string path =
    (std::filesystem::temp_directory_path() / ("kvedge-test-" + std::to_string(std::random_device{}()) + ".kvs")).u8string();

int32_t below(int32_t n) { return (int32_t) (rng() % (uint32_t) n); }

void fill(LayerRows & rows) {
    for (size_t i = 0; i < rows.bytes(); i++) {
        rows.data()[i] = (uint8_t) rng();
    }
}

// Makes a sequence with a compressed block, an uncompressed prompt and a few generated tokens. gaps: rows were dropped.
std::unique_ptr<Sequence> make(const std::vector<LayerShape> & shapes, const Storage & type, bool gaps) {
    auto                 seq = std::make_unique<Sequence>(shapes, type);
    std::vector<int32_t> pos(700);
    std::iota(pos.begin(), pos.end(), 0);
    seq->rows.append(100, pos.data(), true);
    Block ragged;
    ragged.kind = type.quantised() ? BlockKind::open : BlockKind::ragged;
    ragged.layers.resize(shapes.size());
    for (size_t l = 0; l < shapes.size(); l++) {
        auto &                  heads = ragged.layers[l].heads;
        std::vector<StoredRows> stored;
        heads.resize((size_t) shapes[l].n_heads_kv);
        for (auto & head : heads) {
            for (int32_t t = 0; t < 100; t += 1 + below(5)) {
                head.tokens.push_back(t);
            }
            for (int32_t i = 0; l % 2 == 1 && i < head.length(); i++) {
                head.biases.push_back((float) below(100) / 16.0f - 2.0f);
            }
            stored.push_back({ head.length(), stored_keys(type, head.length()), stored_values(type, head.length()) });
        }
        ragged.layers[l].rows = LayerRows(shapes[l], type, stored);
        CHECK(ragged.layers[l].rows.take());
    }
    replace_pending(seq->rows, std::move(ragged), Block());
    seq->close_pending();
    seq->rows.append(400, pos.data() + 100, false);
    if (gaps) {
        seq->close_pending();
        seq->rows.evict(type.k == Type::f32 ? Eviction::by_score : Eviction::by_place);
    }
    for (int32_t i = 0; i < 70; i++) {
        CHECK(seal_generated(seq->rows));
        seq->rows.append(1, pos.data() + 500 + i, false);
    }
    StoreContents contents = std::move(seq->rows.mutable_contents());
    for (auto & block : contents.blocks) {
        for (auto & layer : block.layers) {
            fill(layer.rows);
            for (auto & head : layer.heads) {
                for (double & score : head.scores) {
                    score = (double) rng();
                }
            }
        }
    }
    seq = std::make_unique<Sequence>(Store(shapes, type, std::move(contents)));
    for (size_t l = 0; gaps && l < shapes.size(); l++) {
        for (int32_t h = 0; h < shapes[l].n_heads_kv; h++) {
            for (int32_t i = 0; i < 150 + below(20); i++) {
                drop_row(seq->rows, (int32_t) l, h, 40 + below(60));
            }
            drop_row(seq->rows, (int32_t) l, h, seq->rows.head_length((int32_t) l, h) - 2);  // in the growing block
        }
    }
    return seq;
}

std::vector<uint8_t> bytes_of(const Sequence & seq) {
    kvedge_error err{};
    FileWriter   out;
    CHECK(out.open(path.c_str(), &err) == KVEDGE_OK);
    write_sequence(seq, out);
    Sink nowhere;
    write_sequence(seq, nowhere);
    CHECK(nowhere.size() == out.size());
    CHECK(out.commit(&err) == KVEDGE_OK);
    std::vector<uint8_t> data((size_t) out.size());
    FileReader           in;
    CHECK(in.open(path.c_str(), &err) == KVEDGE_OK && in.size() == data.size() && in.read(data.data(), data.size()));
    CHECK(in.left() == 0 && !in.read(data.data(), 1) && in.take_checksum() == out.take_checksum());
    return data;
}

void put(const std::vector<uint8_t> & data) {
    std::ofstream file(std::filesystem::u8path(path), std::ios::binary);
    CHECK(file.write((const char *) data.data(), (std::streamsize) data.size()).flush().good());
}

std::unique_ptr<Sequence> read(const std::vector<LayerShape> & shapes, const Storage & type) {
    kvedge_error err{};
    FileReader   in;
    CHECK(in.open(path.c_str(), &err) == KVEDGE_OK);
    try {
        return read_sequence(in, shapes, type);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

// Returns a checksum of the keys and values of every KV head, which does not depend on the blocks.
uint32_t visit(const Sequence & seq) {
    uint32_t           k = 0, v = 0;
    std::vector<float> wide;
    for (const LayerShape & shape : seq.rows.shapes()) {
        const auto l = (int32_t) (&shape - seq.rows.shapes().data());
        for (int32_t h = 0; h < shape.n_heads_kv; h++) {
            each_segment(seq.rows, l, h, [&](const Segment & s) {
                wide.resize((size_t) s.n * (size_t) std::max(shape.d_k, shape.d_v));
                kernels().widen(s.k, s.n, shape.d_k, wide.data(), (size_t) shape.d_k);
                k = crc32(k, wide.data(), (size_t) s.n * (size_t) shape.d_k * sizeof(float));
                kernels().widen(s.v, s.n, shape.d_v, wide.data(), (size_t) shape.d_v);
                v = crc32(v, wide.data(), (size_t) s.n * (size_t) shape.d_v * sizeof(float));
            });
        }
    }
    return k ^ (v << 1 | v >> 31);
}

bool same_biases(const Sequence & a, const Sequence & b, int32_t layer, int32_t head) {
    std::vector<float> of_a((size_t) a.rows.head_length(layer, head)), of_b((size_t) b.rows.head_length(layer, head));
    read_biases(a.rows, layer, head, of_a.data());
    read_biases(b.rows, layer, head, of_b.data());
    return of_a == of_b && std::any_of(of_a.begin(), of_a.end(), [](float x) { return x != 0.0f; }) == (layer == 1);
}

void test_there_and_back(const std::vector<LayerShape> & shapes, const Storage & type, bool gaps) {
    const auto seq  = make(shapes, type, gaps);
    const auto data = bytes_of(*seq);
    const auto back = read(shapes, type);
    CHECK(back != nullptr);
    if (!back) {
        return;
    }
    CHECK(visit(*back) == visit(*seq));
    CHECK(back->rows.contents().pos == seq->rows.contents().pos && back->rows.contents().image == seq->rows.contents().image);
    CHECK(back->rows.bytes() <= seq->rows.bytes());
    for (size_t l = 0; l < shapes.size(); l++) {
        for (int32_t h = 0; h < shapes[l].n_heads_kv; h++) {
            CHECK(back->rows.head_tokens((int32_t) l, h) == seq->rows.head_tokens((int32_t) l, h));
        }
    }
    const int32_t next = 570;
    CHECK(back->rows.append(1, &next, false) && seq->rows.append(1, &next, false));
    for (Sequence * to : { back.get(), seq.get() }) {
        for (size_t l = 0; l < shapes.size(); l++) {
            for (int32_t h = 0; h < shapes[l].n_heads_kv; h++) {
                const auto at = to->rows.place_from_end(0, 1);
                memset(k_row(at, (int32_t) l, h), 7, row_k(shapes[l], type.plain().k));
                memset(v_row(at, (int32_t) l, h), 8, row_v(shapes[l], type.plain().v));
            }
        }
    }
    CHECK(gaps || back->rows.pending_length() == seq->rows.pending_length());
    for (size_t l = 0; l < shapes.size(); l++) {
        for (int32_t h = 0; h < shapes[l].n_heads_kv; h++) {
            const auto          n = (size_t) seq->rows.head_length((int32_t) l, h);
            std::vector<double> a(n), b(n);
            read_scores(seq->rows, (int32_t) l, h, a.data());
            read_scores(back->rows, (int32_t) l, h, b.data());
            CHECK(a == b);
            CHECK(same_biases(*seq, *back, (int32_t) l, h));
            drop_row(back->rows, (int32_t) l, h, (int32_t) n - 3);
            drop_row(seq->rows, (int32_t) l, h, (int32_t) n - 3);
            CHECK(back->rows.head_tokens((int32_t) l, h) == seq->rows.head_tokens((int32_t) l, h));
        }
    }
    drop_empty_blocks(back->rows);
    pack_if_sparse(back->rows);
    CHECK(visit(*back) == visit(*seq));
    for (size_t l = 0; l < shapes.size(); l++) {
        CHECK(same_biases(*seq, *back, (int32_t) l, 0));
    }
}

// Damages or truncates the bytes of a whole sequence: reading fails, or the sequence can be used and takes more tokens.
void lie_about(const std::vector<uint8_t> & good, const Observation & all, const std::vector<LayerShape> & shapes, const Storage & type, int32_t every) {
    const std::vector<int32_t> pos(5, 60);
    const int32_t edge[] = { -1, 0, 1, 59, INT32_MAX, INT32_MIN };
    for (int32_t i = 0; i < 1000; i += every) {
        auto         bad = good;
        const size_t at  = (size_t) below((int32_t) bad.size() - 4);
        i % 3 == 2 ? bad.resize(at) : (void) memcpy(bad.data() + (i % 3 == 1 ? bad.size() - 4 - at % 2000 : at), &edge[below(6)], 4);
        BytesReader reader(bad.data(), bad.size());
        try {
            if (const auto other = read_whole(reader, shapes, type)) {
                CHECK(make_room(*other, all, 5) && other->rows.append(5, pos.data(), false));
                other->observe(5, true);
                other->remove(10, 30);
            }
        } catch (const std::bad_alloc &) {
        }
    }
}

// The observations of a sequence are read back equal; damaged observations do no harm.
void test_whole(const std::vector<LayerShape> & shapes, const Storage & type, int32_t every) {
    Observation all;
    all.columns.fill(true);
    all.entropy = all.queries = all.peaks = true;
    all.window  = 8;
    all.moments = 2;
    Sequence             seq(shapes, type);
    std::vector<int32_t> pos(60);
    std::iota(pos.begin(), pos.end(), 0);
    for (int32_t n : { 40, 20 }) {
        CHECK(make_room(seq, all, n) && seq.rows.append(n, pos.data() + seq.rows.n_tokens(), n == 20));
        seq.observe(n, true);
        seq.observed.missing.count(n, all, true);
    }
    for (size_t l = 0; l < shapes.size(); l++) {
        LayerSeen & seen = seq.observed.layer(l);
        for (double & x : seen.columns.sums()) {
            x = (double) rng() / 7.0;
        }
        for (float & x : seen.window.q) {
            x = (float) rng() / 3.0f;
        }
        seen.window.sinks.assign((size_t) shapes[l].n_heads, 0.25f);
    }
    seq.observed.skip_windows(3);
    const auto good = [&] {
        kvedge_error err{};
        FileWriter   out;
        CHECK(out.open(path.c_str(), &err) == KVEDGE_OK);
        write_whole(seq, out);
        CHECK(out.commit(&err) == KVEDGE_OK);
        std::vector<uint8_t> data((size_t) out.size());
        FileReader           in;
        CHECK(in.open(path.c_str(), &err) == KVEDGE_OK && in.read(data.data(), data.size()));
        return data;
    }();
    BytesReader in(good.data(), good.size());
    const auto  back = read_whole(in, shapes, type);
    CHECK(back && in.left() == 0);
    if (!back) {
        return;
    }
    CHECK(visit(*back) == visit(seq) && back->observed.missing.of == seq.observed.missing.of && back->observed.window_from() == 3);
    CHECK(back->observed.seen() == seq.observed.seen() && back->observed.n_entropies() == 60 && back->observed.modality() == seq.observed.modality());
    CHECK(back->observed.have().window == 8 && back->observed.have().moments == 2 && back->observed.have().queries && back->observed.queries.of(1).size() == 2);
    for (size_t l = 0; l < shapes.size(); l++) {
        const LayerSeen & a = seq.observed.layer(l), & b = back->observed.layer(l);
        CHECK(a.columns.of == b.columns.of && a.entropy == b.entropy && a.window.q == b.window.q &&
              a.window.sinks == b.window.sinks && a.window.row == b.window.row && a.peaks.highest == b.peaks.highest);
    }
    lie_about(good, all, shapes, type, every);
}

// A file with a bias that is not finite or exceeds MOST_BIAS is refused.
void test_bad_biases(const std::vector<LayerShape> & shapes) {
    const Storage type = { Type::f16, Type::f16 };
    for (float bad : { NAN, INFINITY, -INFINITY, 2.0f * MOST_BIAS, -2.0f * MOST_BIAS, MOST_BIAS }) {
        auto          seq      = make(shapes, type, false);
        StoreContents contents = std::move(seq->rows.mutable_contents());
        contents.blocks[0].layers[1].heads[0].biases[3] = bad;
        seq = std::make_unique<Sequence>(Store(shapes, type, std::move(contents)));
        CHECK(biased(seq->rows));
        (void) bytes_of(*seq);
        CHECK((read(shapes, type) != nullptr) == (bad == MOST_BIAS));
    }
}

// Damages the bytes of a sequence in 1000 ways. every: tries only each every-th way.
void test_lies(const std::vector<LayerShape> & shapes, const Storage & type, bool gaps, int32_t every) {
    const auto    seq  = make(shapes, type, gaps);
    const auto    good = bytes_of(*seq);
    const int32_t edge[] = { -1, 0, 1, 100, 257, INT32_MAX, INT32_MIN };
    for (int32_t i = 0; i < 1000; i += every) {
        auto       bad = good;
        const auto at  = (size_t) below((int32_t) bad.size() - 4);
        if (i % 3 == 0) {
            bad[at] ^= (uint8_t) (1 << below(8));
        } else if (i % 3 == 1) {
            memcpy(bad.data() + at / 4 * 4, &edge[below(7)], 4);
        } else {
            bad.resize(at);
        }
        put(bad);
        if (const auto back = read(shapes, type)) {
            CHECK(back->rows.bytes() <= 16 * good.size() + (64u << 20));
            (void) visit(*back);
            back->remove(50, 300);
            const int32_t next = 570;
            CHECK(back->rows.append(1, &next, false));
            CHECK(back->rows.place_from_end(0, 1).block != nullptr);
            (void) visit(*back);
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    const int32_t every    = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
    const char    digits[] = "123456789";
    CHECK(crc32(0, digits, 9) == 0xCBF43926u);  // the standard check value of CRC-32
    CHECK(crc32(crc32(0, digits, 4), digits + 4, 5) == 0xCBF43926u);
    const std::vector<LayerShape> shapes = { { 0, 4, 2, 16, 8 }, { 3, 4, 4, 8, 8 } };
    const std::vector<LayerShape> blocks = { { 0, 4, 2, 32, 64 }, { 3, 4, 4, 64, 32 } };
    std::vector<Storage> storages = { { Type::f16, Type::f16 }, { Type::f32, Type::f32 }, { Type::f32, Type::bf16 } };
    for (int32_t i = 0; FORMATS.of[i].name; i++) {
        if (is_quantised((Type) i)) {
            storages.push_back({ of_keys((Type) i), FORMATS.of[i + 1].name ? (Type) (i + 1) : Type::f32 });
        }
    }
    test_bad_biases(shapes);
    test_whole(shapes, { Type::f16, Type::f16 }, every);
    for (const Storage & storage : storages) {
        for (bool gaps : { false, true }) {
            test_there_and_back(storage.quantised() ? blocks : shapes, storage, gaps);
            test_lies(storage.quantised() ? blocks : shapes, storage, gaps, every);
        }
    }
    std::filesystem::remove(std::filesystem::u8path(path));
    return failures() > 0;
}
