// Fuzzes session files: the frame, the sequence in it, and the operations of a conversation on a sequence that was read.
//
// Input: the kind of sequence, flags, four bytes for four operations, and a file. With flag 1 only the payload of a file: the target
// adds frame and checksums, which a fuzzer cannot guess. With flag 2 the sequence has whole rows and their observation.

#include "kernels/kernels.h"
#include "store/store.h"
#include "compress/compress.h"
#include "compress/stream.h"
#include "fuzz/sequences.h"
#include "system/crc32.h"
#include "sequence/frame.h"
#include "sequence/serial.h"

#include <numeric>

using namespace kvedge;
using namespace kvedge::fuzz;

namespace {

struct Memory : Sink {
    std::vector<uint8_t> bytes;
    void write(const void * data, size_t size) override {
        Sink::write(data, size);
        bytes.insert(bytes.end(), (const uint8_t *) data, (const uint8_t *) data + size);
    }
};

std::vector<uint8_t> framed(const uint8_t * payload, size_t size) {
    Memory out;
    write_head(out, KVEDGE_SESSION_VERSION, "model", "note", 4, size);
    out.value<uint32_t>(crc32(0, out.bytes.data(), out.bytes.size()));
    out.write(payload, size);
    out.value<uint32_t>(crc32(0, payload, size));
    return std::move(out.bytes);
}

// Reads a sequence as kvedge_unpack does, without the parts of llama.cpp and of the cache's state. NULL: the file is invalid.
std::unique_ptr<Sequence> read_file(const std::vector<uint8_t> & file, const Kind & kind, bool whole) {
    BytesReader  in(file.data(), file.size());
    Frame        frame;
    kvedge_error err{};
    if (checked_status(read_frame(in, "a file", frame, &err), err) != KVEDGE_OK) {
        return nullptr;
    }
    REQUIRE(frame.note.size() == frame.note_bytes && frame.payload_bytes + 4 == in.left());
    in.limit_to(frame.payload_bytes);
    auto           seq      = whole ? read_whole(in, kind.shapes, kind.storage) : read_sequence(in, kind.shapes, kind.storage);
    const uint32_t expected = in.take_checksum();
    uint32_t       sum      = 0;
    const bool     all      = in.left() == 0;
    in.unlimit();
    return seq && all && in.value(sum) && sum == expected ? std::move(seq) : nullptr;
}

// Reads the keys, values and token indices of every KV head, and returns a checksum of keys and token indices.
uint32_t visit(const Sequence & seq) {
    uint32_t           sum = 0;
    std::vector<float> wide;
    std::vector<double> scores;
    for (size_t l = 0; l < seq.rows.shapes().size(); l++) {
        const LayerShape & shape = seq.rows.shapes()[l];
        for (int32_t h = 0; h < shape.n_heads_kv; h++) {
            int32_t n = 0;
            each_segment(seq.rows, (int32_t) l, h, [&](const Segment & s) {
                wide.assign((size_t) s.n * (size_t) (shape.d_k + shape.d_v), 0.0f);
                kernels().widen(s.k, s.n, shape.d_k, wide.data(), (size_t) shape.d_k);
                kernels().widen(s.v, s.n, shape.d_v, wide.data() + (size_t) s.n * (size_t) shape.d_k, (size_t) shape.d_v);
                sum = crc32(sum, wide.data(), wide.size() * sizeof(float));
                n += s.n;
            });
            REQUIRE(n == seq.rows.head_length((int32_t) l, h));
            const auto tokens = seq.rows.head_tokens((int32_t) l, h);
            REQUIRE((int32_t) tokens.size() == n && (n == 0 || (tokens.front() >= 0 && tokens.back() < seq.rows.n_tokens())));
            sum = crc32(sum, tokens.data(), tokens.size() * sizeof(int32_t));
            scores.resize((size_t) n);
            read_scores(seq.rows, (int32_t) l, h, scores.data());
        }
    }
    return sum;
}

// Returns plan number `which`. observing: its scorer uses observations of the prompt's attention.
kvedge_plan plan_of(uint8_t which, bool observing) {
    const char * const plain[]   = { "position", "knorm", "vnorm", "random", "keydiff" };
    const char * const seen[]    = { "cumulative", "window", "expected", "mean", "modal" };
    const char * const * scorers = observing ? seen : plain;
    const char * const reducers[] = { "evict", "pivotal", "weighted" };
    kvedge_plan          plan    = full_plan();
    REQUIRE(kvedge_plan_set(&plan, "scorer", scorers[which % 5], nullptr) == KVEDGE_OK);
    plan.reducer            = find_reducer(reducers[which / 5 % 3]);
    plan.budget_ratio       = which & 128 ? 0.5 : 0.0;
    plan.budget_pairs       = which & 128 ? 0 : 4;
    plan.sinks              = 1;
    return plan;
}

void append(Sequence & seq, const kvedge_plan & plan, int32_t n) {
    if (n == 1) {
        (void) seal_generated(seq.rows);
    }
    std::vector<int32_t> pos((size_t) n);
    std::iota(pos.begin(), pos.end(), seq.rows.n_tokens());
    if (!make_room(seq, plan_observes(plan), n) || !seq.rows.append(n, pos.data(), n % 2 == 0)) {
        return;
    }
    seq.observe(n, true);
    for (int32_t i = 0; i < n; i++) {
        const auto at = seq.rows.place_from_end(i, n);
        for (size_t l = 0; l < seq.rows.shapes().size(); l++) {
            const LayerShape & shape = seq.rows.shapes()[l];
            for (int32_t h = 0; h < shape.n_heads_kv; h++) {
                memset(k_row(at, (int32_t) l, h), 0x35, row_k(shape, seq.rows.storage().plain().k));
                memset(v_row(at, (int32_t) l, h), 0x36, row_v(shape, seq.rows.storage().plain().v));
            }
        }
    }
}

void save_and_load(std::unique_ptr<Sequence> & seq, const Kind & kind, bool whole) {
    if (whole ? seq->rows.evicting() : seq->observed.have().any()) {
        return;  // prepare_saving refuses it
    }
    Memory out, again;
    whole ? write_whole(*seq, out) : write_sequence(*seq, out);
    auto back = read_file(framed(out.bytes.data(), out.bytes.size()), kind, whole);
    REQUIRE(back && visit(*back) == visit(*seq));
    if (whole) {
        write_whole(*back, again);
        REQUIRE(again.bytes == out.bytes);
    }
    seq = std::move(back);
}

// Does operation `what` on a sequence, then reads the whole sequence.
void act(std::unique_ptr<Sequence> & seq, const Kind & kind, bool whole, uint8_t what) {
    const kvedge_plan plan = plan_of(what, whole);
    const int32_t     n    = seq->rows.n_tokens();
    Compression       outcome;
    kvedge_error      err{};
    switch (what % 8) {
        case 0: append(*seq, plan, 1 + what % 40); break;
        case 1: append(*seq, plan, 1); break;
        case 2: seq->remove(what % (n + 1), what & 64 ? n : what % (n + 1) + 3); break;
        case 3:
            if (!seq->rows.evicting()) {
                (void) checked_status(compress_pending(*seq, plan, 1, outcome, &err), err);
            }
            break;
        case 4:
            if (!seq->rows.evicting() && check_stream(plan, &err) == KVEDGE_OK && open_stream(*seq, plan, &err) == KVEDGE_OK) {
                (void) checked_status(compress_stream(*seq, plan, 1, outcome, &err), err);
            }
            break;
        case 5: save_and_load(seq, kind, whole); break;
        case 6:
            if (whole && kind.shapes[0].d_k % GROUP == 0 && !seq->rows.evicting()) {
                REQUIRE(seal_whole(seq->rows, { Type::q8_0, Type::q8_0 }, 1));
            }
            break;
        default:
            drop_empty_blocks(seq->rows);
            pack_if_sparse(seq->rows);
            seq = seq->clone();
            REQUIRE(seq != nullptr);
    }
    (void) visit(*seq);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    Input         in(data, size);
    const Kind    kind  = kind_of(in.byte() % KINDS);
    const uint8_t flags = in.byte();
    uint8_t       acts[4];
    for (uint8_t & act : acts) {
        act = in.byte();
    }
    const auto file = flags & 1 ? framed(in.rest(), in.left()) : std::vector<uint8_t>(in.rest(), in.rest() + in.left());
    const bool whole = (flags & 2) != 0;
    auto       seq   = read_file(file, kind, whole);
    if (!seq) {
        return 0;
    }
    REQUIRE(seq->rows.bytes() <= 16 * file.size() + (64u << 20));
    (void) visit(*seq);
    for (const uint8_t what : acts) {
        act(seq, kind, whole, what);
    }
    return 0;
}
