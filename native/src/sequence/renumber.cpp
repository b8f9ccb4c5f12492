#include "sequence/renumber.h"

#include "kernels/kernels.h"
#include "kernels/quantise.h"
#include "system/threads.h"

#include <algorithm>

namespace kvedge {

namespace {

// Sets out [token] to 1 for each token that any head of the store holds.
void mark_held(const Store & rows, std::vector<uint8_t> & out) {
    for (const Block & block : rows.contents().blocks) {
        for (size_t l = 0; l < block.layers.size(); l++) {
            for (int32_t h = 0; h < rows.shapes()[l].n_heads_kv; h++) {
                for (int32_t token : block.tokens_of((int32_t) l, h)) {
                    out[(size_t) token] = 1;
                }
            }
        }
    }
}

// Returns [next + 1]: for each position, how many smaller positions are occupied by a token that a head or `whole` holds.
std::vector<int32_t> taken_before(const Store & rows, const Store * whole, bool images_extend, int32_t next) {
    const auto &         pos   = rows.contents().pos;
    const auto &         image = rows.contents().image;
    std::vector<uint8_t> held(pos.size(), 0);
    mark_held(rows, held);
    if (whole) {
        mark_held(*whole, held);
    }
    std::vector<int32_t> out((size_t) next + 1, 0);
    int32_t              end = next, after = next;  // position of the next token; smallest larger position of a later token
    for (size_t t = pos.size(); t-- > 0;) {
        after = pos[t] < end ? end : after;
        end   = pos[t];
        if (held[t]) {
            const int32_t last = images_extend && image[t] ? after : pos[t] + 1;
            std::fill(out.begin() + pos[t] + 1, out.begin() + last + 1, 1);
        }
    }
    for (size_t p = 1; p < out.size(); p++) {
        out[p] += out[p - 1];
    }
    return out;
}

// Turns rows by a number of positions. The constructor and the caller take all memory, so that turning cannot throw.
struct Turner {
    std::vector<float>  row;
    std::vector<double> wide;
    Turn                by;
    int32_t             positions = 0;  // number of positions that `by` turns; 0: `by` is not set

    explicit Turner(int32_t d) : row((size_t) d), wide((size_t) d) {}

    void set(const Rotation & rotation, int32_t n) {
        if (n != positions) {
            turn_into(rotation, n, by);
            positions = n;
        }
    }
    // Turns x [wide.size()] in place.
    void turn_row(const Rotation & rotation, float * x) {
        std::copy_n(x, wide.size(), wide.begin());
        turn(rotation, by, wide.data(), 1);
        std::transform(wide.begin(), wide.end(), x, [](double y) { return (float) y; });
    }
};

using Shifts = std::vector<int32_t>;  // [token] change of the token's position

void turn_keys(LayerRows & rows, int32_t head, const std::vector<int32_t> & tokens, const Shifts & by, const Rotation & rotation, Turner & with) {
    const auto            d     = (size_t) rows.shape().d_k;
    const uint8_t * const begin = rows.data();
    size_t                at    = 0;
    rows.each_segment(head, [&](const Segment & segment) {
        uint8_t * key = rows.data() + (segment.k.data - begin);
        for (int32_t r = 0; r < segment.n; r++, key += segment.k.stride) {
            const int32_t n = by[(size_t) tokens[at++]];
            if (n != 0) {
                with.set(rotation, n);
                kernels().widen(segment.k.from(r), 1, (int32_t) d, with.row.data(), d);
                with.turn_row(rotation, with.row.data());
                if (is_quantised(segment.k.type)) {
                    quantise_row(segment.k.type, with.row.data(), (int32_t) d, key);
                } else {
                    kernels().from_f32(segment.k.type, with.row.data(), key, d);
                }
            }
        }
    });
}

// Turns the window queries of the tokens from `from` on, because scorers multiply them with the turned keys.
void turn_window(LayerSeen & seen, const LayerShape & shape, const Shifts & by, int32_t from, const Rotation & rotation, Turner & with) {
    if (seen.window.row == 0 || seen.window.q.empty()) {
        return;
    }
    const auto n_slots = (int32_t) (seen.window.q.size() / seen.window.row);
    for (int32_t t = std::max({ 0, from, (int32_t) by.size() - n_slots }); t < (int32_t) by.size(); t++) {
        with.set(rotation, by[(size_t) t]);
        float * q = seen.window.slot(t);
        for (int32_t h = 0; h < shape.n_heads && by[(size_t) t] != 0; h++) {
            with.turn_row(rotation, q + (size_t) h * (size_t) shape.d_k);
        }
    }
}

}  // namespace

Moved move_positions(const Store & rows, const Store * whole, bool images_extend, int32_t next, int32_t most) {
    const int32_t surplus = next - most;
    Moved         out{ rows.contents().pos, std::min(next, most) };
    if (surplus <= 0) {
        return out;
    }
    const auto before = taken_before(rows, whole, images_extend, next);
    int32_t    first  = next - most / 2;
    int64_t    room   = most - most / 2, n = before[(size_t) first];
    if (next - before.back() >= surplus) {
        for (first = 0; first - before[(size_t) first] < surplus;) {
            first++;
        }
        room = n = 1;
    }
    for (int32_t & p : out.pos) {
        p = p >= first ? p - surplus : (int32_t) (before[(size_t) p] * room / n);
    }
    return out;
}

void move_to(Sequence & seq, Moved && to, int32_t n_threads) {
    StoreContents & all    = seq.rows.mutable_contents();
    const auto &    shapes = seq.rows.shapes();
    Shifts          by(to.pos.size());
    std::transform(to.pos.begin(), to.pos.end(), all.pos.begin(), by.begin(), [](int32_t now, int32_t was) { return now - was; });
    const auto moves = [&](int32_t token) { return by[(size_t) token] != 0; };
    for (Block & block : all.blocks) {
        for (size_t l = 0; l < block.layers.size(); l++) {
            bool any = false;
            for (int32_t h = 0; h < shapes[l].n_heads_kv && !any; h++) {
                const auto & tokens = block.tokens_of((int32_t) l, h);
                any                 = std::any_of(tokens.begin(), tokens.end(), moves);
            }
            if (any) {  // own() copies mapped rows to memory, so call it only for rows that turn
                block.layers[l].rows.memory().own();
            }
        }
    }
    const bool          observed = seq.observed.have().any();
    const int32_t       workers  = std::max(1, std::min(n_threads, (int32_t) shapes.size()));
    std::vector<Turner> turners;  // [layer]
    for (size_t l = 0; l < shapes.size(); l++) {
        turners.emplace_back(shapes[l].d_k);
        turners[l].by.cos.resize(seq.observed.rotation(l).angles.size());
        turners[l].by.sin.resize(seq.observed.rotation(l).angles.size());
    }
    const std::function<void(int32_t, int32_t)> turn_layer = [&](int32_t layer, int32_t) {
        const auto       l        = (size_t) layer;
        const Rotation & rotation = seq.observed.rotation(l);
        for (Block & block : all.blocks) {
            for (int32_t h = 0; h < shapes[l].n_heads_kv; h++) {
                turn_keys(block.layers[l].rows, h, block.tokens_of(layer, h), by, rotation, turners[l]);
            }
        }
        if (observed) {
            turn_window(seq.observed.layer(l), shapes[l], by, seq.observed.window_from(), rotation, turners[l]);
            seq.observed.layer(l).moments.set_next_position(to.next);
        }
    };
    parallel_for(workers, (int32_t) shapes.size(), turn_layer);
    all.pos.swap(to.pos);
}

}  // namespace kvedge
