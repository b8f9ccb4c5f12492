#include "store/following.h"

#include "kernels/kernels.h"
#include "kernels/widen.h"

#include <algorithm>

namespace kvedge {

bool holds_last(const Store & store, int32_t n) {
    for (size_t l = 0; l < store.shapes().size(); l++) {
        for (int32_t h = 0; h < store.shapes()[l].n_heads_kv; h++) {
            const auto tokens = store.head_tokens((int32_t) l, h);
            const bool there  = tokens.size() >= (size_t) n && (n == 0 || tokens[tokens.size() - (size_t) n] == store.n_tokens() - n);
            if (!there) {
                return false;
            }
        }
    }
    return true;
}

namespace {

void copy_row(Store & to, const Store::Place & at, size_t l, int32_t h, const Segment & from, int32_t row, float * wide) {
    const LayerShape & shape = to.shapes()[l];
    const Storage      plain = to.storage().plain();
    kernels().widen(from.k.from(row), 1, shape.d_k, wide, (size_t) shape.d_k);
    kernels().from_f32(plain.k, wide, k_row(at, (int32_t) l, h), (size_t) shape.d_k);
    kernels().widen(from.v.from(row), 1, shape.d_v, wide, (size_t) shape.d_v);
    kernels().from_f32(plain.v, wide, v_row(at, (int32_t) l, h), (size_t) shape.d_v);
}

}  // namespace

bool append_last(Store & to, const Store & from, int32_t n) {
    const StoreContents & all = from.contents();
    if (!holds_last(from, n)) {
        return false;
    }
    std::vector<float> wide;
    for (const LayerShape & shape : to.shapes()) {
        wide.resize(std::max({ wide.size(), (size_t) shape.d_k, (size_t) shape.d_v }));
    }
    const auto last = (std::ptrdiff_t) n;
    const std::vector<int32_t> pos(all.pos.end() - last, all.pos.end());
    const std::vector<uint8_t> image(all.image.end() - last, all.image.end());
    for (int32_t i = 0; i < n; i++) {  // one token at a time, because append() gives single tokens blocks with spare room
        if (!to.append(1, pos.data() + i, false)) {
            to.take_back(i);
            return false;
        }
    }
    to.mark_images(n, image.data());
    for (size_t l = 0; l < to.shapes().size(); l++) {
        for (int32_t h = 0; !to.on_device(l) && h < to.shapes()[l].n_heads_kv; h++) {
            int32_t row = n - from.head_length((int32_t) l, h);  // index among the last n rows; negative for older rows
            each_segment(from, (int32_t) l, h, [&](const Segment & segment) {
                for (int32_t r = std::max(0, -row); r < segment.n; r++) {
                    copy_row(to, to.place_from_end(row + r, n), l, h, segment, r, wide.data());
                }
                row += segment.n;
            });
        }
    }
    return true;
}

}  // namespace kvedge
