// Compares observations with sums in double precision: the number of queries that saw each token, the entropy between text and images
// from kept queries, and the moments of queries.

#include "attention/attention.h"
#include "sequence/sequence.h"
#include "primitives/entropy.h"
#include "rows.h"

#include <algorithm>
#include <cmath>
#include <functional>

using namespace kvedge;

namespace {

// Checks the number of queries that saw each token, with an image whose tokens see each other.
void check_seen() {
    const std::vector<LayerShape> shapes = { { 0, 2, 1, 8, 8 } };
    Sequence                      seq(shapes, Storage{});
    std::vector<int32_t>          expected;
    const auto                    enter = [&](int32_t n, bool causal) {
        CHECK(make_room(seq, { { true, true } }, n));
        append(seq, n);
        seq.observe(n, causal);
        const size_t first = expected.size();
        expected.resize(first + (size_t) n, 0);
        for (size_t query = first; query < expected.size(); query++) {
            for (size_t key = 0; key <= (causal ? query : expected.size() - 1); key++) {
                expected[key]++;
            }
        }
        for (size_t t = 0; t < expected.size(); t++) {
            CHECK(seq.observed.seen()[t] == expected[t]);
        }
    };
    enter(3, true);
    enter(5, false);
    enter(1, true);
    const auto copy = seq.clone();
    enter(40, true);
    seq.remove(2, 6);
    expected.erase(expected.begin() + 2, expected.begin() + 6);
    CHECK(std::equal(expected.begin(), expected.end(), seq.observed.seen().begin()) && seq.observed.seen()[expected.size()] == 0);
    CHECK(copy->observed.seen()[0] == 9 && copy->observed.seen()[3] == 6);
    seq.close_pending();
    CHECK(seq.observed.seen().empty() && seq.score_bytes() == 0);
}

// Computes the attention of the last n tokens, which may be text or image, and keeps their queries.
void attend_and_keep(Sequence & seq, const std::vector<float> & q, int32_t n, bool causal) {
    const LayerShape &    shape = seq.rows.shapes()[0];
    std::vector<float>    out((size_t) (n * shape.n_heads * shape.d_v));
    std::vector<SpinLock> locks((size_t) shape.n_heads_kv);
    Scratch               scratch;
    CHECK(scratch.reserve(seq.rows.shapes(), seq.rows.head_length(0, 0)) && make_room(seq, { {}, true }, 0));
    seq.observe(n, causal);
    AttendJob job{};
    job.rows       = &seq.rows;
    job.n         = n;
    job.causal    = causal;
    job.q         = q.data();
    job.q_token   = (size_t) (shape.n_heads * shape.d_k);
    job.q_head    = (size_t) shape.d_k;
    job.out       = out.data();
    job.out_token = (size_t) (shape.n_heads * shape.d_v);
    job.out_head  = (size_t) shape.d_v;
    job.scale     = 0.3f;
    job.softcap   = shape.softcap;
    job.wanted    = { {}, true, true };
    job.seen      = &seq.observed;
    job.locks     = locks.data();
    for (int32_t task = 0; task < prefill_tasks(job, scratch); task++) {
        prefill_task(job, task, scratch);
    }
}

CrossAttention between(const Sequence & seq, bool from_text) {
    CrossAttention cross;
    const auto     tokens = pending_tokens(seq.rows);
    for (size_t i = 0; i < tokens.size(); i++) {
        if ((seq.rows.contents().image[(size_t) tokens[i]] != 0) == from_text) {
            cross.keys.push_back((int32_t) i);
        } else {
            cross.queries.push_back(tokens[i]);
            cross.unseen.push_back((int32_t) cross.keys.size());
        }
    }
    return cross;
}

// Checks the entropy of text attending to all image tokens, and of images to all text. The prompt's causal attention already gives half
// of the terms. q: [token][H][D].
void check_cross(const Sequence & seq, const std::vector<float> & q) {
    const int32_t H = seq.rows.shapes()[0].n_heads, D = seq.rows.shapes()[0].d_k;
    const auto    tokens = pending_tokens(seq.rows);
    const float   cap    = seq.rows.shapes()[0].softcap;
    for (bool from_text : { true, false }) {
        const CrossAttention cross = between(seq, from_text);
        for (int32_t head = 0; head < 2; head++) {
            std::vector<float> k, v;
            rows_of(seq.rows, head, k, v);
            const size_t old      = k.size() / (size_t) D - tokens.size();
            double       expected = 0.0;
            for (int32_t token : cross.queries) {
                for (int32_t h = 2 * head; h < 2 * head + 2; h++) {
                    double total = 0.0, weighted = 0.0;
                    for (int32_t key : cross.keys) {
                        double s = 0.0;
                        for (int32_t i = 0; i < D; i++) {
                            s += 0.3 * (double) q[(size_t) ((token * H + h) * D + i)] * (double) k[(old + (size_t) key) * (size_t) D + (size_t) i];
                        }
                        s = cap != 0.0f ? cap * std::tanh(s / cap) : s;
                        total += std::exp(s);
                        weighted += s * std::exp(s);
                    }
                    expected += std::log(total) - weighted / total;
                }
            }
            CHECK(close_to(attention_entropy(seq.rows.shapes()[0], seq.rows.view(0, head), seq.observed.queries.of(0), head, cross), expected, 1e-4));  // queries in half precision
        }
    }
}

void check_kept_queries(float softcap) {
    constexpr int32_t             H = 4, D = 24;
    const std::vector<LayerShape> shapes = { { 0, H, 2, D, 8, softcap } };
    Sequence                      seq(shapes, Storage{ Type::f32, Type::f32 });
    std::vector<float>            q;  // [token][H][D]
    const auto                    enter = [&](int32_t n, bool causal, const std::function<bool(int32_t)> & image) {
        CHECK(make_room(seq, { {}, false, true }, n));
        append(seq, n);
        std::vector<uint8_t> mask;
        for (int32_t i = 0; i < n; i++) {
            mask.push_back(image(i) ? 1 : 0);
        }
        seq.rows.mark_images(n, mask.data());
        const auto part = random_floats((size_t) (n * H * D));
        attend_and_keep(seq, part, n, causal);
        q.insert(q.end(), part.begin(), part.end());
    };
    const auto text = [](int32_t) { return false; };
    enter(9, true, text);
    enter(70, false, [](int32_t) { return true; });  // an image whose tokens see each other
    enter(1, true, text);
    check_cross(seq, q);
    enter(640, true, [](int32_t i) { return i % 100 > 30; });
    check_cross(seq, q);
    const auto copy      = seq.clone();
    const auto copy_of_q = q;
    enter(5, true, text);
    seq.remove(715, 800);  // removes one span of queries and a part of another span
    q.resize((size_t) (715 * H * D));
    CHECK(seq.observed.queries.of(0).size() == 4 && seq.rows.n_tokens() == 715);
    check_cross(seq, q);
    check_cross(*copy, copy_of_q);
    CHECK(seq.score_bytes() >= (uint64_t) (720 * H * D * 2));
    enter(20, true, text);  // new tokens after the removal
    check_cross(seq, q);
    seq.close_pending();  // the entropy of the next turn starts anew
    enter(33, true, [](int32_t i) { return i % 2 == 0; });
    check_cross(seq, q);
}

// Checks mean and covariance of queries whose mean is far from 0, added in blocks of different lengths.
void check_moments() {
    constexpr int32_t H = 3, D = 24;
    QueryMoments      moments(H, D);
    MomentsScratch    scratch;
    CHECK(scratch.reserve(D));
    std::vector<std::vector<float>> rows(H);  // [head] of [n][D]
    for (int32_t n : { 1, MomentsScratch::BLOCK, 7, MomentsScratch::BLOCK, 30 }) {
        for (int32_t h = 0; h < H; h++) {
            auto part = random_floats((size_t) (n * D));
            for (size_t i = 0; i < part.size(); i++) {
                part[i] += 50.0f * (float) h + (float) (i % D);
            }
            rows[(size_t) h].insert(rows[(size_t) h].end(), part.begin(), part.end());
            for (int32_t t = 0; t < n; t++) {
                std::copy_n(part.begin() + t * D, D, scratch.x + (size_t) t * scratch.ld);
            }
            moments.add(h, scratch.x, scratch.ld, n, scratch.across, scratch.tile);
        }
    }
    const QueryMoments copy = moments;
    moments                 = {};
    CHECK(moments.empty() && moments.bytes() == 0 && copy.bytes() == QueryMoments::bytes(H, D));
    for (int32_t h = 0; h < H; h++) {
        const auto &        all = rows[(size_t) h];
        const size_t        n   = all.size() / D;
        std::vector<double> mean, covariance, center(D, 0.0);
        copy.read(h, mean, covariance);
        CHECK(copy.count(h) == (int32_t) n);
        for (size_t i = 0; i < all.size(); i++) {
            center[i % D] += (double) all[i] / (double) n;
        }
        for (size_t i = 0; i < D; i++) {
            CHECK(close_to(mean[i], center[i], 1e-6));
            for (size_t j = 0; j < D; j++) {
                double expected = 0.0;
                for (size_t t = 0; t < n; t++) {
                    expected += ((double) all[t * D + i] - center[i]) * ((double) all[t * D + j] - center[j]) / (double) n;
                }
                CHECK(close_to(covariance[i * D + j], expected, 1e-5));
            }
        }
    }
}

}  // namespace

int main() {
    check_seen();
    check_moments();
    check_kept_queries(0.0f);
    check_kept_queries(2.0f);
    std::fprintf(stderr, "%d failures\n", failures());
    return failures() != 0;
}
