// `make_seeds FOLDER` writes the seeds of fuzz_session.cpp to a folder. experiments/fuzz_seeds.py calls it.

#include "kernels/kernels.h"
#include "store/store.h"
#include "compress/compress.h"
#include "fuzz/sequences.h"
#include "system/file.h"
#include "sequence/serial.h"

#include <numeric>

using namespace kvedge;
using namespace kvedge::fuzz;

namespace {

uint32_t state = 1;

void append(Sequence & seq, int32_t n, bool image) {
    std::vector<int32_t> pos((size_t) n);
    std::iota(pos.begin(), pos.end(), seq.rows.n_tokens());
    REQUIRE(seq.rows.append(n, pos.data(), image));
    const Storage      plain = seq.rows.storage().plain();
    std::vector<float> row(64);
    for (int32_t i = 0; i < n; i++) {
        const auto at = seq.rows.place_from_end(i, n);
        for (int32_t l = 0; l < 2; l++) {
            const LayerShape & shape = seq.rows.shapes()[(size_t) l];
            for (int32_t h = 0; h < shape.n_heads_kv; h++) {
                for (float & x : row) {
                    state = state * 1664525u + 1013904223u;
                    x     = (float) (int8_t) (state >> 24) / 64.0f;
                }
                kernels().from_f32(plain.k, row.data(), k_row(at, l, h), (size_t) shape.d_k);
                kernels().from_f32(plain.v, row.data(), v_row(at, l, h), (size_t) shape.d_v);
            }
        }
    }
}

// Writes the seed of a prompt, compressed or not, and an answer. evicts: a decode policy drops rows of the answer.
void write(const std::string & folder, int32_t kind, bool compressed, bool evicts) {
    const Kind   made = kind_of(kind);
    Sequence     seq(made.shapes, made.storage);
    kvedge_plan  plan = full_plan();
    kvedge_error err{};
    Compression  outcome;
    append(seq, kind < 3 ? 12 : 33, false);
    plan.scorer       = find_scorer("knorm");
    plan.budget_ratio = compressed ? (kind < 3 ? 0.4 : 0.9) : 1.0;
    REQUIRE(compress_pending(seq, plan, 1, outcome, &err) == KVEDGE_OK);
    if (evicts) {
        seq.rows.evict(Eviction::by_place);
    }
    for (int32_t i = 0; i < 3; i++) {
        (void) seal_generated(seq.rows);
        append(seq, 1, false);
    }
    if (evicts) {
        drop_row(seq.rows, 1, 1, 1);
        drop_row(seq.rows, 1, 0, seq.rows.head_length(1, 0) - 2);
    }
    const std::string name = folder + "/kind-" + std::to_string(kind) + (compressed ? "-compressed" : "") + (evicts ? "-evicts" : "");
    FileWriter        out;
    REQUIRE(out.open(name.c_str(), &err) == KVEDGE_OK);
    const uint8_t head[] = { (uint8_t) kind, 1, 7, 3, 2, 5 };
    out.write(head, sizeof(head));
    write_sequence(seq, out);
    REQUIRE(out.commit(&err) == KVEDGE_OK);
}

// Writes the seed of a prompt with all observations.
void write_seen(const std::string & folder, int32_t kind) {
    const Kind   made = kind_of(kind);
    Sequence     seq(made.shapes, made.storage);
    kvedge_error err{};
    Observation  all;
    all.columns.fill(true);
    all.entropy = all.queries = all.peaks = true;
    all.window  = 4;
    all.moments = 0;
    REQUIRE(make_room(seq, all, 6));
    append(seq, 6, false);
    seq.observe(6, true);
    seq.observed.missing.count(6, all, true);
    FileWriter out;
    REQUIRE(out.open((folder + "/kind-" + std::to_string(kind) + "-whole").c_str(), &err) == KVEDGE_OK);
    const uint8_t head[] = { (uint8_t) kind, 3, 0, 3, 5, 8 };
    out.write(head, sizeof(head));
    write_whole(seq, out);
    REQUIRE(out.commit(&err) == KVEDGE_OK);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: make_seeds FOLDER\n");
        return 2;
    }
    for (int32_t kind = 0; kind < KINDS; kind++) {
        write(argv[1], kind, kind % 2 == 0, false);
        if (kind < 3) {
            write(argv[1], kind, kind % 2 != 0, true);
        }
    }
    write_seen(argv[1], 0);  // kinds 0 and 2 make small files
    write_seen(argv[1], 2);
    return 0;
}
